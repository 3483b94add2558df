"""Attention over packed sequences, the one place where the boundaries between sequences are kept.

A packed batch is a single row of R tokens without padding, made of pieces (`verl.engines.train.packing`).
`packed_attention` computes causal attention inside every piece and to the context it continues, and none across:

- on CUDA in half precision, `torch.nn.attention.varlen.varlen_attn` (FlashAttention) on the flat tokens;
- elsewhere, and for what that kernel lacks (float32, logit soft-capping), pieces of similar length are laid
  side by side and padded on the right *inside this function*. A causal mask alone keeps right padding out of
  every real token, so the result is exact, with one kernel call for each group of lengths.

It reaches unmodified Hugging Face models through transformers' `AttentionInterface` under the name
`ATTENTION_NAME`; a forward pass that carries `packing=Packing(...)` is packed, any other one behaves as `sdpa`.

Shapes: R tokens, M tokens of a padded layout, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.engines.train.packing import Gather, Packing
from verl.engines.train.token_shares import Peers, TokenShares, heads_to_tokens, tokens_to_heads

ATTENTION_NAME = "verl_packed"


class _Gather(torch.autograd.Function):
    """[R, H, D] -> [M, H, D]. Gradients at padding are exactly zero, so the backward pass only gathers as well."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        total = grad.index_select(0, ctx.gather.own)
        for tokens, places in ctx.gather.copies:
            copies = grad.index_select(0, places.flatten()).view(*places.shape, *grad.shape[1:])
            total.index_add_(0, tokens, copies.sum(1))
        return total, None


class _Unpad(torch.autograd.Function):
    """[M, H, D] -> [R, H, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        ctx.rows = x.shape[0]
        return x.index_select(0, unpad)

    @staticmethod
    def backward(ctx, grad: Tensor):
        padded = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return padded.index_copy_(0, ctx.saved_tensors[0], grad), None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each packed sequence: query [R, Hq, D], key and value [R, Hkv, D] -> [R, Hq, D].

    `window`: a token sees itself and the `window - 1` tokens before it; None sees all. `softcap`: scores become
    softcap * tanh(score / softcap) before the softmax (Gemma 2, section 2). Hq must be a multiple of Hkv.
    """
    if window is not None and window >= packing.max_length:
        window = None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return _varlen_attention(query, key, value, packing, scale, window)
    if packing.is_uniform:
        q, k, v = (x.reshape(len(packing.lengths), packing.max_queries, *x.shape[1:]) for x in (query, key, value))
        return _padded_attention(q, k, v, scale, window, softcap).reshape(query.shape)
    queries, keys = packing.padded_queries, packing.padded_keys
    q_rows = [g.count * g.length for g in packing.groups]
    k_rows = [g.count * (g.context + g.length) for g in packing.groups]
    q_parts = _Gather.apply(query, queries).split(q_rows)
    k_parts, v_parts = (_Gather.apply(x, keys).split(k_rows) for x in (key, value))
    outputs = []
    for group, q, k, v in zip(packing.groups, q_parts, k_parts, v_parts, strict=True):
        q, k, v = (x.view(group.count, -1, *x.shape[1:]) for x in (q, k, v))
        outputs.append(_padded_attention(q, k, v, scale, window, softcap).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], queries.own)


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """q [B, L, Hq, D], k and v [B, C + L, Hkv, D] -> [B, L, Hq, D]; causal, the queries being the last L positions, so
    right padding needs no mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length, keys, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    if softcap is not None:
        return _softcapped(q, k, v, scale, _visible(keys, window, q.device)[-length:], softcap).transpose(1, 2)
    if length == keys and (window is None or window >= length):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        visible = _visible(keys, window, q.device)[-length:]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor, softcap: float) -> Tensor:
    """Plain attention with capped scores, which no fused kernel of torch offers; [B, H, L, D] layout, bool `visible`."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    # The least finite score, not -inf: a row that sees nothing (left padding) must not become NaN.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [L, L]: may query i see key j? Causal, and within the window if there is one."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible if window is None else visible.triu(1 - window)


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    extra: dict = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _varlen_parameters():
            extra["enable_gqa"] = True
        else:  # before torch 2.12
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if not packing.is_shared:
        cu, longest = packing.cu_seqlens, packing.max_queries
        return varlen_attn(query, key, value, cu, cu, longest, longest, **extra)
    key, value = (_Gather.apply(x, packing.flat_keys) for x in (key, value))
    # The kernel aligns a causal mask to the last query and the last key.
    cu_q, cu_k = packing.cu_seqlens, packing.key_cu_seqlens
    return varlen_attn(query, key, value, cu_q, cu_k, packing.max_queries, packing.max_length, **extra)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    sequence: Peers | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers' attention layers call: query [B, Hq, T, D] and so on -> ([B, T, Hq, D], no weights).

    Attention dropout is not applied to packed passes: the log-probs of a policy must be a function of its weights.
    """
    if packing is None and softcap is not None:
        if attention_mask is None:  # transformers drops masks that are plainly causal, or of one query
            attention_mask = _visible(key.shape[2], None, query.device)[-query.shape[2] :]
        return _softcapped(query, key, value, scaling, attention_mask, softcap).transpose(1, 2), None
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # A float32 residual stream has float32 rotary tables: queries and keys come out wider than values.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if sequence is None:
        return packed_attention(q, k, v, packing, scale=scaling, window=sliding_window, softcap=softcap)[None], None
    q, k, v = (tokens_to_heads(x, sequence) for x in (q, *_enough_heads(k, v, sequence.size)))
    out = packed_attention(q, k, v, packing, scale=scaling, window=sliding_window, softcap=softcap)
    return heads_to_tokens(out, sequence)[None], None


def _enough_heads(k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Key-value heads repeated until each rank can have some."""
    repeats = ranks // math.gcd(ranks, k.shape[1])
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))


@functools.cache
def register() -> str:
    """Make `ATTENTION_NAME` known to transformers; returns the name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def packed_inputs(input_ids: Tensor, packing: Packing, shares: TokenShares | None = None) -> dict:
    """Keyword arguments for a Hugging Face body's packed forward pass over `input_ids` [R]; with `shares`, over the rank's
    own of these tokens.

    The 4-D attention mask stands for "already prepared": it makes transformers build none of its own, and
    packed attention ignores it.
    """
    positions, extra = packing.position_ids, {}
    if shares is not None:
        count = input_ids.shape[0]
        input_ids, positions = input_ids[shares.mine(count)], positions[:, shares.in_attention(count)]
        extra = {"sequence": shares.sequence}
    return extra | {
        "input_ids": input_ids[None],
        "position_ids": positions,
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
        "packing": packing,
        "use_cache": False,
    }
