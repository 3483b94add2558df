"""KL divergence between policy and reference from samples: estimators, the penalty in the reward, its coefficient.

Shapes: T tokens in all. Sign convention: everything estimates KL(policy || reference) from tokens the policy
sampled, with d = log policy(token) - log reference(token) in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from verl.errors import ConfigError

KLKind = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""k3 sees -d within +-20 nats: exp(20) is 5e8, beyond which fp32 sums lose everything else."""
K3_LIMIT = 10.0
"""k3 a token is at most 10, as upstream has it, so that one token cannot own a batch's KL."""


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimate of KL(policy || reference), [T], differentiable in `logprobs_T`.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with d = log policy - log reference:

        k1  = d                        unbiased; may be negative; its gradient says nothing of the KL (mean 0)
        k2  = d^2 / 2                  biased a little, >= 0; on-policy its mean gradient is that of KL(policy || reference)
        k3  = exp(-d) - 1 + d          unbiased, >= 0; its mean gradient is that of KL(reference || policy)
        abs = |d|

    Clamping, as upstream: in k3, -d to +-20 and the result to at most 10, so a token past d = -2.47 pushes no
    further. k1, k2 and abs are not clamped.

    Raises ConfigError for another `kind`.
    """
    delta = logprobs_T - ref_logprobs_T
    if kind == "k1":
        return delta
    if kind == "k2":
        return 0.5 * delta.square()
    if kind == "k3":
        log_ratio = (-delta).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        # expm1, not exp - 1: near d = 0 the result is d^2 / 2, far below the rounding of exp.
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=K3_LIMIT)
    if kind == "abs":
        return delta.abs()
    raise ConfigError(f"algorithm.kl_estimator={kind!r} is unknown; use one of {', '.join(get_args(KLKind))}")


def kl_straight_through(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: KLKind) -> Tensor:
    """The value of estimator `kind` with the gradient of k2, [T].

    k2's is the estimator whose gradient, averaged over tokens the policy sampled, is the gradient of
    KL(policy || reference) (Tang & Munos 2025, arXiv 2506.09477): d * grad log policy. So a low-variance value
    can be reported and the right thing descended.
    """
    value = kl_estimate(logprobs_T, ref_logprobs_T, kind).detach()
    gradient = kl_estimate(logprobs_T, ref_logprobs_T, "k2")
    return value + gradient - gradient.detach()


def kl_penalised_rewards(token_rewards_T: Tensor, kl_T: Tensor, loss_mask_T: Tensor, kl_coef: float) -> Tensor:
    """r_t - kl_coef * KL_t at trained tokens, r_t elsewhere, [T].

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2; Ouyang et al. 2022 (arXiv 2203.02155), equation 2, both with k1.
    """
    return torch.where(loss_mask_T, token_rewards_T - kl_coef * kl_T, token_rewards_T)


@dataclass(frozen=True, kw_only=True)
class KLController:
    """The coefficient of the KL in the reward, fixed or adapted to hold a target. A value: `updated` returns a new one."""

    kind: Literal["fixed", "adaptive"]
    coef: float
    """Coefficient now in force."""
    target: float
    """KL to hold, nats a sequence. Adaptive only."""
    horizon: int
    """Sequences over which the coefficient may change by a factor of about e^0.2. Adaptive only."""

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "adaptive"):
            raise ConfigError(f"algorithm.kl_controller={self.kind!r} is unknown; use fixed or adaptive")
        if self.coef < 0:
            raise ConfigError(f"algorithm.kl_coef={self.coef} rewards distance from the reference; use 0 or more")
        if self.kind == "adaptive" and self.target <= 0:
            raise ConfigError(f"algorithm.kl_target={self.target} cannot be held; use a KL above 0 nats a sequence")
        if self.kind == "adaptive" and self.horizon < 1:
            raise ConfigError(f"algorithm.kl_horizon={self.horizon} is too short; use at least 1 sequence")

    def updated(self, observed_kl_per_sequence: float, num_sequences: int) -> KLController:
        """The controller after `num_sequences` more sequences at this mean KL (nats a sequence, summed over tokens).

        Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, the gain K_beta written as num_sequences / horizon:

            e    = clip(KL / target - 1, -0.2, 0.2)
            beta <- beta * (1 + e * num_sequences / horizon)

        Deviation: num_sequences / horizon counts as at most 1. A batch of more than five horizons would turn the
        coefficient negative. Upstream averages KL over the tokens of a sequence; this sums, as the paper does.
        """
        if self.kind == "fixed":
            return self
        error = min(max(observed_kl_per_sequence / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * min(num_sequences / self.horizon, 1.0)))
