"""Attention of a decoding step: the one place where queries meet the cache. (Prompts attend among themselves only,
through the training engine's `packed_attention`.)

Shapes: B sequences, H query heads, K key-value heads, G = H / K query heads to a key-value head, D head size,
L cached positions.

On a GPU a paged kernel belongs here, one that reads the cache through the block tables: today the pages are gathered
before this is called. torch >= 2.12's `varlen_attn` takes a block table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """softmax(scale * q k' + bias) v for one new token a sequence: `queries` [B, H, D], `keys` and `values`
    [B, K, L, D], `bias` [B, 1, 1, L] of 0 and -inf -> [B, H * D]. With a softcap c the scores become
    c * tanh(scores / c) before the bias (Gemma 2, arXiv:2408.00118).

    The G heads that share keys are treated as G queries of one head, so grouped keys are never repeated.
    """
    b, h, d = queries.shape
    k = keys.shape[1]
    grouped = queries.view(b, k, h // k, d)
    if softcap is not None:
        scores = torch.matmul(grouped, keys.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap).add_(bias)
        out = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)
    elif keys.device.type == "cpu" and keys.stride(0) == k * keys.stride(1):
        # Batched products over the cache in place take a half to nine tenths of the time of the CPU's fused kernel,
        # which is made for many queries.
        merged = bias.expand(b, k, 1, bias.shape[-1]).reshape(b * k, 1, -1)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = torch.baddbmm(merged, grouped.reshape(b * k, h // k, d), keys.transpose(1, 2), alpha=scale)
        out = torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale)
    return out.reshape(b, h * d)


def causal_bias(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B] -> [B, 1, 1, L]: 0 where a token at `positions` may look, -inf beyond it and before its window."""
    # Every row is a piece of one line: hidden, then visible as far as it goes, then hidden; the token sees itself last.
    visible = length if window is None else min(window, length)
    line = torch.full((2 * length + visible,), float("-inf"), dtype=dtype, device=positions.device)
    line[length : length + visible] = 0
    pieces = line.unfold(0, length, 1)
    return pieces.index_select(0, length + visible - 1 - positions)[:, None, None]
