"""Splitting ragged sequences evenly: over ranks (Karmarkar-Karp) and into micro-batches (first fit, decreasing).

Both are deterministic functions of the lengths, so that every process that calls them agrees.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition indices into `num_parts` lists of nearly equal total weight (largest differencing method).

    Karmarkar & Karp 1982, in its k-way form: repeatedly merge the two partial partitions of greatest
    spread, heaviest part of one with lightest of the other. Indices inside a part are ascending.
    A part is empty when there are fewer items than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    # A heap entry is a partial partition: parts sorted by weight, heaviest first; `order` breaks ties.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for order, weight in enumerate(weights):
        parts = [(weight, [order])] + [(0, []) for _ in range(num_parts - 1)]
        heapq.heappush(heap, (-weight, order, parts))
    if not heap:
        return [[] for _ in range(num_parts)]
    order = len(weights)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(wa + wb, ia + ib) for (wa, ia), (wb, ib) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda part: part[0], reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
        order += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def pack_by_budget(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Group indices so that each group weighs at most `budget`, in few groups (first fit, decreasing).

    An item heavier than the budget gets a group of its own. Indices inside a group are ascending, and
    groups come in the order of their first index.
    """
    if budget < 1:
        raise ValueError(f"the budget must be at least 1 token, got {budget}")
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        weight = weights[index]
        for g, free in enumerate(room):
            if weight <= free:
                groups[g].append(index)
                room[g] -= weight
                break
        else:
            groups.append([index])
            room.append(budget - weight)
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])
