"""Batches in a seeded order that a checkpoint can take up exactly where it was left.

The order is one endless sequence of row numbers: a permutation of all rows for epoch 0, another for epoch 1,
and so on, each a function of (seed, epoch) alone. Batch k is entries k * batch_size to (k + 1) * batch_size of
it. So every batch is full and every row is used once an epoch; a batch may hold the end of one epoch and the
beginning of the next (and, rarely, a row twice: rows of a batch are told apart by position, not by uid). The
whole state is one number, and position costs nothing to restore.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from verl.data.batch import TokenBatch
from verl.data.types import EncodedPrompt
from verl.errors import DataError, UserError

Batch_co = TypeVar("Batch_co", covariant=True)
Batch = TypeVar("Batch")


class BatchSource(Protocol[Batch_co]):
    """A data set that makes batches out of row numbers."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch_co: ...


class SeededLoader(Generic[Batch]):
    """Batches of a data set, prepared ahead in a background thread.

    Iterating goes on from the position it has (0, or what `load_state_dict` gave). Used in a `with`
    statement, leaving the block ends the thread; a loop that runs to its end does so too.
    """

    def __init__(
        self,
        dataset: BatchSource[Batch],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        prefetch: int = 2,
        max_epochs: int | None = None,
        total_steps: int | None = None,
    ) -> None:
        """`prefetch`: batches prepared ahead; 0 prepares each when it is asked for.

        The loader ends after `max_epochs` passes (a last batch that would not be full is left out) or
        `total_steps` batches, whichever comes first; with neither it does not end.

        Raises:
            DataError: fewer rows than a batch.
        """
        num_rows = len(dataset)
        if num_rows < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {num_rows} rows of the data set; "
                f"set it to {num_rows} or less, or add rows"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.prefetch = prefetch
        self._dataset = dataset
        limits = [total_steps, None if max_epochs is None else max_epochs * num_rows // batch_size]
        self.num_steps: int | None = min((limit for limit in limits if limit is not None), default=None)
        """Batches from beginning to end; None: no end."""
        self._step = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self._running: Iterator[Batch] | None = None

    @property
    def step(self) -> int:
        """Batches yielded so far."""
        return self._step

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._step * self.batch_size / self.num_rows

    def batch_indices(self, step: int) -> list[int]:
        """Row numbers of batch `step`."""
        start, end = step * self.batch_size, (step + 1) * self.batch_size
        return [int(self._epoch_order(i // self.num_rows)[i % self.num_rows]) for i in range(start, end)]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_rows))
        return self._order[1]

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._running = self._iterate()
        return self._running

    def _iterate(self) -> Iterator[Batch]:
        for step, batch in self._prefetched(self._step) if self.prefetch > 0 else self._in_line(self._step):
            # Counted when handed out: what was only prepared is prepared again after a resume.
            self._step = step + 1
            yield batch

    def _in_line(self, step: int) -> Iterator[tuple[int, Batch]]:
        while self.num_steps is None or step < self.num_steps:
            yield step, self._dataset.batch(self.batch_indices(step))
            step += 1

    def _prefetched(self, step: int) -> Iterator[tuple[int, Batch]]:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verl-data")
        waiting: deque[tuple[int, Future[Batch]]] = deque()
        try:
            while True:
                while len(waiting) <= self.prefetch and (self.num_steps is None or step < self.num_steps):
                    waiting.append((step, pool.submit(self._dataset.batch, self.batch_indices(step))))
                    step += 1
                if not waiting:
                    return
                number, future = waiting.popleft()
                yield number, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the running iteration and its thread; the position stays."""
        if self._running is not None:
            self._running.close()  # type: ignore[attr-defined]
            self._running = None

    def __enter__(self) -> SeededLoader[Batch]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded, and what it depends on. JSON-able."""
        return {
            "step": self._step,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; ends a running iteration.

        Raises:
            UserError: the state belongs to other rows, another batch size, seed or order.
        """
        for name, value in self.state_dict().items():
            if name != "step" and state[name] != value:
                raise UserError(
                    f"cannot resume the data order: the checkpoint has {name}={state[name]}, this run {value}; "
                    "use the same data settings, or training.resume=never"
                )
        self.close()
        self._step = state["step"]


class PromptLoader(SeededLoader[list[EncodedPrompt]]):
    """Lists of `batch_size` encoded prompts of a `verl.data.datasets.PromptDataset`."""


class SFTLoader(SeededLoader[TokenBatch]):
    """TokenBatches of `batch_size` rows of a `verl.data.sft.SFTDataset`: columns input_ids and loss_mask."""
