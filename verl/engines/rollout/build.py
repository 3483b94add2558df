"""The rollout engine that a configuration asks for."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from verl.config.schema import Config
from verl.engines.rollout.base import RolloutEngine
from verl.engines.train.loading import load_causal_lm, resolve_device, resolve_dtype
from verl.errors import MissingExtraError


def chosen_engine(config: Config) -> str:
    """rollout.engine, where `auto` is vLLM if it is installed and there is a GPU, else native."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    on_gpu = resolve_device(config.training.device).type == "cuda"
    return "vllm" if on_gpu and importlib.util.find_spec("vllm") is not None else "native"


def check_engine(config: Config) -> str:
    """`chosen_engine`, whose library is known to be here. Raises `MissingExtraError` where it is not."""
    engine = chosen_engine(config)
    if engine != "native" and importlib.util.find_spec(engine) is None:
        raise MissingExtraError(engine, engine)
    return engine


def native_engine(config: Config, tokenizer: Any, device: torch.device, *, module: Any = None) -> RolloutEngine:
    """The built-in engine over `module`, or over the model of `config` when that is None."""
    from verl.engines.rollout.native import NativeEngine

    rollout = config.rollout
    if module is None:
        module = load_causal_lm(config.model, device, resolve_dtype(config.model.dtype, device))
    return NativeEngine(
        module,
        tokenizer,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=_max_model_len(config),
        block_size=rollout.kv_cache_block_size,
        cache_tokens=rollout.kv_cache_tokens,
        seed=_seed(config),
    )


def vllm_engine(config: Config, tokenizer: Any, device: torch.device, *, can_sleep: bool) -> RolloutEngine:
    """vLLM over the model of `config`. `can_sleep`: whether the device also trains."""
    from verl.engines.rollout.vllm import VLLMEngine

    rollout = config.rollout
    return VLLMEngine(
        config.model.path,
        tokenizer,
        device=device,
        dtype=resolve_dtype(config.model.dtype, device),
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=_max_model_len(config),
        cache_tokens=rollout.kv_cache_tokens,
        memory_share=rollout.gpu_memory_utilization,
        seed=_seed(config),
        enforce_eager=rollout.enforce_eager,
        trust_remote_code=config.model.trust_remote_code,
        can_sleep=can_sleep,
    )


def _max_model_len(config: Config) -> int:
    return config.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length


def _seed(config: Config) -> int:
    return config.training.seed if config.rollout.seed is None else config.rollout.seed
