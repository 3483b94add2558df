"""`AutoTrainer`: chooses the algorithm by the task and says why."""

from __future__ import annotations

from typing import Any

from verl.algorithms.select import AlgorithmChoice, choose_algorithm
from verl.trainer.configure import configure
from verl.trainer.grpo import GRPOTrainer
from verl.trainer.ppo import PPOTrainer, RLTrainer

_NAMES = {"grpo": "GRPO", "gae": "PPO"}


class AutoTrainer(RLTrainer):
    """An `RLTrainer` whose algorithm is chosen from what is known of the task; `choice` holds it with the reasons."""

    choice: AlgorithmChoice

    def __init__(self, model_config: Any, *, task_analysis: bool = True, task_type: str | None = None, **options: Any) -> None:
        """`task_type`: math_reasoning, code, dialogue ...; None goes by the reward and the rollout settings alone.

        `task_analysis=False` keeps the configured estimator. `options`: see `verl.trainer.configure.configure`.
        """
        config = configure(model_config, {}, **options)
        if task_analysis:
            self.choice = choose_algorithm(
                task_type=task_type,
                verifiable_reward=True if config.reward.type == "accuracy" else None,
                multi_turn=config.multi_turn.enable,
                samples_per_prompt=config.rollout.n,
            )
            print(explain(self.choice))
            config = configure(config, {"algorithm.adv_estimator": self.choice.adv_estimator})
        super().__init__(config)


def auto_select_trainer(task_type: str, model_config: Any, **options: Any) -> RLTrainer:
    """GRPO for mathematical reasoning, PPO for dialogue, otherwise what `AutoTrainer` finds best."""
    if task_type == "math_reasoning":
        return GRPOTrainer(model_config, **options)
    if task_type == "dialogue":
        return PPOTrainer(model_config, **options)
    return AutoTrainer(model_config, task_type=task_type, **options)


def explain(choice: AlgorithmChoice) -> str:
    """The choice and its reasons, a line each."""
    lines = [f"algorithm: {_NAMES[choice.adv_estimator]} (algorithm.adv_estimator={choice.adv_estimator})"]
    for index, reason in enumerate(choice.reasons):
        lines.append(f"  {'also' if index else 'because'}: {reason.text} -> {_NAMES[reason.favours]}")
    return "\n".join(lines)
