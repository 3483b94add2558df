"""Sampling on the device, with the exact log-prob of what was drawn.

Every sample has its own stream of uniforms, a hash of (key, number of the token): which other sequences are in the
batch, in which slot it sits and whether it was preempted cannot change what it draws. One uniform a token suffices,
because tokens are drawn by inverting the cumulative distribution.

Shapes: B sequences, V vocabulary, E end-of-sequence ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 23
"""At most u = 1 - 2^-24, so that u * total, rounded, stays below total in fp32."""
_BLOCK = 64
"""Tokens summed together in the first of two searches of the cumulative distribution."""


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64-bit integers that scrambles all bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, sample_index: int) -> int:
    """Key of the stream of sample `sample_index` of a request with `seed`, as a signed 64-bit integer."""
    return _signed(mix(mix(seed + _GAMMA) + _GAMMA * (sample_index + 1)))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    # Torch shifts int64 arithmetically; the mask drops the copies of the sign bit.
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def uniforms(keys: Tensor, counts: Tensor) -> Tensor:
    """Numbers `counts` [..., B] of the streams `keys` [B], both int64 -> [..., B] fp32 in (0, 1), odd multiples of 2^-24.

    `mix(key + (count + 1) * gamma)`, that is SplitMix64 with random access. Never 0, which would draw the first token
    whose probability is not exactly 0, however unlikely, once in 2^23 times.
    """
    x = (counts + 1).mul_(_signed(_GAMMA)).add_(keys)
    x = _shift(x, 30).bitwise_xor_(x).mul_(_signed(_MIX_1))
    x = _shift(x, 27).bitwise_xor_(x).mul_(_signed(_MIX_2))
    x = _shift(x, 31).bitwise_xor_(x)
    return _shift(x, 64 - _UNIFORM_BITS).float().add_(0.5).mul_(2.0**-_UNIFORM_BITS)


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """Which parts of the sampler some sequence of the batch needs; what none needs is not run."""

    any_greedy: bool
    all_greedy: bool
    any_temperature: bool
    any_truncation: bool


def suppress(logits: Tensor, end_ids: Tensor, pending: Tensor) -> None:
    """Set the logits [B, V] of `end_ids` [B, E] to -inf, in place, in the rows where `pending` [B] holds.

    A row's unused places in `end_ids` are -1.
    """
    first = end_ids[:, :1].clamp_min(0)
    # Unused places repeat the row's first id, so that they write what that id's own place writes.
    ids = torch.where(end_ids < 0, first, end_ids)
    hidden = (pending & (end_ids[:, 0] >= 0))[:, None].expand_as(ids)
    logits.scatter_(1, ids, logits.gather(1, ids).masked_fill_(hidden, float("-inf")))


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to -inf, in place, the logits [B, V] that top-k, then top-p of what is left (renormalised), then min-p
    (relative to the likeliest token) exclude. Each limit is [B]; `top_k` of V, `top_p` of 1 and `min_p` of 0 are off.

    All three keep the likeliest tokens, ties broken by the lower id, and at least one.
    """
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(values, -1)
    before = probs.cumsum(-1) - probs
    ranks = torch.arange(logits.shape[1], device=logits.device)
    keep = ranks < top_k[:, None]
    kept_mass = (probs * keep).sum(-1)
    # With top-p off no rounding of the sums may cut the tail.
    keep &= before < torch.where(top_p >= 1, torch.inf, top_p * kept_mass)[:, None]
    keep &= probs >= min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    logits.masked_fill_(torch.zeros_like(keep).scatter_(1, order, keep).logical_not_(), float("-inf"))


def sample(
    logits: Tensor,
    noise: Tensor,
    plan: SamplingPlan,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row of `logits` [B, V] (fp32, overwritten) with uniforms `noise` [B].

    Parameters are [B]; a greedy row has temperature 0 and no truncation. Returns token ids [B] int64 and log-probs
    [B] fp32 under the distribution drawn from: after temperature, truncation and suppression; at temperature 1 for
    greedy rows.
    """
    if plan.any_temperature:
        logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])
    if plan.any_truncation:
        truncate(logits, top_k, top_p, min_p)
    if plan.all_greedy:
        top, ids = logits.max(-1)
        return ids, top - logits.logsumexp(-1)
    probs = torch.softmax(logits, -1)
    ids = _invert(probs, noise[:, None])
    if plan.any_greedy:
        ids = torch.where((temperature == 0)[:, None], logits.argmax(-1, keepdim=True), ids)
    # What is drawn has a probability far from underflow, so its logarithm is exact to the last digits.
    return ids[:, 0], probs.gather(1, ids).log_()[:, 0]


def _invert(probs: Tensor, noise: Tensor) -> Tensor:
    """[B, V] and [B, 1] -> [B, 1]: the first token at which the cumulative sum of `probs` exceeds noise * total.

    In two steps, over the sums of blocks and within one block: a cumulative sum of all of V costs more than the rest of
    the sampler. A block or token of probability 0 never raises a sum, so it is never drawn.
    """
    vocab_size = probs.shape[1]
    full = vocab_size - vocab_size % _BLOCK
    sums = probs[:, :full].unflatten(1, (-1, _BLOCK)).sum(-1)
    if full < vocab_size:
        sums = torch.cat((sums, probs[:, full:].sum(-1, keepdim=True)), 1)
    # A GPU scans in parallel: only in double precision is its rounding too small to meet a 23-bit uniform.
    cumulative = sums.cumsum(-1, dtype=torch.float64 if probs.is_cuda else None)
    target = cumulative[:, -1:] * noise
    block = torch.searchsorted(cumulative, target, right=True)
    rest = target - (cumulative.gather(1, block) - sums.gather(1, block))
    columns = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    if full < vocab_size:
        inside = probs.gather(1, columns.clamp_max(vocab_size - 1)).masked_fill_(columns >= vocab_size, 0)
    else:
        inside = probs.gather(1, columns)
    inside = inside.cumsum(-1, dtype=cumulative.dtype)
    # Rounding may put what is left outside the block, or on a token at its start that next to never occurs.
    rest = rest.clamp(inside[:, -1:] * 2.0**-24, inside[:, -1:] * (1 - 2.0**-23))
    return block * _BLOCK + torch.searchsorted(inside, rest, right=True)
