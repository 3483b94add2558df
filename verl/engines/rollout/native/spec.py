"""`DecoderSpec`: everything the native engine must know of a model besides its weights.

One decoder covers the dense families that differ only in the switches below: Llama (SmolLM2, and Llama 3's
scaled rotary frequencies), Mistral, Qwen2 / 2.5, Qwen3, Gemma 1, 2 and 3 (text).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.errors import UserError

GEMMA = ("gemma", "gemma2", "gemma3_text")
SANDWICH = ("gemma2", "gemma3_text")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *GEMMA)
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings whose frequencies do not depend on the length of the sequence."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Shapes and switches of one decoder-only model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    norm_eps: float
    norm_offset: float
    """Added to every RMSNorm weight: 1 in Gemma, 0 elsewhere."""
    activation: Literal["silu", "gelu_tanh"]
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embed_scale: float | None
    """Token embeddings are multiplied by it, rounded to the weights' dtype."""
    qk_norm: bool
    """Queries and keys are RMS-normalised over each head."""
    sandwich_norms: bool
    """The outputs of attention and MLP are normalised too, before they are added to the residual."""
    windows: tuple[int | None, ...]
    """Of each layer: how many positions it sees, its own included; None for all."""
    rope_kinds: tuple[str, ...]
    """Of each layer: which rotary table it uses."""

    @staticmethod
    def from_module(module: nn.Module) -> DecoderSpec:
        """Read the spec off a Hugging Face causal LM; raises `UserError` for an architecture it does not cover."""
        config: Any = module.config
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(
                f"rollout.engine=native does not support the architecture {family!r}; it runs {', '.join(FAMILIES)}; "
                "use rollout.engine=vllm for others"
            )
        layers: Any = module.model.layers
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if type(getattr(layers[0].self_attn, name)) is not nn.Linear:
                raise UserError(f"rollout.engine=native needs plain linear layers, {name} is not one; merge adapters first")
        name = getattr(config, "hidden_activation", None) or config.hidden_act
        if name not in ACTIVATIONS:
            raise UserError(f"rollout.engine=native does not support hidden_act={name!r}; it knows {', '.join(ACTIVATIONS)}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        scalar = config.query_pre_attn_scalar if family in SANDWICH else head_dim
        kinds = tuple(config.layer_types) if family == "gemma3_text" else ("all",) * config.num_hidden_layers
        return DecoderSpec(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            norm_offset=1.0 if family in GEMMA else 0.0,
            activation=ACTIVATIONS[name],
            attention_scale=scalar**-0.5,
            # Gemma 3's config still has the field, but its attention does not apply it.
            attention_softcap=config.attn_logit_softcapping if family == "gemma2" else None,
            logit_softcap=config.final_logit_softcapping if family in SANDWICH else None,
            embed_scale=config.hidden_size**0.5 if family in GEMMA else None,
            qk_norm=family in ("qwen3", "gemma3_text"),
            sandwich_norms=family in SANDWICH,
            windows=_windows(config),
            rope_kinds=kinds,
        )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return (window,) * config.num_hidden_layers
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def rope_tables(module: nn.Module, spec: DecoderSpec, length: int, dtype: torch.dtype) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Rotary tables by kind: (cos, signed sin), each [length, 1, D], made from the module's own frequencies.

    With x = (x1, x2) the rotation is x * cos + (-x2, x1) * sin. Rolling x by half its width gives (x2, x1), so the
    minus sign is put into the first half of the sine table and no piece of x is cut out and glued again.
    """
    rotary: Any = module.model.rotary_emb
    tables = {}
    for kind in dict.fromkeys(spec.rope_kinds):
        prefix = "" if kind == "all" else f"{kind}_"
        rope_type = rotary.rope_type if kind == "all" else rotary.rope_type[kind]
        if rope_type not in STATIC_ROPE_TYPES:
            raise UserError(
                f"rollout.engine=native does not support rope_type={rope_type!r}, whose frequencies depend on the length; "
                f"it knows {', '.join(STATIC_ROPE_TYPES)}; use rollout.engine=vllm"
            )
        inv_freq = getattr(rotary, f"{prefix}inv_freq").float()
        if 2 * inv_freq.numel() != spec.head_dim:
            raise UserError("rollout.engine=native does not support partial rotary embeddings; use rollout.engine=vllm")
        scaling = getattr(rotary, f"{prefix}attention_scaling")
        angles = torch.arange(length, device=inv_freq.device, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        tables[kind] = (torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype))
    return tables
