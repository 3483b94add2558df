"""How one call on a worker group becomes calls on its ranks, and their results one result.

A dispatch is a plain function `(layout, args, kwargs) -> DispatchPlan`: write your own and pass it to
`@register(dispatch=...)`. The ones here cover the usual needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor

from verl.data.batch import TokenBatch
from verl.observe.metrics import Last, Max, Mean, Min, Sum, merge_metrics


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """Which share of the data each rank works on: `data_ranks[rank]`. Ranks of one tensor- or pipeline-parallel
    replica share a data rank: they receive the same data, and the last of them answers, which is on the last stage."""

    data_ranks: tuple[int, ...]

    @staticmethod
    def data_parallel(world_size: int) -> WorkerLayout:
        return WorkerLayout(data_ranks=tuple(range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.data_ranks)

    @property
    def data_size(self) -> int:
        return max(self.data_ranks) + 1

    @property
    def answering_ranks(self) -> list[int]:
        """The last rank of each data rank, in data-rank order."""
        last = {data_rank: rank for rank, data_rank in enumerate(self.data_ranks)}
        return [last[d] for d in range(self.data_size)]


@dataclass(frozen=True)
class Call:
    """What one rank is called with. Ranks that get the same share one object: a runtime may send it once."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DispatchPlan:
    calls: Mapping[int, Call]
    """Rank -> what it is called with; a rank that is missing is not called."""
    gather: Callable[[Mapping[int, Any]], Any]
    """Rank -> result, turned into what the caller gets."""


Dispatch = Callable[[WorkerLayout, tuple[Any, ...], Mapping[str, Any]], DispatchPlan]


def one_to_all(layout: WorkerLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
    """The same call on every rank; a list of results in rank order."""
    call = Call(args, kwargs)
    return DispatchPlan(dict.fromkeys(range(layout.world_size), call), lambda results: [results[r] for r in sorted(results)])


def rank_zero(layout: WorkerLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
    """Rank 0 alone; its result."""
    return DispatchPlan({0: Call(args, kwargs)}, lambda results: results[0])


def all_ranks(layout: WorkerLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
    """The same call on every rank (a collective operation); rank 0's result."""
    return DispatchPlan(dict.fromkeys(range(layout.world_size), Call(args, kwargs)), lambda results: results[0])


def all_to_all(layout: WorkerLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
    """Every argument is a sequence with one entry a rank; a list of results in rank order."""
    n = layout.world_size
    for value in [*args, *kwargs.values()]:
        if len(value) != n:
            raise ValueError(f"all_to_all needs one entry a rank: got {len(value)} for {n} ranks")
    calls = {r: Call(tuple(a[r] for a in args), {k: v[r] for k, v in kwargs.items()}) for r in range(n)}
    return DispatchPlan(calls, lambda results: [results[r] for r in range(n)])


def data_parallel(layout: WorkerLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DispatchPlan:
    """The first argument is shared out over the data ranks, the others go to all.

    A TokenBatch is split by tokens (Karmarkar-Karp), a sequence into contiguous runs of nearly equal length.
    Results come back in the order of the input: token-level tensors [T], sequence-level lists, dataclasses
    of such tensors, TokenBatches; metrics are merged by their types.
    """
    if not args:
        raise TypeError("data_parallel shares out the first argument: give it by position, not by name")
    data, *rest = args
    if isinstance(data, TokenBatch):
        shares = data.split_indices(layout.data_size)
        parts: list[Any] = [data.select(indices) for indices in shares]
    elif isinstance(data, Sequence):
        bounds = [len(data) * d // layout.data_size for d in range(layout.data_size + 1)]
        shares = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
        parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
    else:
        raise TypeError(f"data_parallel splits a TokenBatch or a sequence, got {type(data).__name__}")
    shared = [Call((part, *rest), kwargs) for part in parts]
    calls = {r: shared[d] for r, d in enumerate(layout.data_ranks)}
    return DispatchPlan(calls, lambda results: _join(data, shares, [results[r] for r in layout.answering_ranks]))


def _join(data: TokenBatch | Sequence[Any], shares: list[list[int]], results: list[Any]) -> Any:
    first = results[0]
    if all(result is None for result in results):
        return None
    if others := sorted({type(r).__name__ for r in results if type(r) is not type(first)}):
        raise TypeError(f"data_parallel cannot join a {type(first).__name__} with {', '.join(others)}: ranks must answer alike")
    if isinstance(first, Tensor) and isinstance(data, TokenBatch):
        return data.scatter_tokens(list(zip(shares, results, strict=True)), dtype=first.dtype)
    if isinstance(first, TokenBatch):
        order = {index: place for place, index in enumerate(i for share in shares for i in share)}
        return TokenBatch.concatenate(results).select([order[i] for i in range(len(order))])
    if isinstance(first, dict) and all(isinstance(m, Mean | Sum | Max | Min | Last) for r in results for m in r.values()):
        return merge_metrics(results)
    if isinstance(first, list):
        joined: list[Any] = [None] * sum(len(share) for share in shares)
        for share, result in zip(shares, results, strict=True):
            for index, item in zip(share, result, strict=True):
                joined[index] = item
        return joined
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(**{f.name: _join(data, shares, [getattr(r, f.name) for r in results]) for f in fields(first)})
    raise TypeError(
        f"data_parallel cannot join results of type {type(first).__name__}; give the method its own dispatch function"
    )
