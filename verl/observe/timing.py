"""Wall time of a step's stages, as `timing_s/*`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl.observe.metrics import Metrics, Sum


class Timer:
    """`with timer("gen"): ...` adds the block's wall seconds to the stage; stages may nest and repeat."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def seconds(self, stage: str) -> float:
        """Seconds of a stage since the last `metrics()`; 0 when it has not run."""
        return self._seconds.get(stage, 0.0)

    def metrics(self) -> Metrics:
        """`timing_s/<stage>` of every stage since the last call, which this resets."""
        taken, self._seconds = self._seconds, {}
        return {f"timing_s/{stage}": Sum(seconds) for stage, seconds in taken.items()}
