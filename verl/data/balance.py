"""Splitting ragged sequences evenly: over ranks (Karmarkar-Karp) and into micro-batches (first fit, decreasing).

Both are deterministic functions of the lengths, so that every process that calls them agrees.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def karmarkar_karp(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition indices into `num_parts` lists of nearly equal total weight (largest differencing method).

    Karmarkar & Karp 1982, in its k-way form: repeatedly merge the two partial partitions of greatest
    spread, heaviest part of one with lightest of the other. A merge never widens the spread, so the parts
    differ by at most the heaviest item. Indices inside a part are ascending. With positive weights a part
    is empty only when there are fewer items than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    num_items = len(weights)
    if num_items == 0:
        return [[] for _ in range(num_parts)]
    # Parts are nodes of a forest, so that a merge costs O(parts) whatever they hold: node 0 is the empty part,
    # node i + 1 holds item i alone, and merge m makes the nodes first[m] ... first[m] + num_parts - 1.
    # A heap entry is a partial partition: parts sorted by weight, heaviest first; `order` breaks ties.
    heap: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    for order, weight in enumerate(weights):
        totals, nodes = np.zeros((2, num_parts), dtype=np.int64)
        totals[0], nodes[0] = weight, order + 1
        heap.append((-weight, order, totals, nodes))
    heapq.heapify(heap)
    children: list[tuple[np.ndarray, np.ndarray]] = []
    while len(heap) > 1:
        _, _, totals_a, nodes_a = heapq.heappop(heap)
        _, _, totals_b, nodes_b = heapq.heappop(heap)
        totals = totals_a + totals_b[::-1]
        by_weight = np.argsort(-totals, kind="stable")
        totals = totals[by_weight]
        nodes = num_items + 1 + len(children) * num_parts + np.arange(num_parts)
        children.append((nodes_a[by_weight], nodes_b[::-1][by_weight]))
        heapq.heappush(heap, (int(totals[-1] - totals[0]), num_items + len(children), totals, nodes))
    part_of = np.zeros(num_items + 1 + len(children) * num_parts, dtype=np.int64)
    part_of[heap[0][3]] = np.arange(num_parts)
    for merge in reversed(range(len(children))):
        first = num_items + 1 + merge * num_parts
        for nodes in children[merge]:
            part_of[nodes] = part_of[first : first + num_parts]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item, part in enumerate(part_of[1 : num_items + 1].tolist()):
        parts[part].append(item)
    return parts


def pack_by_budget(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Group indices so that each group weighs at most `budget`, in few groups (first fit, decreasing).

    An item heavier than the budget gets a group of its own. Indices inside a group are ascending, and
    groups come in the order of their first index.
    """
    if budget < 1:
        raise ValueError(f"the budget must be at least 1 token, got {budget}")
    # room[1] is the root of a binary tree of maxima over the groups' free room; unopened groups have the whole
    # budget, so "the first group with room" is a walk of log2(groups) steps that opens one when none has.
    leaves = 1 << max(len(weights) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    groups: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        weight = weights[index]
        if weight > budget:
            alone.append([index])
            continue
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= weight else 2 * node + 1
        groups.setdefault(node, []).append(index)
        room[node] -= weight
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sorted((sorted(group) for group in [*alone, *groups.values()]), key=lambda group: group[0])
