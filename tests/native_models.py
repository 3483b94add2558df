"""Tiny random models of every family the native engine runs, with logits far from uniform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from verl.data.types import Completion
from verl.engines.rollout.base import GenerationRequest, SamplingParams
from verl.engines.rollout.native import NativeEngine

VOCAB = 61
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.25,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
_QWEN2 = {k: v for k, v in _SHAPE.items() if k not in ("head_dim", "hidden_size")} | {"hidden_size": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama3-rope-biases": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3),
    "mistral-window": lambda: MistralConfig(**_SHAPE, sliding_window=6),
    "qwen2-biases": lambda: Qwen2Config(**_QWEN2),
    "qwen3": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3-window-biases": lambda: Qwen3Config(
        **_SHAPE, attention_bias=True, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "gemma": lambda: GemmaConfig(**_SHAPE),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE,
        sliding_window=6,
        layer_types=_LAYERS,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=6, layer_types=_LAYERS, query_pre_attn_scalar=24, tie_word_embeddings=True
    ),
    "gemma3-untied": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=6, layer_types=_LAYERS, query_pre_attn_scalar=24, tie_word_embeddings=False
    ),
}
"""By name: config makers. Eager attention, because the softcap of Gemma 2 needs it."""


def tiny_model(name: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def requests_of(prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams) -> list[GenerationRequest]:
    return [GenerationRequest(request_id=i, prompt_ids=p, sampling=sampling) for i, p in enumerate(prompt_ids)]


def make_engine(model: PreTrainedModel, tokenizer: Any = None, **options: Any) -> NativeEngine:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "block_size": 4, "eos_token_ids": [2], **options}
    return NativeEngine(model, tokenizer, **settings)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    """[new tokens, V] fp32 logits of Hugging Face's own forward pass, one for each generated token."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    return model(ids).logits[0, len(prompt_ids) - 1 : -1].float()


def logprob_error(model: PreTrainedModel, prompt_ids: Sequence[int], completion: Completion, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probs and the reference's."""
    logits = reference_logits(model, prompt_ids, completion.token_ids) / temperature
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (expected - torch.tensor(completion.logprobs)).abs().max().item()
