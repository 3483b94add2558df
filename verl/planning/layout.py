"""The cheapest plan that fits: which layout, switches and micro-batch, in the order of what they cost in time.

Within a layout, switches go before smaller micro-batches than a GPU works well with; a layout without tensor parallelism
goes before one with, and pipeline parallelism, which leaves GPUs waiting for each other, comes last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from verl.errors import UserError
from verl.planning.memory import Estimate, Layout, ModelShape, Plan, Switches, Tracer, Workload, estimate, state_bytes

USABLE_SHARE = 0.92
"""Of a GPU's memory. The rest: CUDA's context, NCCL's buffers, and memory that is free in pieces too small to use."""
GPUS_PER_NODE = 8
"""Most GPUs that a fast link joins, and so most tensor-parallel ranks."""
_MICRO_BATCHES = (16384, 8192, 4096)
"""Tokens: the default, and smaller ones that cost little time."""
_SMALL_MICRO_BATCHES = (2048, 1024)
"""Tokens: they leave a GPU idle part of the time."""
_ENOUGH_GPUS = 4096
"""Where the search for a number that would do ends."""

SWITCHES = tuple(
    Switches(optimizer_offload=optimizer, gradient_checkpointing=checkpointing, param_offload=param)
    for optimizer, checkpointing, param in itertools.product((False, True), repeat=3)
)
"""Cheapest first. Parameters are a few bytes to copy (3 % more time where it was measured); checkpointing costs 27 %; the
optimizer's state costs 17 % in an update of 65,536 tokens, and the more the fewer tokens an update has."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome of a search."""

    best: Estimate
    """The first that fits, or the one that misses least."""
    fits: bool


def choose(shape: ModelShape, trace: Tracer, workload: Workload, *, gpus: int, memory: float) -> Choice:
    """Search the plans for `gpus` GPUs of `memory` bytes each."""
    usable = memory * USABLE_SHARE
    nearest: Estimate | None = None
    for plan in plans(shape, workload, gpus):
        if nearest is not None and state_bytes(shape, workload, plan) - usable > nearest.shortage(usable, workload):
            continue  # no micro-batch can make up for this
        found = estimate(shape, trace, workload, plan)
        missing = found.shortage(usable, workload)
        if missing == 0:
            return Choice(best=found, fits=True)
        if nearest is None or missing < nearest.shortage(usable, workload):
            nearest = found
    if nearest is None:
        raise UserError(f"--gpus {gpus}: no layout of this model uses so many GPUs")
    return Choice(best=nearest, fits=False)


def plans(shape: ModelShape, workload: Workload, gpus: int) -> Iterator[Plan]:
    """All plans, those to be preferred first."""
    for layout in layouts(shape, gpus):
        for sizes in (_MICRO_BATCHES, _SMALL_MICRO_BATCHES):
            budgets = micro_batches(workload.sequence, sizes)
            for switches, budget in itertools.product(SWITCHES, budgets):
                yield Plan(layout=layout, switches=switches, micro_batch=budget)


def micro_batches(sequence: int, sizes: tuple[int, ...]) -> list[int]:
    """Those of `sizes` that hold a whole sequence; where none does, the sequence, rounded up to 1024 tokens, stands for
    the first sizes."""
    fitting = [size for size in sizes if size >= sequence]
    if not fitting and sizes is _MICRO_BATCHES:
        return [-(-sequence // 1024) * 1024]
    return fitting


def layouts(shape: ModelShape, gpus: int) -> list[Layout]:
    """Ways to use all GPUs: pipeline parallelism rises slowest, tensor parallelism next."""
    per_node = gpus_per_node(gpus)
    found = []
    for pipeline in _divisors(gpus):
        for tensor in _divisors(per_node):
            if pipeline <= shape.layers and gpus % (pipeline * tensor) == 0 and _splits(shape, tensor):
                found.append(Layout(data=gpus // (pipeline * tensor), tensor=tensor, pipeline=pipeline))
    return found


def gpus_per_node(gpus: int) -> int:
    """The largest equal share of machines with up to eight GPUs."""
    return max(n for n in _divisors(gpus) if n <= GPUS_PER_NODE)


def enough_gpus(shape: ModelShape, trace: Tracer, workload: Workload, *, gpus: int, memory: float) -> int | None:
    """The next number of GPUs, doubling from `gpus`, on which the model fits; None where no number helps."""
    more = gpus * 2
    while more <= max(_ENOUGH_GPUS, 4 * gpus):
        if choose(shape, trace, workload, gpus=more, memory=memory).fits:
            return more
        more *= 2
    return None


def _splits(shape: ModelShape, tensor: int) -> bool:
    return not any(size % tensor for size in (shape.heads, shape.key_value_heads, shape.intermediate))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
