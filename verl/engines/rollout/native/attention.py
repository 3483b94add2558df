"""Attention of the native engine: the one place where queries meet keys and values.

Shapes: B sequences, H query heads, K key-value heads, G = H / K query heads to a key-value head, D head size,
Q queries, L cached positions, T packed prompt tokens.

On a GPU two kernels belong here in place of what stands: a paged decode kernel that reads the cache through the
block tables (today the pages are gathered first), and a prefill over packed sequences without the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *, causal: bool, scale: float, softcap: float | None
) -> Tensor:
    """softmax(scale * q k' + bias) v. `queries` [B, K, Q, D], `keys` and `values` [B, K, L, D], `bias` broadcast to
    [B, K, Q, L] (0 or -inf). `causal` masks what follows a query and needs Q = L. With a softcap c the scores become
    c * tanh(scores / c) before the bias (Gemma 2, arXiv:2408.00118). Returns [B, K, Q, D]."""
    if softcap is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=causal, scale=scale)
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(above, float("-inf"))
    if bias is not None:
        scores.add_(bias)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """One new token a sequence: `queries` [B, H, D], `keys` and `values` [B, K, L, D], `bias` [B, 1, 1, L] -> [B, H * D].

    The G heads that share keys are treated as G queries of one head, so grouped keys are never repeated.
    """
    b, h, d = queries.shape
    k = keys.shape[1]
    if softcap is None and keys.device.type == "cpu" and keys.stride(0) == k * keys.stride(1):
        # Batched products over the cache in place take a half to nine tenths of the time of the CPU's fused kernel,
        # which is made for many queries.
        merged = bias.expand(b, k, 1, bias.shape[-1]).reshape(b * k, 1, -1)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = torch.baddbmm(merged, queries.reshape(b * k, h // k, d), keys.transpose(1, 2), alpha=scale)
        return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values).view(b, h * d)
    out = attend(queries.view(b, k, h // k, d), keys, values, bias, causal=False, scale=scale, softcap=softcap)
    return out.reshape(b, h * d)


def prefill_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention within each of the packed sequences: `queries` [T, H, D], `keys` and `values` [T, K, D],
    `lengths` sum to T -> [T, H * D]."""
    group = queries.shape[1] // keys.shape[1]
    outputs = []
    for q, k, v in zip(queries.split(lengths), keys.split(lengths), values.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        length = q.shape[2]
        bias = None
        if window is not None and length > window:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_().triu_(1 - window)
            bias = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
        out = attend(q, k, v, bias, causal=bias is None, scale=scale, softcap=softcap)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def causal_bias(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B] -> [B, 1, 1, L]: 0 where a token at `positions` may look, -inf beyond it and before its window."""
    columns = torch.arange(length, device=positions.device)
    hidden = columns > positions[:, None]
    if window is not None:
        hidden |= columns <= positions[:, None] - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None, None]
