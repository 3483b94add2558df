"""`Algorithm`: everything that tells one RL algorithm from another, as one frozen value for the trainer.

Shapes: S sequences, T tokens in all. All of it runs on the driver, on the CPU, over one step's whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from verl.algorithms.advantages import broadcast_to_tokens, gae, grpo, outcome_to_tokens, whiten, zero_std_groups
from verl.algorithms.kl import KLController, KLKind, kl_estimate, kl_penalised_rewards
from verl.algorithms.losses import PolicyLoss, ValueLoss
from verl.data.batch import TokenBatch
from verl.errors import ConfigError
from verl.observe.metrics import Last, Max, Mean, Metrics, Min

REWARD_KL_METRIC = "reward/kl_per_sequence"
"""What the KL controller is fed: nats a sequence, summed over its trained tokens, by `Algorithm.kl_estimator`."""


class AdvantageEstimator(Protocol):
    """From a batch with `token_rewards` (and `values`, for one that needs a critic) to one with `advantages`."""

    def __call__(self, batch: TokenBatch) -> tuple[TokenBatch, Metrics]: ...


@dataclass(frozen=True, kw_only=True)
class GAEEstimator:
    """Adds `advantages` (whitened over the step's trained tokens, if asked) and `returns`; reads `values`."""

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ConfigError(f"algorithm.{name}={value} makes sums of rewards diverge or alternate; use 0 to 1")

    def __call__(self, batch: TokenBatch) -> tuple[TokenBatch, Metrics]:
        advantages, returns = gae(batch.token_rewards, batch.values, batch.loss_mask, batch.cu_seqlens, self.gamma, self.lam)
        if self.whiten:
            advantages = whiten(advantages, batch.loss_mask)
        # Double, because a variance is a difference of squares; these are the critic's predictions before its updates.
        targets, values = returns[batch.loss_mask].double(), batch.values[batch.loss_mask].double()
        spread = float(targets.var(correction=0))
        unexplained = float((targets - values).var(correction=0))
        metrics: Metrics = {"critic/explained_variance": Last(1 - unexplained / spread if spread > 0 else math.nan)}
        metrics |= _range("returns", targets) | _range("critic/values", values)
        return batch.with_columns(advantages=advantages, returns=returns), metrics


@dataclass(frozen=True, kw_only=True)
class GRPOEstimator:
    """Adds `advantages`: each sequence's group-relative advantage at all of its trained tokens.

    A sequence's score is the sum of its token rewards, a KL penalty included, as upstream has it.
    """

    norm_by_std: bool = True

    def __call__(self, batch: TokenBatch) -> tuple[TokenBatch, Metrics]:
        # A sequence without trained tokens has no token to be paid at, but its reward belongs to the group's baseline.
        scores_S = torch.where(batch.response_lengths() > 0, batch.sequence_sum(batch.token_rewards), batch.rewards)
        advantages_S = grpo(scores_S, batch.group_ids, self.norm_by_std)
        advantages = broadcast_to_tokens(advantages_S, batch.loss_mask, batch.cu_seqlens)
        return batch.with_columns(advantages=advantages), {}


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """How one step's batch is cut into optimizer steps."""

    mini_batch_size: int | None = None
    """Prompts (whole groups) an optimizer step. None: all."""
    epochs: int = 1
    """Passes over the batch."""

    def mini_batches_per_epoch(self, num_groups: int) -> int:
        return math.ceil(num_groups / self.mini_batch_size) if self.mini_batch_size else 1

    def updates_per_step(self, num_groups: int) -> int:
        """Optimizer steps for a batch of `num_groups` prompts."""
        return self.epochs * self.mini_batches_per_epoch(num_groups)

    def minibatches(self, batch: TokenBatch, seed: int) -> Iterator[TokenBatch]:
        """The mini-batches of all epochs, in order; a pure function of the batch and the seed.

        Groups stay whole. Each epoch shuffles the groups anew; a seed has its own orders. When the number of
        groups is no multiple of `mini_batch_size` no short mini-batch is left over and nothing is dropped: the
        groups are spread over ceil(groups / mini_batch_size) mini-batches whose sizes differ by one at most.
        (Each is divided by its own count, so a short one would weigh its prompts more and be noisier.)
        Inside a mini-batch sequences keep the batch's order: a loss is a sum, only membership matters.
        """
        group_of_S = torch.unique(batch.group_ids, return_inverse=True)[1]
        num_groups = int(group_of_S.max()) + 1
        num_mini_batches = self.mini_batches_per_epoch(num_groups)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            if num_mini_batches == 1:
                yield batch
                continue
            for groups in torch.randperm(num_groups, generator=generator).tensor_split(num_mini_batches):
                yield batch.select(torch.isin(group_of_S, groups).nonzero().squeeze(1))


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One RL algorithm. The trainer asks it what to compute and hands it batches; it knows of no model or device."""

    name: str
    estimator: AdvantageEstimator
    policy_loss: PolicyLoss
    value_loss: ValueLoss | None = None
    """None: there is no critic."""
    actor_updates: UpdatePlan = UpdatePlan()
    critic_updates: UpdatePlan = UpdatePlan()
    kl_controller: KLController | None = None
    """KL in the reward: the controller at the start of training. The trainer carries it on. None: no such penalty."""
    kl_estimator: KLKind = "k3"
    """Of the KL in the reward."""
    old_logprobs: Literal["policy", "trainer", "generator"] = "policy"
    """Where the ratio's denominator comes from: the policy itself (strictly on-policy, ratio 1), a forward pass of
    the trainer before the updates, or what the generator recorded."""

    @property
    def uses_critic(self) -> bool:
        """The batch needs `values` before `advantages`."""
        return self.value_loss is not None

    @property
    def uses_reference(self) -> bool:
        """The batch needs `ref_logprobs` before `advantages`."""
        return self.kl_controller is not None or self.policy_loss.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """The batch needs `old_logprobs`, by a forward pass of the trainer, before `advantages`."""
        return self.old_logprobs == "trainer"

    def updates_per_step(self, num_groups: int) -> int:
        """Optimizer steps of the actor for a batch of `num_groups` prompts."""
        return self.actor_updates.updates_per_step(num_groups)

    def minibatches(self, batch: TokenBatch, seed: int) -> Iterator[TokenBatch]:
        """The actor's mini-batches of one step, see `UpdatePlan.minibatches`."""
        return self.actor_updates.minibatches(batch, seed)

    def critic_minibatches(self, batch: TokenBatch, seed: int) -> Iterator[TokenBatch]:
        """The critic's mini-batches of one step."""
        return self.critic_updates.minibatches(batch, seed)

    def advantages(self, batch: TokenBatch, kl_coef: float | None = None) -> tuple[TokenBatch, Metrics]:
        """The batch with `token_rewards`, `advantages` and, with a critic, `returns`; and the step's reward statistics.

        Reads `rewards`, `group_ids`, `loss_mask`, and the columns the `uses_` and `needs_` properties ask for.
        `kl_coef`: the controller's coefficient now; None takes the initial one. With generator log-probs as the
        ratio's denominator the batch also gets `old_logprobs`.
        """
        if self.old_logprobs == "generator":
            batch = batch.with_columns(old_logprobs=batch.generator_logprobs)
        token_rewards = outcome_to_tokens(batch.rewards, batch.loss_mask, batch.cu_seqlens)
        metrics = _reward_metrics(batch)
        if self.kl_controller is not None:
            coef = self.kl_controller.coef if kl_coef is None else kl_coef
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, self.kl_estimator)
            kl = torch.where(batch.loss_mask, kl, 0.0)
            token_rewards = kl_penalised_rewards(token_rewards, kl, batch.loss_mask, coef)
            total_kl = float(kl.double().sum())
            metrics[REWARD_KL_METRIC] = Mean(total_kl, batch.num_sequences)
            metrics["reward/kl_penalty"] = Mean(coef * total_kl, batch.num_sequences)
            metrics["reward/kl_coef"] = Last(coef)
        batch, estimator_metrics = self.estimator(batch.with_columns(token_rewards=token_rewards))
        return batch, metrics | estimator_metrics | _advantage_metrics(batch)


def _reward_metrics(batch: TokenBatch) -> Metrics:
    """Of the outcome rewards, before any penalty. A share of groups is out of those with at least two samples."""
    uniform, groups = zero_std_groups(batch.rewards, batch.group_ids)
    return _range("reward", batch.rewards.double()) | {
        "reward/std": Last(float(batch.rewards.double().std(correction=0))),
        "reward/zero_std_groups": Mean(uniform, groups),
    }


def _advantage_metrics(batch: TokenBatch) -> Metrics:
    """Of the advantages the losses will see, over trained tokens."""
    advantages = batch.advantages[batch.loss_mask].double()
    return _range("advantages", advantages) | {"advantages/std": Last(float(advantages.std(correction=0)))}


def _range(name: str, values: Tensor) -> Metrics:
    return {
        f"{name}/mean": Mean(float(values.sum()), values.numel()),
        f"{name}/max": Max(float(values.max())),
        f"{name}/min": Min(float(values.min())),
    }
