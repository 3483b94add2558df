"""vLLM in this process: one device, its own copy of the weights, new ones taken in place.

Requests go in one sample at a time, so that each has a random stream of its own; samples of a prompt share its key-value
cache by vLLM's prefix cache. Log-probs are of the distribution that was sampled from (`processed_logprobs`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.data.types import Completion, FinishReason
from verl.engines.rollout.base import GenerationRequest, SamplingParams, TokenEvent
from verl.engines.rollout.checks import check_requests
from verl.engines.rollout.ends import end_of_sequence_ids
from verl.engines.rollout.native.sampler import stream_key
from verl.errors import MissingExtraError

ENGINE_SEEDS = 1 << 62
"""Seeds derived by the engine start here, out of the way of those that users choose."""
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass
class _Sample:
    request_id: int
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request_id,
            sample_index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            policy_versions=tuple(self.versions),
        )


class VLLMEngine:
    """A `RolloutEngine` over `vllm.LLM`. One `stream` (or `generate`) runs at a time; `cancel` and `load_weights` may be
    called meanwhile, from the loop over the stream or from another thread.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        cache_tokens: int | None = None,
        memory_share: float = 0.5,
        seed: int = 0,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        can_sleep: bool = True,
    ) -> None:
        """path: a Hugging Face folder or hub id, whose weights are loaded. `tokenizer` is needed for stop strings and ends
        of sequence. `max_model_len`: prompt plus response, tokens. `cache_tokens`: size of the cache; None means what
        `max_num_seqs` full sequences need, on a GPU what `memory_share` of its memory leaves. `can_sleep`: whether weights
        and cache are to leave the GPU in `sleep`.
        Raises `MissingExtraError` without vLLM.
        """
        self.policy_version = 0
        self.requests_served = 0
        """Numbers the requests without a seed. Save and restore it to continue their random numbers."""
        self.needs_weights = False
        """Whether `sleep` let go of the weights, so that `load_weights` has to come before the next generation."""
        self._asleep: list[str] = []
        self._on_gpu = device.type == "cuda"
        self._can_sleep = can_sleep and self._on_gpu
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seed = seed
        self._eos = end_of_sequence_ids(path, tokenizer)
        vllm = _import_vllm(self._on_gpu)
        options: dict[str, Any] = {
            "model": path,
            "tokenizer": path if tokenizer is None else tokenizer.name_or_path,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "seed": 0,
            "trust_remote_code": trust_remote_code,
            "enforce_eager": enforce_eager or not self._on_gpu,
            "enable_prefix_caching": True,
            "enable_sleep_mode": self._can_sleep,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # of the model's own only the ends of sequence count, and those are given above
            "disable_log_stats": True,
        }
        if cache_tokens is None and not self._on_gpu:
            cache_tokens = max_num_seqs * max_model_len
        if cache_tokens is None:
            options["gpu_memory_utilization"] = memory_share
        else:
            options["kv_cache_memory_bytes"] = _cache_bytes(path, dtype, cache_tokens, max_num_seqs, trust_remote_code)
        self._llm = vllm.LLM(**options)
        self._engine = self._llm.llm_engine
        self._shapes = {name: tensor.shape for name, tensor in self.named_weights()}
        self.weight_dtype = dtype
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._lock = threading.RLock()
        self._cancelled: set[int] = set()
        self._running: dict[str, _Sample] = {}
        self._streams = 0

    # --- generation

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Run requests to the end; completions ordered by request, then by sample index."""
        order = {request.request_id: i for i, request in enumerate(requests)}
        done = [c for c in self.stream(requests) if isinstance(c, Completion)]
        return sorted(done, key=lambda c: (order[c.request_id], c.sample_index))

    def stream(self, requests: Sequence[GenerationRequest], *, tokens: bool = False) -> Iterator[Completion | TokenEvent]:
        """Completions as they finish; with `tokens`, every token as well, before its completion.

        Raises `UserError` at once for requests that cannot be run. Closing the iterator early frees everything.
        """
        check_requests(
            requests,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )
        if self.needs_weights:
            raise RuntimeError("vLLM sleeps and has let go of its weights; wake() it and load_weights() before generating")
        with self._lock:
            if not self._running:
                self._cancelled.clear()
        return self._stream(requests, tokens)

    def _stream(self, requests: Sequence[GenerationRequest], tokens: bool) -> Iterator[Completion | TokenEvent]:
        with self._lock:
            if self._running:
                raise RuntimeError("this vLLM engine runs one stream at a time; finish or close the other first")
            self._streams += 1
            for request in requests:
                self._submit(request)
        try:
            while self._running:
                with self._lock:
                    finished = self._apply_cancellations()
                    events: list[TokenEvent] = []
                    for output in self._engine.step() if self._running else ():
                        finished += self._take(output, events)
                if tokens:
                    yield from events
                yield from finished
        finally:
            with self._lock:
                self._engine.abort_request(list(self._running))
                self._running.clear()

    def _submit(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        seed = stream_key(self._seed + ENGINE_SEEDS, self.requests_served) if sampling.seed is None else sampling.seed
        self.requests_served += 1
        for index in range(sampling.n):
            key = f"{self._streams}-{request.request_id}-{index}"
            # The salt keeps entries of other weights out, should one survive the reset after a sync.
            prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"policy {self.policy_version}"}
            self._engine.add_request(key, prompt, _sampling_params(sampling, stream_key(seed, index), self._eos))
            self._running[key] = _Sample(request.request_id, index)

    def _take(self, output: Any, events: list[TokenEvent]) -> list[Completion]:
        """The new tokens of one sample, noted down; its completion, if these were the last."""
        sample = self._running.get(output.request_id)
        if sample is None:  # cancelled
            return []
        [new] = output.outputs
        for token_id, logprobs in zip(new.token_ids, new.logprobs or (), strict=True):
            logprob = logprobs[token_id].logprob
            sample.token_ids.append(token_id)
            sample.logprobs.append(logprob)
            sample.versions.append(self.policy_version)
            events.append(TokenEvent(request_id=sample.request_id, sample_index=sample.index, token_id=token_id, logprob=logprob))
        if not output.finished:
            return []
        del self._running[output.request_id]
        return [sample.completion(_REASONS[new.finish_reason])]

    def cancel(self, request_id: int) -> None:
        """End a request of the running stream; its samples come back with what they have. Others are ignored."""
        self._cancelled.add(request_id)

    def _apply_cancellations(self) -> list[Completion]:
        chosen, self._cancelled = self._cancelled, set()
        keys = [key for key, sample in self._running.items() if sample.request_id in chosen]
        if keys:
            self._engine.abort_request(keys)
        return [self._running.pop(key).completion("cancelled") for key in keys]

    # --- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy `weights` in place, by Hugging Face name, and set the version. Running samples are recomputed under the new
        weights before they go on. Raises `KeyError` for an unknown name and `ValueError` for a wrong shape."""
        with self._lock, torch.no_grad():
            self._wake("weights")
            self._model().load_weights(self._checked(weights))
            self.policy_version = version
            self.needs_weights = False
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            if name not in self._shapes:
                raise KeyError(f"the model has no parameter {name!r}")
            if self._shapes[name] != value.shape:
                raise ValueError(f"weight {name} has shape {tuple(value.shape)}, expected {tuple(self._shapes[name])}")
            yield name, value

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the parameters in use, fused ones taken apart, under Hugging Face names; tied weights come once."""
        model = self._model()
        fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        seen: set[int] = set()
        for path, module in model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                parent, _, leaf = path.rpartition(".")
                if leaf in fused:
                    pieces = parameter.data.split(list(module.output_sizes))
                    yield from ((f"{parent}.{part}.{kind}", piece) for part, piece in zip(fused[leaf], pieces, strict=True))
                elif hasattr(module, "org_vocab_size"):  # rows are padded
                    yield f"{path}.{kind}", parameter.data[: module.org_vocab_size]
                else:
                    yield f"{path}.{kind}", parameter.data

    def _model(self) -> Any:
        [model] = self._engine.apply_model(lambda module: module)
        return model

    # --- memory

    def sleep(self) -> None:
        """Free the cache and the weights on a GPU: the trainer has the weights, and `needs_weights` says they must come
        back. On a CPU vLLM keeps both."""
        with self._lock:
            if self._running:
                raise RuntimeError("vLLM cannot sleep while it generates; finish or close the stream first")
            if self._can_sleep and not self._asleep:
                self._engine.sleep(level=2)
                self._asleep = ["weights", "kv_cache"]
                self.needs_weights = True

    def wake(self) -> None:
        """Have memory for cache and weights again; `needs_weights` says whether the latter are to be loaded."""
        with self._lock:
            self._wake("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        if sleeping := [part for part in parts if part in self._asleep]:
            self._engine.wake_up(sleeping)
            self._asleep = [part for part in self._asleep if part not in sleeping]


def _import_vllm(on_gpu: bool) -> Any:
    """The package, told to stay in this process and to be quiet."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
    }
    if not on_gpu:
        # Binding threads leaves a core idle; compiling small functions takes longer than it ever saves.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", "vllm") from None
    if not on_gpu:
        import vllm._custom_ops as ops

        # oneDNN's packed copies of the weights would not follow an update in place.
        ops._supports_onednn = False
    return vllm


def _sampling_params(sampling: SamplingParams, seed: int, eos: Sequence[int]) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    ends = sampling.stop_token_ids if sampling.ignore_eos else (*eos, *sampling.stop_token_ids)
    return VLLMSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        seed=seed,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        stop_token_ids=list(dict.fromkeys(ends)),
        ignore_eos=True,  # the ends of sequence are among the stop ids
        min_tokens=sampling.min_tokens,
        logprobs=0,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _cache_bytes(path: str, dtype: torch.dtype, tokens: int, sequences: int, trust_remote_code: bool) -> int:
    """Memory of a key-value cache for `tokens`, with a block to spare for each sequence."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spare = _LARGEST_BLOCK * (sequences + 2)
    return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize * (tokens + spare)


_LARGEST_BLOCK = 128
"""Tokens a cache block, on a CPU; on a GPU 16."""
