"""An `Algorithm` from the configuration, and the automatic choice between algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.algorithms.kl import KLController
from verl.algorithms.losses import PolicyLoss, ValueLoss
from verl.algorithms.spec import Algorithm, GAEEstimator, GRPOEstimator, UpdatePlan
from verl.config.schema import Config
from verl.errors import ConfigError

AdvantageEstimatorName = Literal["grpo", "gae"]


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm that sections `algorithm`, `actor` and `critic` describe.

    Raises ConfigError for values that cannot work, one line with the fix.
    """
    settings, actor, critic = config.algorithm, config.actor, config.critic
    if settings.adv_estimator not in ("grpo", "gae"):
        raise ConfigError(f"algorithm.adv_estimator={settings.adv_estimator!r} is unknown; use grpo or gae")
    with_critic = settings.adv_estimator == "gae"
    if not with_critic and config.rollout.n < 2:
        raise ConfigError(
            f"rollout.n={config.rollout.n} gives GRPO no group to compare with, so every advantage is 0; "
            "set rollout.n to at least 2, or algorithm.adv_estimator=gae"
        )
    actor_updates = _update_plan("actor", "ppo_epochs", actor.mini_batch_size, actor.ppo_epochs)
    critic_updates = _update_plan("critic", "epochs", critic.mini_batch_size or actor.mini_batch_size, critic.epochs)
    controller = None
    if settings.kl_in_reward:
        controller = KLController(
            kind=settings.kl_controller,
            coef=settings.kl_coef,
            target=settings.kl_target,
            horizon=settings.kl_horizon,
        )
    estimator = (
        GAEEstimator(gamma=settings.gamma, lam=settings.lam, whiten=settings.whiten_advantages)
        if with_critic
        else GRPOEstimator(norm_by_std=settings.norm_adv_by_std)
    )
    return Algorithm(
        name="ppo" if with_critic else "grpo",
        estimator=estimator,
        policy_loss=PolicyLoss(
            clip_low=actor.clip_low,
            clip_high=actor.clip_high,
            dual_clip=actor.dual_clip,
            entropy_coef=actor.entropy_coef,
            kl_coef=settings.kl_loss_coef,
            kl_estimator=settings.kl_estimator,
            aggregation=actor.loss_aggregation,
            norm_length=config.data.max_response_length,
        ),
        value_loss=ValueLoss(value_clip=critic.value_clip, coef=critic.loss_coef) if with_critic else None,
        actor_updates=actor_updates,
        critic_updates=critic_updates,
        kl_controller=controller,
        kl_estimator=settings.kl_estimator,
        old_logprobs=_old_logprobs_source(config, actor_updates),
    )


def _update_plan(section: str, epochs_key: str, mini_batch_size: int | None, epochs: int) -> UpdatePlan:
    if mini_batch_size is not None and mini_batch_size < 1:
        raise ConfigError(f"{section}.mini_batch_size={mini_batch_size} is no number of prompts; use at least 1, or null")
    if epochs < 1:
        raise ConfigError(f"{section}.{epochs_key}={epochs} would never train; use at least 1")
    return UpdatePlan(mini_batch_size=mini_batch_size, epochs=epochs)


def _old_logprobs_source(config: Config, updates: UpdatePlan) -> Literal["policy", "trainer", "generator"]:
    """What `auto` means: the policy itself when a step is one update and no reward needs its log-probs beforehand."""
    source = config.algorithm.old_logprobs
    if source == "trainer" or source == "generator":
        return source
    if source != "auto":
        raise ConfigError(f"algorithm.old_logprobs={source!r} is unknown; use auto, trainer or generator")
    one_update = updates.updates_per_step(config.data.train_batch_size) == 1
    return "policy" if one_update and not config.algorithm.kl_in_reward else "trainer"


VERIFIABLE_TASKS = frozenset({"math", "math_reasoning", "reasoning", "logic", "code", "coding", "qa"})
"""Task types whose answers a program can check."""
OPEN_TASKS = frozenset({"dialogue", "chat", "summarization", "summarisation", "creative_writing", "alignment", "style"})
"""Task types whose answers are a matter of judgement."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One piece of evidence and what it speaks for."""

    favours: AdvantageEstimatorName
    text: str


@dataclass(frozen=True, kw_only=True)
class AlgorithmChoice:
    """What was chosen and why. `reasons[0]` decided; later ones are weaker and may disagree."""

    adv_estimator: AdvantageEstimatorName
    """The value for `algorithm.adv_estimator`."""
    reasons: tuple[Reason, ...]


def choose_algorithm(
    *,
    task_type: str | None = None,
    verifiable_reward: bool | None = None,
    dense_reward: bool = False,
    multi_turn: bool = False,
    samples_per_prompt: int | None = None,
) -> AlgorithmChoice:
    """GRPO or PPO by rule of thumb: the first of these that is known decides.

    1. `samples_per_prompt` is 1: PPO, since GRPO's baseline is the rest of the group.
    2. `dense_reward` (paid at many tokens or turns, not only at the end): PPO, since GRPO gives all tokens of an
       answer one advantage.
    3. `verifiable_reward`: True (checked against a ground truth) GRPO; False (a learned score) PPO.
    4. `task_type` in VERIFIABLE_TASKS: GRPO; in OPEN_TASKS: PPO; any other name says nothing.
    5. `multi_turn` dialogue: PPO, whose critic can tell good turns from bad ones.
    6. Otherwise GRPO: no critic to train, tune and hold in memory.

    These are conventions of the field, not measurements on the task at hand; try both where it matters.
    """
    reasons: list[Reason] = []
    if samples_per_prompt == 1:
        reasons.append(Reason(favours="gae", text="one sample a prompt leaves GRPO no group to compare with"))
    if dense_reward:
        reasons.append(Reason(favours="gae", text="the reward is dense, and a critic can credit single tokens"))
    if verifiable_reward is True:
        reasons.append(Reason(favours="grpo", text="the reward is verifiable, and a group's mean is a baseline without a critic"))
    elif verifiable_reward is False:
        reasons.append(Reason(favours="gae", text="the reward is learned, and a critic smooths its noise"))
    if task_type in VERIFIABLE_TASKS:
        reasons.append(Reason(favours="grpo", text=f"task type {task_type!r} has answers a program can check"))
    elif task_type in OPEN_TASKS:
        reasons.append(Reason(favours="gae", text=f"task type {task_type!r} has answers that are a matter of judgement"))
    if multi_turn:
        reasons.append(Reason(favours="gae", text="episodes have several turns, and a critic can tell good turns from bad ones"))
    if not reasons:
        reasons.append(Reason(favours="grpo", text="nothing speaks for a critic, and GRPO needs none"))
    return AlgorithmChoice(adv_estimator=reasons[0].favours, reasons=tuple(reasons))
