"""How sequences lie end to end in one row of tokens, without padding, each prompt once.

A row is made of pieces. A piece is a whole sequence, or a prompt that several sequences share, or what follows such a
prompt in one of them; the last kind attends to the shared piece as its context. Samples of one prompt (GRPO takes 8
or 16) thus run the prompt through the model once, and gradients add up to what separate copies would give. The last
token of a prompt stays with each sample: its hidden state predicts that sample's first token.

Shapes: P pieces, R tokens of the row, M tokens of a padded or gathered layout; S sequences, T tokens of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.data.balance import pack_by_budget
from verl.data.batch import TokenBatch

_LENGTH_RATIO = 0.75
"""A group of lengths reaches down to this share of its longest: wider groups compute more padding, narrower
ones launch more kernels. Measured on CPU: for 64 sequences of 40-120 tokens 0.5 to 0.9 differ by the noise (15 %),
one group costs 30 % more; for 32 of 100-600 tokens 0.75 takes half the time of one group."""

_SCORES_PER_GROUP = 2**25
"""Most attention scores a head in one group, which bounds the eager path's memory for long sequences."""


_COPIES_PER_TOKEN = 8
"""Attention gathers a context's keys and values for each piece that continues it. That many copies count as one token of
a micro-batch: keys and values are an eighth, or less, of what a layer keeps for a token."""


@dataclass(frozen=True)
class Group:
    """Pieces that are padded together: `count` rows of `length` queries that see `context` tokens before them."""

    count: int
    length: int
    context: int


@dataclass(frozen=True)
class Gather:
    """A layout made of the row's tokens, some of them several times."""

    index: Tensor
    """int64 [M]: which row token each place holds."""
    own: Tensor
    """int64 [R]: the place where each row token stands for itself."""
    copies: tuple[tuple[Tensor, Tensor], ...] = ()
    """(row tokens [m], places [m, n]): tokens that also stand, as context, in n more places each."""

    def to(self, device: torch.device) -> Gather:
        copies = tuple((tokens.to(device), places.to(device)) for tokens, places in self.copies)
        return Gather(self.index.to(device), self.own.to(device), copies)


class Packing:
    """Where each piece of a row begins and ends and what it sees; built once a micro-batch, shared by all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str, contexts: Sequence[int] | None = None) -> None:
        """`lengths`: tokens of each of the P pieces, all positive. `contexts`: for each piece the piece it continues,
        or -1; a piece that is continued has no context itself. Without it, no piece has."""
        self.lengths = list(lengths)
        self.contexts = [-1] * len(self.lengths) if contexts is None else list(contexts)
        self.context_lengths = [0 if c < 0 else self.lengths[c] for c in self.contexts]
        self.is_shared = any(c >= 0 for c in self.contexts)
        self.max_queries = max(self.lengths)
        self.max_length = max(n + c for n, c in zip(self.lengths, self.context_lengths, strict=True))
        """Tokens that some token sees at most, itself included."""
        self.device = torch.device(device)
        self._starts = _starts(self.lengths)
        self.cu_seqlens = self._starts.to(self.device, torch.int32)
        """int32 [P + 1] on the device, of the queries."""
        sizes = torch.tensor(self.lengths)
        first = self._starts[:-1] - torch.tensor(self.context_lengths)
        positions = torch.arange(int(self._starts[-1])) - first.repeat_interleave(sizes)
        self.position_ids = positions[None].to(self.device)
        """int64 [1, R]: from 0 in each sequence, counting on from a context."""

    @functools.cached_property
    def _order(self) -> list[int]:
        return sorted(range(len(self.lengths)), key=lambda i: (self.context_lengths[i], -self.lengths[i], i))

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Groups of equal context and similar length, by context, longest first."""
        groups: list[Group] = []
        first: int | None = None
        count = 0
        for i in self._order:
            length, context = self.lengths[i], self.context_lengths[i]
            if first is not None:
                longest = self.lengths[first]
                scores = (count + 1) * longest * (longest + context)
                if context != self.context_lengths[first] or length < _LENGTH_RATIO * longest or scores > _SCORES_PER_GROUP:
                    groups.append(Group(count, longest, self.context_lengths[first]))
                    first, count = None, 0
            first = i if first is None else first
            count += 1
        assert first is not None
        groups.append(Group(count, self.lengths[first], self.context_lengths[first]))
        return groups

    @functools.cached_property
    def is_uniform(self) -> bool:
        """All pieces are equally long, in one group and see no other, so the row already is a padded batch."""
        return not self.is_shared and len(self.groups) == 1 and min(self.lengths) == self.max_queries

    @functools.cached_property
    def padded_queries(self) -> Gather:
        """The row laid out as `groups`, padded on the right. Padding repeats its own piece's last token, so that no
        value of another sequence ever comes near."""
        return self._padded(with_context=False)

    @functools.cached_property
    def padded_keys(self) -> Gather:
        """As `padded_queries`, with each piece's context before it."""
        return self._padded(with_context=True) if self.is_shared else self.padded_queries

    def _padded(self, *, with_context: bool) -> Gather:
        rows: list[tuple[int, int]] = []
        for group in self.groups:
            rows += [(i, group.length) for i in self._order[len(rows) : len(rows) + group.count]]
        return self._gather(rows, with_context).to(self.device)

    @functools.cached_property
    def flat_keys(self) -> Gather:
        """Keys without padding, each piece's context before it, in the order of the row."""
        return self._gather(list(enumerate(self.lengths)), True).to(self.device)

    @functools.cached_property
    def key_cu_seqlens(self) -> Tensor:
        """int32 [P + 1] on the device, of `flat_keys`."""
        sizes = [n + c for n, c in zip(self.lengths, self.context_lengths, strict=True)]
        return _starts(sizes).to(self.device, torch.int32)

    def _gather(self, rows: Sequence[tuple[int, int]], with_context: bool) -> Gather:
        """`rows`: (piece, its tokens with padding), in the order of the layout."""
        starts = self._starts.tolist()
        index: list[np.ndarray] = []
        own = np.empty(starts[-1], dtype=np.int64)
        copies: dict[int, list[int]] = {}
        place = 0
        for i, width in rows:
            start, end = starts[i], starts[i + 1]
            if with_context and self.contexts[i] >= 0:
                shared, size = self.contexts[i], self.context_lengths[i]
                index.append(np.arange(starts[shared], starts[shared] + size))
                copies.setdefault(shared, []).append(place)
                place += size
            index.append(np.minimum(np.arange(start, start + width), end - 1))
            own[start:end] = np.arange(place, place + end - start)
            place += width
        by_count: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for shared, places in copies.items():
            offsets = np.arange(self.lengths[shared])
            by_count.setdefault(len(places), []).append((starts[shared] + offsets, offsets[:, None] + np.array(places)))
        return Gather(
            torch.from_numpy(np.concatenate(index)),
            torch.from_numpy(own),
            tuple(
                (torch.from_numpy(np.concatenate([t for t, _ in parts])), torch.from_numpy(np.concatenate([p for _, p in parts])))
                for parts in by_count.values()
            ),
        )


