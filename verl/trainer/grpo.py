"""`GRPOTrainer`: the same driver with group-relative advantages and no critic (Shao et al. 2024)."""

from __future__ import annotations

from typing import Any

from verl.trainer.configure import configure
from verl.trainer.ppo import RLTrainer


class GRPOTrainer(RLTrainer):
    """GRPO: the group's other samples are the baseline."""

    def __init__(
        self, model_config: Any, *, grpo_beta: float | None = None, clip_epsilon: float | None = None, **options: Any
    ) -> None:
        """`model_config`: a Config, a model folder or hub id, a `model` section, or a dict of sections.

        `grpo_beta`: coefficient of the KL to the reference model in the loss. `clip_epsilon` sets both clip
        bounds. `options`: see `verl.trainer.configure.configure`.
        """
        given: dict[str, Any] = {"algorithm.adv_estimator": "grpo"}
        if grpo_beta is not None:
            given["algorithm.kl_loss_coef"] = grpo_beta
        if clip_epsilon is not None:
            given |= {"actor.clip_low": clip_epsilon, "actor.clip_high": clip_epsilon}
        super().__init__(configure(model_config, given, **options))
