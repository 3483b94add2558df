"""Checkpoints whose files are written while training goes on: workers write copies in threads, the driver publishes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress


class BackgroundWriter:
    """A worker's writes, one after another in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writes: list[Future[None]] = []

    def submit(self, write: Callable[[], None]) -> None:
        self._writes.append(self._thread.submit(write))

    def written(self, *, wait_for_it: bool) -> bool:
        """Whether all that was submitted is on disk. Raises what a write failed with, once none is left running."""
        if wait_for_it:
            wait(self._writes)
        if not all(write.done() for write in self._writes):
            return False
        done, self._writes = self._writes, []
        for write in done:
            write.result()
        return True


class _Discarded(Exception):
    pass


class BackgroundSave:
    """The driver's side of one checkpoint: published, in a thread, when the workers have written their part."""

    def __init__(self, saving: ExitStack, written: Callable[[bool], bool]) -> None:
        """saving: what `CheckpointManager.saving` was entered on; closing it publishes.
        written: whether the workers are done; given True it waits for them. Raises what they failed with."""
        self._saving = saving
        self._written = written
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._publishing: Future[None] | None = None

    def advance(self, *, wait_for_it: bool = False) -> bool:
        """Do what can be done by now; True once the checkpoint is in its place. Raises what any part of it failed with."""
        if self._publishing is None:
            try:
                if not self._written(wait_for_it):
                    return False
            except BaseException:
                with self._saving:  # which removes the folder, and says what is wrong in its own words
                    raise
            self._publishing = self._thread.submit(self._saving.close)
        if not (wait_for_it or self._publishing.done()):
            return False
        self._publishing.result()
        return True

    def finish_after(self, error: BaseException | None, *, workers_answer: bool) -> None:
        """Finish at the end of a run. After an `error`, which is the news, a second one is only a line on stderr;
        without workers that answer, what they had not yet written is lost."""
        if error is None:
            self.advance(wait_for_it=True)
        elif workers_answer or self._publishing is not None:
            try:
                self.advance(wait_for_it=True)
            except Exception as failure:
                print(f"the last checkpoint was lost: {failure}", file=sys.stderr)
        else:
            with suppress(_Discarded), self._saving:
                raise _Discarded
