"""Advantage estimators over flat ragged tensors.

Shapes: S sequences, T tokens in all, N trained tokens (loss mask True) in all, G groups; `cu_seqlens` is [S + 1].
Every estimator skips tokens the policy did not choose (prompt, tool and environment tokens) as if they were not
there, and gives them 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRPO_STD_EPS = 1e-6
"""Added to a group's standard deviation, as upstream does."""
WHITEN_VARIANCE_EPS = 1e-8
"""Added to the variance under the root, as upstream does."""


def outcome_to_tokens(rewards_S: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] -> [T]: each sequence's outcome reward at its last trained token, 0 elsewhere.

    The last *trained* token, not the last token: an episode may end with a tool's answer, which no estimator
    sees. The reward of a sequence without trained tokens is paid nowhere.
    """
    trained_N, counts_S = _trained_tokens(loss_mask_T, cu_seqlens)
    paid_S = counts_S > 0
    last_S = trained_N[counts_S.cumsum(0)[paid_S] - 1]
    out_T = torch.zeros(loss_mask_T.shape[0], dtype=torch.float32, device=rewards_S.device)
    out_T[last_S] = rewards_S[paid_S].to(torch.float32)
    return out_T


def broadcast_to_tokens(values_S: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] -> [T]: each sequence's value at all its trained tokens, 0 elsewhere."""
    values_T = values_S.to(torch.float32).repeat_interleave(cu_seqlens.diff())
    return torch.where(loss_mask_T, values_T, 0.0)


def gae(
    token_rewards_T: Tensor, values_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: `(advantages_T, returns_T)`, fp32, 0 outside the loss mask.

    Schulman et al. 2016 (arXiv 1506.02438), equation 16 in its recursive form, over the trained tokens 1..n of a sequence:

        delta_t = r_t + gamma * V_{t+1} - V_t        V_{n+1} = 0
        A_t     = delta_t + gamma * lam * A_{t+1}    A_{n+1} = 0
        R_t     = A_t + V_t                          (before any whitening)

    `t + 1` is the next token *the policy chose*: over a tool's answer the next value and the running sum are
    carried unchanged, so a turn ends no episode and a long observation discounts nothing. A reward at an
    untrained token is not seen.

    Deviation from the paper: a response cut by its length limit counts as finished (V_{n+1} = 0), as upstream
    has it: the reward was given for the cut text.
    """
    trained_N, counts_S = _trained_tokens(loss_mask_T, cu_seqlens)
    ends_N = counts_S.cumsum(0).repeat_interleave(counts_S)
    remaining_N = ends_N - torch.arange(trained_N.numel(), device=trained_N.device)
    # float64: the sum of up to thousands of deltas is a difference of numbers far larger than itself.
    rewards_N, values_N = token_rewards_T[trained_N].double(), values_T[trained_N].double()
    next_values_N = torch.where(remaining_N > 1, values_N.roll(-1), 0.0)
    deltas_N = rewards_N + gamma * next_values_N - values_N
    advantages_N = _discounted_suffix_sums(deltas_N, remaining_N, gamma * lam)
    advantages_T = torch.zeros(values_T.shape[0], dtype=torch.float32, device=values_T.device)
    returns_T = advantages_T.clone()
    advantages_T[trained_N] = advantages_N.float()
    returns_T[trained_N] = (advantages_N + values_N).float()
    return advantages_T, returns_T


def _discounted_suffix_sums(x_N: Tensor, remaining_N: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each segment; `remaining_N`: items to the segment's end, t included.

    By doubling (Hillis & Steele 1986): after round k, y_t holds the discounted sum of its next 2^k items, and
    y_t + discount^(2^k) * y_{t + 2^k} that of the next 2^(k+1). log2(longest) passes over flat memory in place
    of one small step a token, no padding, and a segment's result does not depend on its neighbours.
    """
    longest = int(remaining_N.max()) if remaining_N.numel() else 0
    y_N = x_N.clone()
    span = 1
    while span < longest:
        carried = torch.where(remaining_N[:-span] > span, y_N[span:], 0.0)  # a copy, so that y may change in place
        y_N[:-span].add_(carried, alpha=discount**span)
        span *= 2
    return y_N


def whiten(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked tokens alone; exactly 0 outside the mask. fp32.

    The variance is the unbiased one (n - 1), as upstream's. Deviations from upstream: the result is masked again
    (an untrained token would otherwise hold -mean / std), and a single masked token gives 0 where upstream raises.
    """
    x_N = x_T[mask_T].double()
    out_T = torch.zeros(x_T.shape[0], dtype=torch.float32, device=x_T.device)
    if x_N.numel() > 1:
        out_T[mask_T] = ((x_N - x_N.mean()) / torch.sqrt(x_N.var(correction=1) + WHITEN_VARIANCE_EPS)).float()
    return out_T


def grpo(rewards_S: Tensor, group_ids_S: Tensor, norm_by_std: bool = True) -> Tensor:
    """Group-relative advantages, [S] fp32. Shao et al. 2024 (DeepSeekMath, arXiv 2402.03300), section 4.1.2:

        A_i = (r_i - mean(group)) / (std(group) + 1e-6)

    with the unbiased standard deviation (n - 1), as upstream has it. `norm_by_std=False` leaves the division out
    (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). Groups need be neither contiguous nor equal in size.

    Deviation from upstream: a group of one has no baseline and gets 0, not its raw reward. A group whose rewards
    are all equal gets exactly 0, whatever rounding makes of its mean.
    """
    group_of_S, uniform_G, counts_G = _groups(rewards_S, group_ids_S)
    rewards = rewards_S.double()
    means_G = torch.zeros_like(counts_G, dtype=torch.float64).index_add(0, group_of_S, rewards) / counts_G
    advantages_S = rewards - means_G[group_of_S]
    if norm_by_std:
        squares_G = torch.zeros_like(means_G).index_add(0, group_of_S, advantages_S.square())
        stds_G = torch.sqrt(squares_G / (counts_G - 1).clamp(min=1))
        advantages_S = advantages_S / (stds_G + GRPO_STD_EPS)[group_of_S]
    return torch.where(uniform_G[group_of_S], 0.0, advantages_S).float()


def zero_std_groups(rewards_S: Tensor, group_ids_S: Tensor) -> tuple[int, int]:
    """(groups of at least two whose rewards are all equal, groups of at least two)."""
    _, uniform_G, counts_G = _groups(rewards_S, group_ids_S)
    several_G = counts_G > 1
    return int((uniform_G & several_G).sum()), int(several_G.sum())


def _groups(rewards_S: Tensor, group_ids_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index of each sequence's group [S], whether all of a group's rewards are equal [G], and its size [G]."""
    ids_G, group_of_S, counts_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    empty_G = torch.zeros(ids_G.numel(), dtype=rewards_S.dtype, device=rewards_S.device)
    highest_G = empty_G.scatter_reduce(0, group_of_S, rewards_S, "amax", include_self=False)
    lowest_G = empty_G.scatter_reduce(0, group_of_S, rewards_S, "amin", include_self=False)
    return group_of_S, highest_G == lowest_G, counts_G


def _trained_tokens(loss_mask_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the trained tokens [N], ascending, and how many each sequence has [S]."""
    totals = torch.cat([cu_seqlens.new_zeros(1), loss_mask_T.long().cumsum(0)])
    return loss_mask_T.nonzero().squeeze(1), totals[cu_seqlens].diff()
