"""Generate on held-out prompts, score, summarise."""

from __future__ import annotations

from collections.abc import Sequence

from verl.config.schema import Config
from verl.controller import WorkerGroup
from verl.data.types import EncodedPrompt, Trajectory
from verl.observe.evaluation import EvalSummary, summarize
from verl.rewards.score import RewardScorer
from verl.trainer.rollouts import generate, validation_sampling

_VALIDATION_STREAM = -1
"""Stands for the step in the seeds of held-out samples: every validation of a run draws alike."""


def evaluate_prompts(
    rollout: WorkerGroup, prompts: Sequence[EncodedPrompt], reward: RewardScorer, config: Config, name: str
) -> tuple[EvalSummary, list[Trajectory]]:
    """Answer every prompt `rollout.val_n` times and measure the answers."""
    sampling = validation_sampling(config)
    trajectories = generate(rollout, prompts, sampling, seed=config.training.seed, step=_VALIDATION_STREAM)
    trajectories, _ = reward.score(trajectories)
    return summarize(name, trajectories), trajectories


def validate(
    rollout: WorkerGroup, prompts: Sequence[EncodedPrompt], reward: RewardScorer, config: Config
) -> tuple[dict[str, float], list[Trajectory]]:
    """`val/*` metrics of the present policy, and the answers they come from."""
    summary, trajectories = evaluate_prompts(rollout, prompts, reward, config, "validation")
    return summary.metrics("val"), trajectories
