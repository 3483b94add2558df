"""Slot-indexed device state of the running samples: everything a decoding step reads and writes.

Shapes never change while the engine lives, and row i always belongs to slot i, so that a step is a fixed sequence of
tensor operations on a prefix of these tensors. The host writes a slot when a sample enters it and never looks at it
again; sampled tokens come back in batches of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.engines.rollout.native.cache import KVCache
from verl.engines.rollout.native.decoder import Decoder
from verl.engines.rollout.native.sampler import SamplingPlan, sample, suppress, uniforms
from verl.engines.rollout.native.scheduler import Sample

_STEPS_AHEAD = 16
"""Steps whose uniforms are made together: for a few sequences the calls cost more than the numbers."""


class Slots:
    """State of up to `max_slots` running samples, S of them, with block tables of `table_width` blocks."""

    def __init__(self, max_slots: int, table_width: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # Packed, so that filling or moving slots is one copy for each dtype.
        self._ints = torch.zeros(6, max_slots, dtype=torch.int64, device=device)
        self._floats = torch.zeros(3, max_slots, device=device)
        self._tables = torch.zeros(max_slots, table_width, dtype=torch.int64, device=device)
        self._end_ids = torch.full((max_slots, 1), -1, dtype=torch.int64, device=device)
        self._num_table_blocks = [0] * max_slots
        self._plan = SamplingPlan(any_greedy=False, all_greedy=False, any_temperature=False, any_truncation=False)
        self._suppressed_steps = 0
        """Steps in which some sample is still under its `min_tokens`."""
        self._noise: list[Tensor] = []
        """Uniforms of the coming steps, the next one last."""

    def fill(self, samples: Sequence[Sample]) -> None:
        """Write the slots of samples just admitted, which are consecutive."""
        ints, floats = [], []
        for s in samples:
            p = s.request.sampling
            last = s.token_ids[-1] if s.token_ids else s.request.prompt_ids[-1]
            greedy = p.temperature == 0
            top_k = self._vocab_size if greedy or p.top_k < 0 else min(p.top_k, self._vocab_size)
            ints.append((last, s.cached, len(s.token_ids), s.key, top_k, p.min_tokens))
            floats.append((p.temperature, 1.0 if greedy else p.top_p, 0.0 if greedy else p.min_p))
        first, last = samples[0].slot, samples[-1].slot + 1
        self._ints[:, first:last] = torch.tensor(ints, dtype=torch.int64).t().to(self._device)
        self._floats[:, first:last] = torch.tensor(floats, dtype=torch.float32).t().to(self._device)
        end_ids = [sorted(s.end_ids) for s in samples]
        width = max(map(len, end_ids))
        if width > self._end_ids.shape[1]:
            wider = self._end_ids.new_full((self._end_ids.shape[0], width), -1)
            wider[:, : self._end_ids.shape[1]] = self._end_ids
            self._end_ids = wider
        rows = [[*ids, *[-1] * (self._end_ids.shape[1] - len(ids))] for ids in end_ids]
        self._end_ids[first:last] = torch.tensor(rows, dtype=torch.int64).to(self._device)
        for s in samples:
            self._num_table_blocks[s.slot] = 0

    def sync_tables(self, samples: Sequence[Sample]) -> None:
        """Bring the block tables up to date with the blocks that samples were given since."""
        rows, columns, blocks = [], [], []
        for s in samples:
            known = self._num_table_blocks[s.slot]
            if known < len(s.blocks):
                new = range(known, len(s.blocks))
                rows += [s.slot] * len(new)
                columns += new
                blocks += s.blocks[known:]
                self._num_table_blocks[s.slot] = len(s.blocks)
        if rows:
            index = torch.tensor((rows, columns, blocks), dtype=torch.int64).to(self._device)
            self._tables.index_put_((index[0], index[1]), index[2])

    def move(self, moves: Sequence[tuple[int, int]], *, with_tables: bool) -> None:
        """Move slots (from, to). In layout `rows` the tables stay: row i of them is row i of the cache."""
        if not moves:
            return
        index = torch.tensor(moves, dtype=torch.int64).to(self._device)
        source, destination = index[:, 0], index[:, 1]
        self._ints[:, destination] = self._ints[:, source]
        self._floats[:, destination] = self._floats[:, source]
        self._end_ids[destination] = self._end_ids[source]
        if with_tables:
            self._tables[destination] = self._tables[source]
            for s, d in moves:
                self._num_table_blocks[d] = self._num_table_blocks[s]

    def plan(self, samples: Sequence[Sample]) -> None:
        """Decide what the sampler must do for this set of running samples."""
        self._noise = []
        params = [s.request.sampling for s in samples]
        greedy = [p.temperature == 0 for p in params]
        self._plan = SamplingPlan(
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            any_temperature=any(p.temperature not in (0, 1) for p in params),
            any_truncation=any(p.temperature != 0 and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0) for p in params),
        )
        self._suppressed_steps = max(p.min_tokens - len(s.token_ids) for p, s in zip(params, samples, strict=True))

    def step(self, decoder: Decoder, cache: KVCache, num_running: int, length: int) -> tuple[Tensor, Tensor]:
        """One token of each running sample: (token ids [S], log-probs [S]). `length` bounds the cached positions."""
        ints, floats = self._ints[:, :num_running], self._floats[:, :num_running]
        tokens, positions, counts, keys, top_k, min_tokens = ints
        logits = decoder.decode(cache, tokens, positions, self._tables[:num_running], length)
        if self._suppressed_steps > 0:
            self._suppressed_steps -= 1
            suppress(logits, self._end_ids[:num_running], counts < min_tokens)
        if not self._noise:
            ahead = torch.arange(_STEPS_AHEAD, device=self._device)[:, None]
            self._noise = list(uniforms(keys, counts + ahead).unbind())[::-1]
        ids, logprobs = sample(
            logits,
            self._noise.pop(),
            self._plan,
            temperature=floats[0],
            top_k=top_k,
            top_p=floats[1],
            min_p=floats[2],
        )
        tokens.copy_(ids)
        ints[1:3].add_(1)
        return ids, logprobs
