"""`NativeEngine`: continuous batching over the trainer's own parameters, on a CPU or a GPU, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.data.types import Completion
from verl.engines.rollout.base import GenerationRequest, TokenEvent
from verl.engines.rollout.checks import check_requests
from verl.engines.rollout.ends import merged_ids
from verl.engines.rollout.native.cache import KVCache
from verl.engines.rollout.native.decoder import Decoder
from verl.engines.rollout.native.sampler import stream_key
from verl.engines.rollout.native.scheduler import Memory, PagedMemory, RowMemory, Sample, Scheduler
from verl.engines.rollout.native.slots import Slots
from verl.engines.rollout.native.spec import DecoderSpec
from verl.engines.rollout.native.stops import StopStrings
from verl.engines.train.packing import Packing
from verl.errors import UserError

STEPS_PER_READ = 8
"""On a GPU the host reads tokens every so many steps; what follows an end of sequence is thrown away."""
MAX_PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass; a longer prompt goes alone."""
FREE_MEMORY_SHARE = 0.5
"""Of a GPU's free memory, for the cache, unless its size is given."""
ENGINE_SEEDS = 1 << 62
"""Seeds derived by the engine start here, out of the way of those that users choose."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made."""

    prefilled_tokens: int = 0
    """Prompt tokens computed; shared prompts count once, preempted samples again."""
    generated_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class _DeviceState:
    """What generation needs on the device besides weights; `sleep` lets go of it."""

    cache: KVCache
    slots: Slots


