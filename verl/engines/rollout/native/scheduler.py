"""Which samples run, in which slots, on which cache blocks. Pure host-side bookkeeping: no tensors here.

Running samples sit in slots 0 .. n-1 without holes (a freed slot is filled by the last one), so that a decoding step
always works on a prefix of every slot-indexed tensor. Samples of one prompt form a `PromptGroup`: the prompt, except
its last token, is computed once and shared; each sample starts by decoding the last prompt token, so its first token
needs no code of its own. When blocks run out, the newest sample is put back to the queue and recomputed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from verl.data.types import Completion, FinishReason
from verl.engines.rollout.base import GenerationRequest
from verl.engines.rollout.native.stops import StopStrings


@dataclass(eq=False, slots=True, kw_only=True)
class Sample:
    """One completion in the making."""

    request: GenerationRequest
    sample_index: int
    key: int
    """Of its stream of random numbers."""
    end_ids: frozenset[int]
    """Tokens that end it."""
    stop_strings: StopStrings | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    admitted: int = 0
    """Order of admission, to preempt the newest first."""

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the cache while it runs: all but the newest."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_tokens - len(self.token_ids)

    def append(self, token_id: int, logprob: float, version: int) -> None:
        """Take one more token and decide whether it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(version)
        sampling, count = self.request.sampling, len(self.token_ids)
        if count >= sampling.min_tokens and (
            token_id in self.end_ids or (self.stop_strings is not None and self.stop_strings.hit(self.token_ids))
        ):
            self.finish_reason = "stop"
        elif count >= sampling.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        if self.finish_reason is None:
            raise RuntimeError("the sample still runs")
        return Completion(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            policy_versions=self.policy_versions,
        )


@dataclass(eq=False, slots=True)
class PromptGroup:
    """Samples that wait to start from the same tokens."""

    tokens: Sequence[int]
    waiting: deque[Sample]
    blocks: list[int] | None = None
    """Where the prompt is cached, while some samples of it run and others still wait for a slot."""

    @property
    def cached(self) -> int:
        return len(self.tokens) - 1


@dataclass(slots=True)
class Admission:
    """What the engine has to do for the samples just admitted: prefill, then copy, then decode."""

    prefills: list[tuple[Sequence[int], list[int]]] = field(default_factory=list)
    """(tokens, blocks)"""
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(source block, destination block, positions)"""
    samples: list[Sample] = field(default_factory=list)


class Memory(Protocol):
    """Who gets which cache blocks."""

    moves_with_slot: bool
    """A sample that changes its slot must be copied in the cache."""
    can_run_out: bool
    """A running sample may need more blocks than there are."""

    def admit(self, group: PromptGroup, first_slot: int, slots: int, out: Admission) -> int:
        """Start up to `slots` samples of the group in slots from `first_slot`; returns how many memory allows."""
        ...

    def grow(self, sample: Sample, tokens: int) -> bool:
        """Make room for `tokens` cached tokens; False when there is none."""
        ...

    def release(self, sample: Sample) -> None: ...

    def drop(self, group: PromptGroup) -> None:
        """Forget a waiting group's cached prompt."""
        ...

    @property
    def blocks_in_use(self) -> int: ...


class RowMemory:
    """Slot i owns row i. `SPARE_ROWS` more keep the prompt of the group that is only partly admitted. At most one is, but
    when its last samples start, the next group's prompt may be computed before they have copied theirs: hence two."""

    SPARE_ROWS = 2

    moves_with_slot = True
    can_run_out = False

    def __init__(self, max_slots: int) -> None:
        self._spare, self._other_spare = max_slots, max_slots + 1
        self._rows_in_use = 0
        self._spare_in_use = 0

    @property
    def blocks_in_use(self) -> int:
        return self._rows_in_use + self._spare_in_use

    def admit(self, group: PromptGroup, first_slot: int, slots: int, out: Admission) -> int:
        count = min(len(group.waiting), slots)
        source = group.blocks[0] if group.blocks else None
        if source is None:
            source = first_slot
            if count < len(group.waiting):
                source = self._spare
                self._spare, self._other_spare = self._other_spare, self._spare
            out.prefills.append((group.tokens[:-1], [source]))
        for slot in range(first_slot, first_slot + count):
            sample = group.waiting.popleft()
            sample.blocks = [slot]
            out.samples.append(sample)
            if slot != source:
                out.copies.append((source, slot, group.cached))
        group.blocks = [source] if group.waiting else None
        self._spare_in_use = int(bool(group.waiting))
        self._rows_in_use += count
        return count

    def grow(self, sample: Sample, tokens: int) -> bool:
        return True

    def release(self, sample: Sample) -> None:
        sample.blocks = []
        self._rows_in_use -= 1

    def drop(self, group: PromptGroup) -> None:
        if group.blocks is not None:
            group.blocks = None
            self._spare_in_use = 0


