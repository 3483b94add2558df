"""Attention over packed sequences, the one place where the boundaries between sequences are kept.

A packed batch is a single row of T tokens: S sequences end to end, no padding, positions from 0 in each.
`packed_attention` computes causal attention inside every sequence and none across:

- on CUDA in half precision, `torch.nn.attention.varlen.varlen_attn` (FlashAttention) on the flat tokens;
- elsewhere, and for what that kernel lacks (float32, logit soft-capping), sequences of similar length are laid
  side by side and padded on the right *inside this function*. A causal mask alone keeps right padding out of
  every real token, so the result is exact, with one kernel call for each group of lengths.

It reaches unmodified Hugging Face models through transformers' `AttentionInterface` under the name
`ATTENTION_NAME`; a forward pass that carries `packing=Packing(...)` is packed, any other one behaves as `sdpa`.

Shapes: S sequences, T tokens, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION_NAME = "verl_packed"

_LENGTH_RATIO = 0.75
"""A group of lengths reaches down to this share of its longest: wider groups compute more padding, narrower
ones launch more kernels. Measured on CPU: for 64 sequences of 40-120 tokens 0.5 to 0.9 differ by the noise (15 %),
one group costs 30 % more; for 32 of 100-600 tokens 0.75 takes half the time of one group."""

_SCORES_PER_GROUP = 2**25
"""Most attention scores a head in one group, which bounds the eager path's memory for long sequences."""


@dataclass(frozen=True)
class _Group:
    """Sequences that are padded together: `count` rows of `length` tokens."""

    count: int
    length: int


class Packing:
    """Where each sequence of a packed row begins and ends; built once a micro-batch, shared by all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        """`lengths`: tokens of each of the S sequences, all positive."""
        self.lengths = list(lengths)
        self.max_length = max(self.lengths)
        self.device = torch.device(device)
        cu = torch.tensor([0, *self.lengths]).cumsum(0)
        self.cu_seqlens = cu.to(self.device, torch.int32)
        """int32 [S + 1] on the device."""
        positions = torch.arange(int(cu[-1])) - cu[:-1].repeat_interleave(torch.tensor(self.lengths))
        self.position_ids = positions[None].to(self.device)
        """int64 [1, T], from 0 in each sequence."""

    @functools.cached_property
    def groups(self) -> list[_Group]:
        """Groups of similar lengths, longest first."""
        ordered = sorted(self.lengths, reverse=True)
        groups: list[_Group] = []
        start = 0
        for i, length in enumerate(ordered):
            longest = ordered[start]
            if length < _LENGTH_RATIO * longest or ((i - start + 1) * longest**2 > _SCORES_PER_GROUP and i > start):
                groups.append(_Group(i - start, longest))
                start = i
        groups.append(_Group(len(ordered) - start, ordered[start]))
        return groups

    @functools.cached_property
    def is_uniform(self) -> bool:
        """All sequences are equally long and in one group, so the flat tokens already are a padded batch."""
        return len(self.groups) == 1 and min(self.lengths) == self.max_length

    @functools.cached_property
    def padding_maps(self) -> tuple[Tensor, Tensor]:
        """(pad [M], unpad [T]): row m of the padded layout is token pad[m]; token t sits in padded row unpad[t].

        Padding repeats its own sequence's last token, so that no value of another sequence ever comes near.
        """
        starts = torch.tensor([0, *self.lengths]).cumsum(0)[:-1]
        lengths = torch.tensor(self.lengths)
        order = torch.argsort(lengths, descending=True, stable=True)
        pad: list[Tensor] = []
        unpad = torch.empty(int(lengths.sum()), dtype=torch.int64)
        done = rows = 0
        for group in self.groups:
            index = order[done : done + group.count]
            offsets = torch.arange(group.length)
            tokens = starts[index, None] + torch.minimum(offsets, lengths[index, None] - 1)
            real = offsets < lengths[index, None]
            unpad[tokens[real]] = rows + torch.arange(group.count * group.length).view(group.count, group.length)[real]
            pad.append(tokens.flatten())
            done += group.count
            rows += group.count * group.length
        return torch.cat(pad).to(self.device), unpad.to(self.device)


class _Pad(torch.autograd.Function):
    """[T, H, D] -> [M, H, D]. Gradients at padding are exactly zero, so the backward pass is a gather as well."""

    @staticmethod
    def forward(ctx, x: Tensor, pad: Tensor, unpad: Tensor) -> Tensor:
        ctx.save_for_backward(unpad)
        return x.index_select(0, pad)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """[M, H, D] -> [T, H, D]."""

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
    """Causal attention within each packed sequence: query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D].

    `window`: a token sees itself and the `window - 1` tokens before it; None sees all. `softcap`: scores become
    softcap * tanh(score / softcap) before the softmax (Gemma 2, section 2). Hq must be a multiple of Hkv.
    """
    if window is not None and window >= packing.max_length:
        window = None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return _varlen_attention(query, key, value, packing, scale, window)
    if packing.is_uniform:
        q, k, v = (x.reshape(len(packing.lengths), packing.max_length, *x.shape[1:]) for x in (query, key, value))
        return _padded_attention(q, k, v, scale, window, softcap).reshape(query.shape)
    pad, unpad = packing.padding_maps
    rows = [g.count * g.length for g in packing.groups]
    parts = [_Pad.apply(x, pad, unpad).split(rows) for x in (query, key, value)]
    outputs = []
    for group, q, k, v in zip(packing.groups, *parts, strict=True):
        q, k, v = (x.view(group.count, group.length, *x.shape[1:]) for x in (q, k, v))
        outputs.append(_padded_attention(q, k, v, scale, window, softcap).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], unpad)


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """q [B, L, Hq, D], k and v [B, L, Hkv, D] -> [B, L, Hq, D]; causal, so right padding needs no mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if softcap is not None:
        return _softcapped(q, k, v, scale, _visible(length, window, q.device), softcap).transpose(1, 2)
    if window is None or window >= length:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        visible = _visible(length, window, q.device)
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
    cu, longest = packing.cu_seqlens, packing.max_length
    return varlen_attn(query, key, value, cu, cu, longest, longest, **extra)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
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
    return packed_attention(q, k, v, packing, scale=scaling, window=sliding_window, softcap=softcap)[None], None


@functools.cache
def register() -> str:
    """Make `ATTENTION_NAME` known to transformers; returns the name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def packed_inputs(input_ids: Tensor, packing: Packing) -> dict:
    """Keyword arguments for a Hugging Face body's packed forward pass over `input_ids` [T].

    The 4-D attention mask stands for "already prepared": it makes transformers build none of its own, and
    packed attention ignores it.
    """
    return {
        "input_ids": input_ids[None],
        "position_ids": packing.position_ids,
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
        "packing": packing,
        "use_cache": False,
    }
