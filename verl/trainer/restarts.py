"""A run that goes on when workers are lost."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Protocol

from verl.config.schema import Config
from verl.errors import WorkerLost
from verl.trainer.session import RunResult, RunSession


class Restartable(Protocol):
    config: Config
    session: RunSession
    """Absent until `run` has prepared it; taken away here, so that the next `run` prepares anew."""

    def run(self) -> RunResult: ...


def with_restarts(trainer: Restartable) -> RunResult:
    """`trainer.run()`, started again from its last checkpoint up to `training.max_restarts` times when a worker is lost.

    Raises:
        WorkerLost: once more than that; the message says where the last checkpoint is.
    """
    restarts = trainer.config.training.max_restarts
    for attempt in range(restarts + 1):
        try:
            return trainer.run()
        except WorkerLost as error:
            session: RunSession | None = vars(trainer).pop("session", None)
            latest = session.checkpoints.latest() if session is not None else None
            if attempt == restarts:
                hint = f"start the run again to go on from {latest}" if latest else "there is no checkpoint to go on from"
                if session is None:
                    hint = "the run had not begun; start it again"
                raise WorkerLost(f"{error}\n{hint}; training.max_restarts=1 would start it again by itself") from None
            print(f"{error}\nrestart {attempt + 1} of {restarts}, from {latest or 'where it began'}", file=sys.stderr, flush=True)
            if latest is not None:
                # It counts even where the checkpoints of an earlier run were not to be taken.
                trainer.config = replace(trainer.config, training=replace(trainer.config.training, resume=str(latest)))
    raise AssertionError("unreachable")