class NativeEngine:
    """A `RolloutEngine` that reads a Hugging Face causal LM's parameters by reference.

    An optimizer step that changes them in place is seen by the next `generate`; after one, call
    `load_weights([], version)`, which only sets the version. One `stream` (or `generate`) runs at a time; `cancel`
    and `load_weights` may be called meanwhile, from the loop over the stream or from another thread.
    """

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int = 16,
        cache_tokens: int | None = None,
        seed: int = 0,
        eos_token_ids: Sequence[int] | None = None,
        layout: Literal["auto", "paged", "rows"] = "auto",
    ) -> None:
        """`tokenizer` is needed for stop strings and the default `eos_token_ids` only. `max_model_len`: prompt plus
        response, tokens. `cache_tokens`: size of the cache; None means what `max_num_seqs` full sequences need, on a
        GPU at most half of the free memory. `layout` of the cache: auto is rows on a CPU, paged on a GPU.
        Raises `UserError` for an unsupported architecture and for a cache that cannot hold one sequence.
        """
        self.policy_version = 0
        self.needs_weights = False
        self.requests_served = 0
        """Numbers the requests without a seed. Save and restore it to continue their random numbers."""
        self.stats = EngineStats()
        self._module = module
        self._tokenizer = tokenizer
        self._spec = DecoderSpec.from_module(module)
        self._decoder = Decoder(module, self._spec, max_model_len)
        device = self._decoder.device
        self._layout: Literal["paged", "rows"] = ("rows" if device.type == "cpu" else "paged") if layout == "auto" else layout
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs, self._num_blocks = self._size_cache(max_num_seqs, cache_tokens)
        self._seed = seed
        eos = _default_eos(module, tokenizer) if eos_token_ids is None else eos_token_ids
        # A tokenizer may know ids that the model has no logit for.
        self._eos = tuple(i for i in dict.fromkeys(eos) if i < self._spec.vocab_size)
        self._steps_per_read = 1 if device.type == "cpu" else STEPS_PER_READ
        self._lock = threading.RLock()
        self._cancelled: set[int] = set()
        self._scheduler: Scheduler | None = None
        self._state: _DeviceState | None = None
        self.wake()

    def _size_cache(self, max_num_seqs: int, cache_tokens: int | None) -> tuple[int, int]:
        """(slots, blocks)."""
        longest = self._max_model_len
        if cache_tokens is not None and cache_tokens < longest:
            raise UserError(
                f"rollout.kv_cache_tokens={cache_tokens} cannot hold one sequence of "
                f"max_model_len={longest}; raise it to that at least"
            )
        if cache_tokens is None:
            cache_tokens = max_num_seqs * longest
            if self._decoder.device.type == "cuda":
                spec = self._spec
                token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self._decoder.dtype.itemsize
                free, _ = torch.cuda.mem_get_info(self._decoder.device)
                cache_tokens = max(longest, min(cache_tokens, int(free * FREE_MEMORY_SHARE) // token_bytes))
        if self._layout == "rows":
            slots = min(max_num_seqs, cache_tokens // longest)
            return slots, slots + RowMemory.SPARE_ROWS
        # One block over: a prompt's last block and one sample's copy of it exist at once.
        return max_num_seqs, max(cache_tokens // self._block_size, -(-longest // self._block_size)) + 1

    @property
    def blocks_in_use(self) -> int:
        """Cache blocks (in layout `rows`: rows) that running and waiting samples hold."""
        return 0 if self._scheduler is None else self._scheduler.memory.blocks_in_use

    def wake(self) -> None:
        """Create the cache and the slots again after `sleep`; nothing to do when awake."""
        if self._state is not None:
            return
        rows = self._layout == "rows"
        size = self._max_model_len if rows else self._block_size
        dtype, device = self._decoder.dtype, self._decoder.device
        cache = KVCache(self._spec, layout=self._layout, num_blocks=self._num_blocks, block_size=size, dtype=dtype, device=device)
        width = 1 if rows else -(-self._max_model_len // size)
        self._state = _DeviceState(cache, Slots(self._max_num_seqs, width, self._spec.vocab_size, device))

    def sleep(self) -> None:
        """Free the cache and the slots. The weights stay: they are the trainer's."""
        with self._lock:
            if self._scheduler is not None:
                raise RuntimeError("the native engine cannot sleep while it generates; finish or close the stream first")
            self._state = None

    def _awake(self) -> _DeviceState:
        if self._state is None:
            raise RuntimeError("the native engine sleeps; call wake() before generating")
        return self._state

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy `weights` into the module's parameters, in place, by Hugging Face name (none: they are up to date
        already), and set the version. Running samples are recomputed under the new weights before they go on.
        Raises `KeyError` for an unknown name and `ValueError` for a wrong shape."""
        with self._lock, torch.no_grad():
            parameters = dict(self._module.named_parameters(remove_duplicate=False))
            for name, value in weights:
                if name not in parameters:
                    raise KeyError(f"the model has no parameter {name!r}")
                if parameters[name].shape != value.shape:
                    raise ValueError(f"weight {name} has shape {tuple(value.shape)}, expected {tuple(parameters[name].shape)}")
                parameters[name].copy_(value)
            self._decoder.bind()
            self.policy_version = version
            if self._scheduler is not None:
                # Everything leaves its slot, so nothing moves.
                self._scheduler.requeue(list(self._scheduler.running))
                self._scheduler.drop_held_prompts()

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the module's parameters."""
        return self._decoder.dtype

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own parameters (no copies); tied weights come once."""
        return iter(self._module.named_parameters())

    def cancel(self, request_id: int) -> None:
        """End a request of the running stream; its samples come back with what they have. Others are ignored."""
        with self._lock:
            self._cancelled.add(request_id)

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
            vocab_size=self._spec.vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )
        self._awake()
        with self._lock:
            if self._scheduler is None:
                self._cancelled.clear()
        samples = [sample for request in requests for sample in self._samples_of(request)]
        return self._stream(samples, tokens)

    def _stream(self, samples: Sequence[Sample], tokens: bool) -> Iterator[Completion | TokenEvent]:
        with self._lock:
            if self._scheduler is not None:
                raise RuntimeError("the native engine runs one stream at a time; finish or close the other first")
            self._decoder.bind()
            rows = self._layout == "rows"
            memory: Memory = RowMemory(self._max_num_seqs) if rows else PagedMemory(self._num_blocks, self._block_size)
            scheduler = self._scheduler = Scheduler(memory, self._max_num_seqs)
            scheduler.submit(samples)
        try:
            while scheduler.running or scheduler.waiting:
                with self._lock, torch.inference_mode():
                    finished = self._apply_cancellations(scheduler)
                    before = [len(s.token_ids) for s in samples] if tokens else []
                    finished += self._advance(scheduler)
                if tokens:
                    yield from _new_tokens(samples, before)
                for sample in finished:
                    yield sample.completion()
        finally:
            with self._lock:
                self._scheduler = None

    def _samples_of(self, request: GenerationRequest) -> Iterator[Sample]:
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = stream_key(self._seed + ENGINE_SEEDS, self.requests_served)
        self.requests_served += 1
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        end_ids = frozenset(sampling.stop_token_ids if sampling.ignore_eos else (*self._eos, *sampling.stop_token_ids))
        for index in range(sampling.n):
            yield Sample(request=request, sample_index=index, key=stream_key(seed, index), end_ids=end_ids, stop_strings=stops)

    def _apply_cancellations(self, scheduler: Scheduler) -> list[Sample]:
        if not self._cancelled:
            return []
        chosen = frozenset(self._cancelled)
        self._cancelled -= chosen
        running = [s for s in scheduler.running if s.request.request_id in chosen]
        self._follow(scheduler, scheduler.remove(running))
        cancelled = running + scheduler.take_waiting(chosen)
        for sample in cancelled:
            sample.finish_reason = "cancelled"
        return cancelled

    def _advance(self, scheduler: Scheduler) -> list[Sample]:
        """Admit what fits, decode a few steps, and return the samples that finished."""
        cache, slots = self._awake().cache, self._awake().slots
        admission = scheduler.admit()
        if not scheduler.running:
            # Only prompts kept for waiting groups can be in the way: the pool holds the longest sequence and one block.
            scheduler.drop_held_prompts()
            return []
        self._prefill(cache, admission.prefills)
        for length in sorted({n for _, _, n in admission.copies}):
            cache.copy([(s, d) for s, d, n in admission.copies if n == length], length)
        if admission.samples:
            slots.fill(admission.samples)
        steps = scheduler.shortest_of(self._steps_per_read)
        while (victim := scheduler.next_victim(steps)) is not None:
            self.stats.preemptions += 1
            self._follow(scheduler, scheduler.requeue([victim]))
        if scheduler.changed or scheduler.memory.can_run_out:
            slots.sync_tables(scheduler.running)
        if scheduler.changed:
            slots.plan(scheduler.running)
            scheduler.changed = False
        finished = self._decode(scheduler, cache, slots, steps)
        self._follow(scheduler, scheduler.remove(finished))
        return finished

    def _prefill(self, cache: KVCache, prefills: Sequence[tuple[Sequence[int], list[int]]]) -> None:
        start = 0
        totals = list(accumulate(len(tokens) for tokens, _ in prefills))
        while start < len(prefills):
            done = totals[start - 1] if start else 0
            end = start + 1
            while end < len(prefills) and totals[end] - done <= MAX_PREFILL_TOKENS:
                end += 1
            self._prefill_batch(cache, [p for p in prefills[start:end] if p[0]])
            start = end

    def _prefill_batch(self, cache: KVCache, prefills: Sequence[tuple[Sequence[int], list[int]]]) -> None:
        if not prefills:
            return
        device = self._decoder.device
        lengths = [len(tokens) for tokens, _ in prefills]
        width = max(len(blocks) for _, blocks in prefills)
        tables = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for _, blocks in prefills])
        tables = tables.repeat_interleave(torch.tensor(lengths), 0)
        ids = torch.tensor([token for tokens, _ in prefills for token in tokens])
        self._decoder.prefill(cache, ids.to(device), tables.to(device), Packing(lengths, device))
        self.stats.prefilled_tokens += sum(lengths)

    def _decode(self, scheduler: Scheduler, cache: KVCache, slots: Slots, steps: int) -> list[Sample]:
        running = scheduler.running
        length = max(s.cached for s in running) + 1
        outputs = [slots.step(self._decoder, cache, len(running), length + i) for i in range(steps)]
        # The only point where the host waits for the device.
        ids = torch.stack([step[0] for step in outputs]).tolist()
        logprobs = torch.stack([step[1] for step in outputs]).tolist()
        version = self.policy_version
        for step_ids, step_logprobs in zip(ids, logprobs, strict=True):
            for sample, token_id, logprob in zip(running, step_ids, step_logprobs, strict=True):
                if sample.finish_reason is None:
                    sample.append(token_id, logprob, version)
                    self.stats.generated_tokens += 1
        self.stats.decode_steps += steps
        return [s for s in running if s.finish_reason is not None]

    def _follow(self, scheduler: Scheduler, moves: Sequence[tuple[int, int]]) -> None:
        """Repeat the scheduler's slot moves in the device state and, where rows belong to slots, in the cache."""
        if not moves:
            return
        state = self._awake()
        rows = self._layout == "rows"
        if rows:
            state.cache.copy(moves, max(scheduler.running[destination].cached for _, destination in moves))
        state.slots.move(moves, with_tables=not rows)


def _new_tokens(samples: Sequence[Sample], before: Sequence[int]) -> Iterator[TokenEvent]:
    for sample, start in zip(samples, before, strict=True):
        for i in range(start, len(sample.token_ids)):
            yield TokenEvent(
                request_id=sample.request.request_id,
                sample_index=sample.sample_index,
                token_id=sample.token_ids[i],
                logprob=sample.logprobs[i],
            )


def _default_eos(module: Any, tokenizer: Any) -> tuple[int, ...]:
    found = module.generation_config.eos_token_id if module.generation_config is not None else None
    return merged_ids(found, tokenizer)
