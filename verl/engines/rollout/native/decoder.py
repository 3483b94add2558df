"""The decoder's forward pass over the trainer's own parameters.

Why not the Hugging Face module's forward: on a CPU a small model spends most of a decoding step in Python and in
copies of its cache, and a CUDA graph wants static shapes. Here a layer is about twenty tensor operations.

Shapes: T tokens (packed prompts, or one token a sequence), H query heads, K key-value heads, D head size,
M hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from verl.engines.rollout.native.attention import causal_bias, decode_attention
from verl.engines.rollout.native.cache import KVCache
from verl.engines.rollout.native.spec import DecoderSpec, rope_tables
from verl.engines.train.attention import packed_attention
from verl.engines.train.logprobs import matmul_fp32
from verl.engines.train.packing import Packing

_MERGED_ELEMENTS = 2**18
"""Weights of projections that are copied side by side: up to 1 MiB, a copy that a pass over one prompt outweighs."""


class Linear(NamedTuple):
    weight: Tensor
    """[in, out]: a transposed view of the parameter."""
    bias: Tensor | None


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: tuple[Linear, ...]
    """Query, key and value projections, or one that is all three side by side."""
    qk_norm: Tensor | None
    """[H + K, D]: the two norm weights, repeated for each head."""
    output: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: tuple[Linear, ...]
    """Likewise."""
    down: Linear
    mlp_post_norm: Tensor | None


class Decoder:
    """Prefill and decode of one model. Parameters are referenced, never copied, small ones excepted (projections of a
    small model on a CPU; norm weights of Gemma, of query-key norms and of half-precision models): `bind` refreshes them."""

    def __init__(self, module: nn.Module, spec: DecoderSpec, max_model_len: int) -> None:
        self.spec = spec
        self._module: Any = module
        self._weight = module.get_input_embeddings().weight
        self._rope = rope_tables(module, spec, max_model_len, torch.float32)
        self._embed_scale = None
        if spec.embed_scale is not None:
            self._embed_scale = float(torch.tensor(spec.embed_scale).to(self.dtype))
        self.bind()

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @torch.no_grad()
    def bind(self) -> None:
        """Take the parameters' tensors anew: after an update, and in case their storage was swapped or moved."""
        spec, model = self.spec, self._module.model
        self._embedding = model.embed_tokens.weight.detach()
        self._head = self._module.get_output_embeddings().weight.detach().t()
        self._final_norm = self._norm_weight(model.norm)
        self._layers = [self._bind_layer(layer) for layer in model.layers[: spec.num_layers]]

    def _bind_layer(self, layer: Any) -> Layer:
        spec, attention, mlp = self.spec, layer.self_attn, layer.mlp
        qk_norm = None
        if spec.qk_norm:
            q, k = self._norm_weight(attention.q_norm), self._norm_weight(attention.k_norm)
            qk_norm = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        post = layer.post_attention_layernorm
        return Layer(
            input_norm=self._norm_weight(layer.input_layernorm),
            qkv=_side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=qk_norm,
            output=_linear(attention.o_proj),
            attention_post_norm=self._norm_weight(post) if spec.sandwich_norms else None,
            mlp_norm=self._norm_weight(layer.pre_feedforward_layernorm if spec.sandwich_norms else post),
            gate_up=_side_by_side(mlp.gate_proj, mlp.up_proj),
            down=_linear(mlp.down_proj),
            mlp_post_norm=self._norm_weight(layer.post_feedforward_layernorm) if spec.sandwich_norms else None,
        )

    def _norm_weight(self, norm: nn.Module) -> Tensor:
        weight = norm.weight.detach().float()
        return weight + self.spec.norm_offset if self.spec.norm_offset else weight

    def prefill(self, cache: KVCache, tokens: Tensor, tables: Tensor, packing: Packing) -> None:
        """Put packed prompts into the cache. `tokens` [T]; `tables` [T, blocks], for each token its prompt's row.

        Nothing is returned: decoding starts from a prompt's last token, which is left out here, so that all samples
        of a prompt share what this computes and the output projection is never applied to a prompt.
        """
        spec = self.spec
        h, k = spec.num_heads, spec.num_kv_heads

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return packed_attention(
                *qkv.split((h, k, k), 1),
                packing,
                scale=spec.attention_scale,
                window=spec.windows[layer],
                softcap=spec.attention_softcap,
            ).flatten(1)

        positions = packing.position_ids[0]
        self._run(cache, tokens, positions, cache.addresses(tables, positions), attend, keep_output=False)

    def decode(self, cache: KVCache, tokens: Tensor, positions: Tensor, tables: Tensor, length: int) -> Tensor:
        """One token of each of B sequences: write its keys and values, return the next token's logits [B, V], fp32.

        `tokens`, `positions` [B]; `tables` [B, blocks]; `length` bounds every position + 1. Only tensors change
        from step to step, so one graph serves all steps of a batch size and length.
        """
        spec = self.spec
        bias = {w: causal_bias(positions, length, w, self.dtype) for w in dict.fromkeys(spec.windows)}

        def attend(layer: int, qkv: Tensor) -> Tensor:
            keys, values = cache.read(layer, tables, length)
            return decode_attention(
                qkv[:, : spec.num_heads],
                keys,
                values,
                bias[spec.windows[layer]],
                scale=spec.attention_scale,
                softcap=spec.attention_softcap,
            )

        # cuDNN's attention builds a plan for every new shape, some 50 ms, and shapes change as sequences finish.
        on_gpu = self.device.type == "cuda"
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if on_gpu else contextlib.nullcontext():
            hidden = self._run(cache, tokens, positions, cache.addresses(tables, positions), attend, keep_output=True)
        logits = matmul_fp32(self._norm(hidden, self._final_norm), self._head)
        if spec.logit_softcap is not None:
            logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
        return logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalised in float32, returned in the dtype of the matrix products."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps).to(self.dtype)

    def _run(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        addresses: Tensor,
        attend: Callable[[int, Tensor], Tensor],
        *,
        keep_output: bool,
    ) -> Tensor:
        """All layers: [T] -> hidden [T, M]. Without `keep_output` the last layer stops once its cache is written."""
        spec = self.spec
        hidden = F.embedding(tokens, self._embedding)
        if self._embed_scale is not None:
            hidden.mul_(self._embed_scale)
        hidden = hidden.float()  # the residual stream, as the trainer keeps it
        rope = {kind: (c.index_select(0, positions), s.index_select(0, positions)) for kind, (c, s) in self._rope.items()}
        for index, layer in enumerate(self._layers):
            qkv = self._project(layer, self._norm(hidden, layer.input_norm), *rope[spec.rope_kinds[index]])
            cache.write(index, addresses, qkv[:, spec.num_heads :])
            if not keep_output and index == spec.num_layers - 1:
                break
            self._add_linear(hidden, attend(index, qkv), layer.output, layer.attention_post_norm)
            x = self._norm(hidden, layer.mlp_norm)
            gate, up = _apply_all(x, layer.gate_up).chunk(2, 1)
            gate = F.silu(gate, inplace=True) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")
            self._add_linear(hidden, gate.mul_(up), layer.down, layer.mlp_post_norm)
        return hidden

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, M] -> [T, H + 2K, D]: queries and keys, normalised and rotated together, and values, in one buffer."""
        spec = self.spec
        qkv = _apply_all(x, layer.qkv).view(x.shape[0], -1, spec.head_dim)
        rotated = qkv[:, : spec.num_heads + spec.num_kv_heads]
        qk = rotated
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (spec.head_dim,), None, spec.norm_eps).mul_(layer.qk_norm)
        if qk.dtype == cos.dtype:
            torch.addcmul(qk * cos, qk.roll(spec.head_dim // 2, -1), sin, out=rotated)
        else:
            rotated.copy_(torch.addcmul(qk * cos, qk.roll(spec.head_dim // 2, -1), sin))
        return qkv

    def _add_linear(self, residual: Tensor, x: Tensor, linear: Linear, post_norm: Tensor | None) -> None:
        """residual += norm(linear(x)), in place; without a norm the sum is part of the matrix product."""
        if post_norm is not None:
            residual.add_(self._norm(_apply(x, linear).float(), post_norm))
            return
        if residual.dtype != x.dtype:
            residual.add_(_apply(x, linear))
            return
        residual.addmm_(x, linear.weight)
        if linear.bias is not None:
            residual.add_(linear.bias)


def _linear(module: Any) -> Linear:
    return Linear(module.weight.detach().t(), None if module.bias is None else module.bias.detach())


def _side_by_side(*modules: Any) -> tuple[Linear, ...]:
    """The projections of one input. Small ones on a CPU are copied into one: there a call costs as much as its product."""
    if modules[0].weight.device.type != "cpu" or sum(m.weight.numel() for m in modules) > _MERGED_ELEMENTS:
        return tuple(_linear(m) for m in modules)
    bias = None if modules[0].bias is None else torch.cat([m.bias.detach() for m in modules])
    return (Linear(torch.cat([m.weight.detach() for m in modules]).t(), bias),)


def _apply_all(x: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """The outputs side by side, in one buffer."""
    if len(linears) == 1:
        return _apply(x, linears[0])
    widths = [linear.weight.shape[1] for linear in linears]
    buffer = x.new_empty(x.shape[0], sum(widths))
    for linear, out in zip(linears, buffer.split(widths, 1), strict=True):
        _apply(x, linear, out=out)
    return buffer


def _apply(x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    if linear.bias is None:
        return torch.mm(x, linear.weight, out=out)
    return torch.addmm(linear.bias, x, linear.weight, out=out)