@dataclass(frozen=True)
class RowLayout:
    """A batch's sequences as pieces of a row."""

    lengths: list[int]
    contexts: list[int] | None
    tokens: Tensor | None
    """int64 [R]: which of the batch's tokens each row token is; None when the row is the batch as it is."""
    places: Tensor | None
    """int64 [T]: where each of the batch's tokens is in the row; None likewise."""


def lay_out(batch: TokenBatch, *, share_prompts: bool = True) -> RowLayout:
    """The row for a batch on the CPU; a prompt that occurs more than once becomes one piece."""
    prompts = _shareable(batch) if share_prompts else []
    families = _families(batch, prompts)
    if len(families) == len(batch):
        return RowLayout(batch.lengths.tolist(), None, None, None)
    starts = batch.cu_seqlens.tolist()
    lengths: list[int] = []
    contexts: list[int] = []
    tokens: list[np.ndarray] = []
    places = np.empty(batch.num_tokens, dtype=np.int64)
    row = 0
    for members in families:
        skip = prompts[members[0]] if len(members) > 1 else 0
        context, context_row = -1, row
        if skip:
            context = len(lengths)
            lengths.append(skip)
            contexts.append(-1)
            tokens.append(np.arange(starts[members[0]], starts[members[0]] + skip))
            row += skip
        for i in members:
            start, end = starts[i] + skip, starts[i + 1]
            places[starts[i] : start] = np.arange(context_row, context_row + skip)
            places[start:end] = np.arange(row, row + end - start)
            tokens.append(np.arange(start, end))
            lengths.append(end - start)
            contexts.append(context)
            row += end - start
    return RowLayout(lengths, contexts, torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(places))


def micro_batches(batch: TokenBatch, max_tokens: int, *, share_prompts: bool = True) -> list[list[int]]:
    """Sequence indices of micro-batches whose rows have at most `max_tokens` tokens; a longer sequence goes alone.

    Samples of one prompt stay together as far as they fit.
    """
    lengths = batch.lengths.tolist()
    if not share_prompts:
        return pack_by_budget(lengths, max_tokens)
    prompts = _shareable(batch)
    units: list[list[int]] = []
    sizes: list[int] = []
    for members in _families(batch, prompts):
        skip = prompts[members[0]]
        for n, i in enumerate(members):
            more = lengths[i] - skip + -(-skip // _COPIES_PER_TOKEN)
            if n and sizes[-1] + more <= max_tokens:
                units[-1].append(i)
                sizes[-1] += more
            else:
                units.append([i])
                sizes.append(lengths[i])
    return [sorted(i for unit in part for i in units[unit]) for part in pack_by_budget(sizes, max_tokens)]


def _shareable(batch: TokenBatch) -> list[int]:
    """[S] prompt tokens of each sequence but the last one; 0 where the policy chose nothing."""
    starts = batch.cu_seqlens.numpy()
    chosen = batch.loss_mask.nonzero()[:, 0].numpy()
    # The first chosen token at or after each start, if it is before the sequence's end.
    first = np.append(chosen, starts[-1])[np.searchsorted(chosen, starts[:-1])]
    return np.where(first < starts[1:], np.maximum(first - starts[:-1] - 1, 0), 0).tolist()


def _families(batch: TokenBatch, prompts: Sequence[int]) -> list[list[int]]:
    """Sequences by shareable prompt, in order of first appearance; one without any is alone."""
    ids, starts = batch.input_ids.numpy(), batch.cu_seqlens.tolist()
    families: dict[bytes | int, list[int]] = {}
    for i in range(len(batch)):
        size = prompts[i] if prompts else 0
        families.setdefault(ids[starts[i] : starts[i] + size].tobytes() if size else i, []).append(i)
    return list(families.values())


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)
