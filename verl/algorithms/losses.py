"""Losses as sums and counts (`verl.engines.train.base.Loss`): the engine divides once, by the global count.

Shapes: T tokens of a micro-batch; every tensor is flat and ragged, as in `TokenBatch`. Masking is done on the inputs
(`torch.where`), not on the products, so that an infinite log-prob at a prompt token leaves no NaN in the gradient.
Each loss brings its sums to the host in one copy: one synchronisation a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl.algorithms.aggregation import Aggregation, aggregation_weights, check_aggregation
from verl.algorithms.kl import KLKind, kl_estimate
from verl.data.batch import TokenBatch
from verl.engines.train.base import LossResult, ModelOutputs
from verl.errors import ConfigError
from verl.observe.metrics import Max, Mean, Metrics, Min

LOG_RATIO_LIMIT = 20.0
"""log(policy / old policy) is clamped to +-20 nats before exp, as upstream has it; beyond it the gradient is 0."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's clipped surrogate with its optional terms; GRPO uses the same loss.

    With r = exp(logprobs - old_logprobs) and A the advantage, at each trained token:

        L_pg = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))      Schulman et al. 2017 (arXiv 1707.06347), eq. 7
        L_pg = min(L_pg, -A dual_clip)   where A < 0                   Ye et al. 2020 (arXiv 1912.09729), dual-clip PPO
        L    = L_pg - entropy_coef * H + kl_coef * KL(policy || ref)   Shao et al. 2024 (arXiv 2402.03300), eq. 3 and 4

    Two clip bounds: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.1. All three terms are aggregated alike.

    A batch without the column `old_logprobs` is strictly on-policy: old_logprobs = logprobs, detached. Then r is 1,
    nothing is clipped, and the gradient is REINFORCE's, -A grad log policy.

    The KL term weighs tokens as the batch has them; after the first of several updates they are slightly off-policy,
    and, as in the paper and upstream, no ratio corrects for it. `kl_estimator` k3 is the paper's; see
    `verl.algorithms.kl` for what k2 and k3 descend.

    Columns read: loss_mask, advantages; old_logprobs and ref_logprobs if there (the latter must be if kl_coef > 0).
    """

    prefix: ClassVar[str] = "actor"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """Bound of r where A < 0; None switches it off."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLKind = "k3"
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = None
    """Tokens; the divisor of seq-mean-token-sum-norm."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.norm_length)
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"actor.clip_low={self.clip_low} puts the lower bound 1 - clip_low outside [0, 1]; use 0 to 1")
        if self.clip_high < 0:
            raise ConfigError(f"actor.clip_high={self.clip_high} puts the upper bound below 1; use 0 or more")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"actor.dual_clip={self.dual_clip} clips on-policy samples; use a number above 1, or null")
        if self.kl_coef < 0:
            raise ConfigError(f"algorithm.kl_loss_coef={self.kl_coef} rewards distance from the reference; use 0 or more")
        if self.kl_coef > 0 and self.kl_estimator not in ("k2", "k3"):
            raise ConfigError(
                f"algorithm.kl_estimator={self.kl_estimator} has no gradient towards the reference; "
                "use k2 or k3 with algorithm.kl_loss_coef"
            )

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    def count(self, batch: TokenBatch) -> float:
        return float(aggregation_weights(batch, self.aggregation, self.norm_length)[1])

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult:
        """`outputs.logprobs` [T] with gradient, `outputs.entropy` [T] if entropy_coef is not 0. Metrics in nats."""
        assert outputs.logprobs is not None
        mask_T, advantages_T = batch.loss_mask, batch.advantages
        weights_T, count = aggregation_weights(batch, self.aggregation, self.norm_length)
        logprobs_T = torch.where(mask_T, outputs.logprobs, 0.0)
        old_T = torch.where(mask_T, batch.old_logprobs, 0.0) if "old_logprobs" in batch else logprobs_T.detach()
        log_ratio_T = (logprobs_T - old_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio_T = log_ratio_T.exp()
        unclipped_T = -advantages_T * ratio_T
        clipped_T = -advantages_T * ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss_T = torch.maximum(unclipped_T, clipped_T)
        was_clipped_T = mask_T & (clipped_T > unclipped_T)
        sums = {
            "actor/clip_fraction": was_clipped_T.sum(),
            "actor/clip_fraction_low": (was_clipped_T & (advantages_T < 0)).sum(),
            "actor/clip_fraction_high": (was_clipped_T & (advantages_T > 0)).sum(),
        }
        if self.dual_clip is not None:
            bound_T = -advantages_T * self.dual_clip
            over_bound_T = mask_T & (advantages_T < 0) & (loss_T > bound_T)
            loss_T = torch.where(over_bound_T, bound_T, loss_T)
            sums["actor/dual_clip_fraction"] = over_bound_T.sum()
        with torch.no_grad():
            sums["actor/ratio_mean"] = (mask_T * ratio_T).sum()
            # k3 of KL(old || new): the tokens are the old policy's. Untrained tokens have log-ratio 0 and add 0.
            sums["actor/approx_kl"] = (torch.expm1(log_ratio_T) - log_ratio_T).sum()
            sums["actor/entropy_estimate"] = -logprobs_T.sum()
        terms = {"actor/pg_loss": (weights_T * loss_T).sum()}
        total = terms["actor/pg_loss"]
        if outputs.entropy is not None:
            entropy_T = torch.where(mask_T, outputs.entropy, 0.0)
            sums["actor/entropy"] = entropy_T.sum()
            if self.entropy_coef:
                total = total - self.entropy_coef * (weights_T * entropy_T).sum()
        if "ref_logprobs" in batch:
            # Without a term in the loss (KL in the reward) it is reported all the same.
            kl_T = kl_estimate(logprobs_T, torch.where(mask_T, batch.ref_logprobs, 0.0), self.kl_estimator)
            sums["actor/ref_kl"] = kl_T.sum()
            if self.kl_coef:
                terms["actor/kl_loss"] = (weights_T * kl_T).sum()
                total = total + self.kl_coef * terms["actor/kl_loss"]
        terms["actor/loss"] = total
        extremes = (torch.where(mask_T, ratio_T, -torch.inf).max(), torch.where(mask_T, ratio_T, torch.inf).min())
        metrics = _read(terms, count, sums, mask_T.sum(), extremes)
        return LossResult(total=total, metrics=metrics)


def _read(
    terms: Mapping[str, Tensor],
    count: Tensor,
    sums: Mapping[str, Tensor],
    num_tokens: Tensor,
    ratio_extremes: tuple[Tensor, Tensor] | None = None,
) -> Metrics:
    """Metrics out of scalars on the device: `terms` are means over the loss's count, `sums` over trained tokens."""
    scalars = [count, num_tokens, *(ratio_extremes or ()), *terms.values(), *sums.values()]
    values = iter(torch.stack([s.detach().to(torch.float32) for s in scalars]).tolist())
    loss_count, tokens = next(values), next(values)
    metrics: Metrics = {}
    if ratio_extremes is not None:
        ratio_max, ratio_min = next(values), next(values)
        if tokens:  # a micro-batch without trained tokens has no ratio
            metrics = {"actor/ratio_max": Max(ratio_max), "actor/ratio_min": Min(ratio_min)}
    metrics |= {name: Mean(next(values), loss_count) for name in terms}
    metrics |= {name: Mean(next(values), tokens) for name in sums}
    return metrics


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Squared error of the critic with PPO's value clipping, token-mean:

        L = coef * 0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    Schulman et al. 2017, eq. 9 (the unclipped form); the clipping is that of their code (openai/baselines ppo2),
    where it moves V at most `value_clip` from its prediction before the updates. None switches it off.

    Columns read: loss_mask, values (V_old), returns (R).
    """

    prefix: ClassVar[str] = "critic"
    value_clip: float | None = 0.5
    coef: float = 1.0

    def __post_init__(self) -> None:
        if self.value_clip is not None and self.value_clip <= 0:
            raise ConfigError(f"critic.value_clip={self.value_clip} lets no value move; use a number above 0, or null")

    @property
    def needs_entropy(self) -> bool:
        return False

    def count(self, batch: TokenBatch) -> float:
        """Trained tokens."""
        return float(batch.loss_mask.sum())

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult:
        """`outputs.values` [T] with gradient."""
        assert outputs.values is not None
        mask_T = batch.loss_mask
        values_T = torch.where(mask_T, outputs.values, 0.0)
        errors_T = (values_T - batch.returns).square()
        sums: dict[str, Tensor] = {}
        if self.value_clip is not None:
            old_T = batch.values
            clipped_T = values_T.clamp(old_T - self.value_clip, old_T + self.value_clip)
            clipped_errors_T = (clipped_T - batch.returns).square()
            sums["critic/clip_fraction"] = (mask_T & (clipped_errors_T > errors_T)).sum()
            errors_T = torch.maximum(errors_T, clipped_errors_T)
        total = self.coef * 0.5 * torch.where(mask_T, errors_T, 0.0).sum()
        tokens = mask_T.sum()
        return LossResult(total=total, metrics=_read({"critic/vf_loss": total}, tokens, sums, tokens))


@dataclass(frozen=True, kw_only=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens: L = -log p(token | prefix), aggregated as asked.

    Columns read: loss_mask.
    """

    prefix: ClassVar[str] = "sft"
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = None
    """Tokens; the divisor of seq-mean-token-sum-norm."""

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.norm_length)

    @property
    def needs_entropy(self) -> bool:
        return False

    def count(self, batch: TokenBatch) -> float:
        return float(aggregation_weights(batch, self.aggregation, self.norm_length)[1])

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult:
        """`outputs.logprobs` [T] with gradient."""
        assert outputs.logprobs is not None
        weights_T, count = aggregation_weights(batch, self.aggregation, self.norm_length)
        nll_T = -torch.where(batch.loss_mask, outputs.logprobs, 0.0)
        total = (weights_T * nll_T).sum()
        return LossResult(total=total, metrics=_read({"sft/loss": total}, count, {}, batch.loss_mask.sum()))