class PagedMemory:
    """Blocks of a few tokens from one pool, counted by reference: samples of a group share the full ones.

    `num_blocks` must exceed what the longest sequence takes by one (a prompt's last block and one sample's copy of it).
    """

    moves_with_slot = False
    can_run_out = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def blocks_in_use(self) -> int:
        return len(self._references) - len(self._free)

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def admit(self, group: PromptGroup, first_slot: int, slots: int, out: Admission) -> int:
        cached, size = group.cached, self._block_size
        # Leave a block for each sample that already runs: admitting must not force the next step to preempt.
        headroom = first_slot + 1
        if group.blocks is None:
            needed = -(-cached // size)
            if len(self._free) < needed + headroom:
                return 0
            group.blocks = [self._take() for _ in range(needed)]
            if cached:
                out.prefills.append((group.tokens[:-1], group.blocks))
        blocks = group.blocks
        count = 0
        while group.waiting and count < slots:
            if len(self._free) < headroom + count:
                break
            sample = group.waiting[0]
            if len(group.waiting) == 1:
                # The last one takes the prompt over, its partly filled block included.
                sample.blocks = blocks
                group.blocks = None
            elif cached % size:
                sample.blocks = [*blocks[:-1], self._take()]
                out.copies.append((blocks[-1], sample.blocks[-1], cached % size))
                self._share(blocks[:-1])
            else:
                sample.blocks = list(blocks)
                self._share(blocks)
            group.waiting.popleft()
            out.samples.append(sample)
            count += 1
        return count

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._references[block] += 1

    def grow(self, sample: Sample, tokens: int) -> bool:
        missing = -(-tokens // self._block_size) - len(sample.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            sample.blocks.append(self._take())
        return True

    def release(self, sample: Sample) -> None:
        self._release(sample.blocks)
        sample.blocks = []

    def drop(self, group: PromptGroup) -> None:
        if group.blocks is not None:
            self._release(group.blocks)
            group.blocks = None


class Scheduler:
    """The queue, the running samples (index = slot) and their memory."""

    def __init__(self, memory: Memory, max_slots: int) -> None:
        self.memory = memory
        self.max_slots = max_slots
        self.running: list[Sample] = []
        self.waiting: deque[PromptGroup] = deque()
        self.changed = False
        """Set when samples enter or leave slots, for the engine to notice and clear."""
        self._admissions = 0

    def submit(self, samples: Iterable[Sample]) -> None:
        """Queue samples; those with equal prompts, of one request or of several, become one group."""
        groups: dict[tuple[int, ...], PromptGroup] = {}
        for sample in samples:
            tokens = tuple(sample.request.prompt_ids)
            if tokens not in groups:
                groups[tokens] = PromptGroup(tokens, deque())
            groups[tokens].waiting.append(sample)
        self.waiting.extend(groups.values())

    def admit(self) -> Admission:
        """Start waiting samples, in order, while slots and memory last."""
        out = Admission()
        while self.waiting and len(self.running) < self.max_slots:
            group = self.waiting[0]
            first = len(self.running)
            count = self.memory.admit(group, first, self.max_slots - first, out)
            for sample in out.samples[len(out.samples) - count :]:
                sample.slot = len(self.running)
                self.running.append(sample)
                self._admissions += 1
                sample.admitted = self._admissions
            if group.waiting:
                break
            self.waiting.popleft()
        self.changed |= bool(out.samples)
        return out

    def shortest_of(self, limit: int) -> int:
        """Steps that may run without looking at the tokens: none passes a sample's `max_tokens`."""
        return min(limit, min(sample.remaining for sample in self.running))

    def next_victim(self, steps: int) -> Sample | None:
        """Make room for `steps` more tokens of every running sample, oldest first. When memory runs out, prompts kept
        for waiting groups go first; if that is not enough the newest sample is returned, to be preempted."""
        if not self.memory.can_run_out:
            return None
        for sample in sorted(self.running, key=lambda s: s.admitted):
            while not self.memory.grow(sample, sample.cached + steps):
                held = next((group for group in self.waiting if group.blocks is not None), None)
                if held is None:
                    return max(self.running, key=lambda s: s.admitted)
                self.memory.drop(held)
        return None

    def drop_held_prompts(self) -> None:
        """Forget the prompts kept for waiting groups, to free their blocks or because the weights changed."""
        for group in self.waiting:
            self.memory.drop(group)

    def requeue(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Put running samples back at the head of the queue, to be recomputed, oldest first; returns slot moves."""
        moves = self.remove(samples)
        for sample in sorted(samples, key=lambda s: -s.admitted):
            self.waiting.appendleft(PromptGroup((*sample.request.prompt_ids, *sample.token_ids), deque([sample])))
        return moves

    def remove(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Take samples out of their slots and close the holes; returns (from, to) slot moves, all disjoint."""
        self.changed |= bool(samples)
        leaving = set(map(id, samples))
        left = len(self.running) - len(leaving)
        movers = [s for s in self.running[left:] if id(s) not in leaving]
        moves = []
        for sample in samples:
            self.memory.release(sample)
            if sample.slot < left:
                mover = movers.pop()
                moves.append((mover.slot, sample.slot))
                self.running[sample.slot] = mover
                mover.slot = sample.slot
                if self.memory.moves_with_slot:
                    mover.blocks = [mover.slot]
            sample.slot = -1
        del self.running[left:]
        return moves

    def take_waiting(self, request_ids: Collection[int]) -> list[Sample]:
        """Remove waiting samples of these requests from the queue."""
        taken: list[Sample] = []
        for group in self.waiting:
            taken += [s for s in group.waiting if s.request.request_id in request_ids]
            group.waiting = deque(s for s in group.waiting if s.request.request_id not in request_ids)
            if not group.waiting:
                self.memory.drop(group)
        self.waiting = deque(group for group in self.waiting if group.waiting)
        return taken
