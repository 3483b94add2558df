"""From prompts to scored trajectories: what training, validation, evaluation and generation share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from verl.config.schema import Config
from verl.controller import WorkerGroup
from verl.data.types import EncodedPrompt, Trajectory
from verl.engines.rollout.base import SamplingParams
from verl.environments.single_turn import RolloutTask


def rollout_tasks(prompts: Sequence[EncodedPrompt], *, seed: int, step: int) -> list[RolloutTask]:
    """One task a prompt. Its seed depends on (seed, step, place) alone, so a resumed run repeats it."""
    return [RolloutTask(prompt=p, group_id=i, seed=derive_seed(seed, step, i)) for i, p in enumerate(prompts)]


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers; streams of different parts are independent."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def training_sampling(config: Config) -> SamplingParams:
    r = config.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        n=r.n,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
        ignore_eos=r.ignore_eos,
        min_tokens=r.min_tokens,
    )


def validation_sampling(config: Config) -> SamplingParams:
    r = config.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        n=r.val_n,
        temperature=r.val_temperature,
        top_p=r.val_top_p,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
    )


def generate(
    rollout: WorkerGroup, prompts: Sequence[EncodedPrompt], sampling: SamplingParams, *, seed: int, step: int
) -> list[Trajectory]:
    """`sampling.n` trajectories a prompt, group after group."""
    groups = rollout.generate(rollout_tasks(prompts, seed=seed, step=step), sampling)
    return [trajectory for group in groups for trajectory in group]
