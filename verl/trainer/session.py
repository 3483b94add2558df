"""A run on disk: its folder, logger, checkpoints. What RL and SFT share around their loops."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.checkpoint.manager import CheckpointManager, resolve_checkpoint
from verl.checkpoint.rng import rng_state, set_rng_state
from verl.config import Config, config_to_yaml
from verl.errors import UserError
from verl.observe.logger import RunLogger
from verl.observe.run_info import run_info

STATE_FILE = "trainer.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run leaves."""

    run_dir: Path
    step: int
    metrics: dict[str, float]
    """Of the last step."""
    checkpoint: Path | None


def run_directory(config: Config, algorithm: str) -> Path:
    """training.output_dir, or runs/{experiment}; the experiment's default name is {algorithm}-{model}."""
    if config.training.output_dir:
        return Path(config.training.output_dir)
    name = config.tracking.experiment or f"{algorithm}-{Path(config.model.path).name}"
    return Path("runs") / name


class RunSession:
    """Opens the run's folder and finds what to resume from; saves and restores the driver's own state."""

    def __init__(self, config: Config, *, algorithm: str, kind: Literal["train", "sft"], total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.run_dir = run_directory(config, algorithm)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"training.output_dir={self.run_dir}: cannot be made a folder ({error.strerror}); name another"
            ) from error
        training = config.training
        link = Path(training.last_link) if training.last_link else None
        self.checkpoints = CheckpointManager(self.run_dir / "checkpoints", keep_last=training.keep_last, last_link=link)
        self.resume_from = self._find_resume(kind)
        state = {} if self.resume_from is None else json.loads((self.resume_from / STATE_FILE).read_text())
        self.state: dict[str, Any] = state
        self.start_step: int = state.get("step", 0)
        if self.start_step >= total_steps:
            raise UserError(
                f"nothing to train: {self.resume_from} is at step {self.start_step} of {total_steps}; raise "
                "training.total_steps (or max_epochs), set training.resume=never, or choose another training.output_dir"
            )
        run_info(self.run_dir, config_to_yaml(config))
        # Fine-tuning takes many short steps; twenty lines say as much as hundreds.
        console_every = max(1, total_steps // 20) if kind == "sft" else 1
        self.logger = RunLogger(
            self.run_dir, config.tracking, total_steps, kind=kind, resumed_step=self.start_step, console_every=console_every
        )
        self._kind = kind
        if self.resume_from is not None:
            self.checkpoints.use(self.resume_from)
            print(f"resuming after step {self.start_step} from {self.resume_from} (training.resume=never starts anew)")

    def _find_resume(self, kind: str) -> Path | None:
        resume = self.config.training.resume
        if resume == "never":
            return None
        found = self.checkpoints.latest() if resume == "auto" else resolve_checkpoint(resume)
        if found is None:
            return None
        saved = json.loads((found / STATE_FILE).read_text())
        mine = self._fingerprint(kind)
        differing = [
            f"{key} was {saved['fingerprint'].get(key)!r}, is {value!r}"
            for key, value in mine.items()
            if saved["fingerprint"].get(key) != value
        ]
        if differing:
            raise UserError(
                f"{found} belongs to another run ({'; '.join(differing)}); "
                "set training.resume=never or another training.output_dir"
            )
        return found

    def _fingerprint(self, kind: str) -> dict[str, Any]:
        """Settings a checkpoint cannot be resumed without."""
        c = self.config
        return {
            "kind": kind,
            "model.path": c.model.path,
            "algorithm.adv_estimator": c.algorithm.adv_estimator,
            "data.train_files": list(c.data.train_files),
            "data.train_batch_size": c.data.train_batch_size,
            "training.seed": c.training.seed,
        }

    def due(self, step: int, interval: int | None) -> bool:
        """Whether something done every `interval` steps is due: None means after the last step only, 0 never."""
        if interval == 0:
            return False
        return step == self.total_steps or (interval is not None and step % interval == 0)

    def save(self, step: int, state: dict[str, Any], write_models: Callable[[Path], None]) -> Path:
        """One atomic checkpoint: models by `write_models`, the driver's `state`, random number generators."""
        with self.checkpoints.saving(step) as folder:
            write_models(folder)
            record = {**state, "rng": rng_state(), "step": step, "fingerprint": self._fingerprint(self._kind)}
            (folder / STATE_FILE).write_text(json.dumps(record))
        latest = self.checkpoints.latest()
        assert latest is not None  # just written
        return latest

    def stop_if_interrupted(self, step: int, save: Callable[[], Path]) -> None:
        """After a step: if Ctrl-C came during it, keep the work and raise KeyboardInterrupt."""
        if self._interrupt.came:
            if self.config.training.save_interval != 0 and not self.due(step, self.config.training.save_interval):
                print(f"saved: {save()}")
            raise KeyboardInterrupt

    def __enter__(self) -> RunSession:
        self._interrupt = _Interrupt()
        return self

    def __exit__(self, *error: object) -> None:
        self._interrupt.restore()

    def restore_rng(self) -> None:
        """Put the random number generators back to where the checkpoint left them."""
        if self.resume_from is not None:
            set_rng_state(self.state["rng"])


class _Interrupt:
    """Ctrl-C while it exists: the first is noted and the step goes on to its end, since the weights of half a step
    belong to no checkpoint; the second acts at once. Only the main thread may set a signal handler."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        print("interrupted: finishing this step, then saving; press Ctrl-C again to stop at once", file=sys.stderr)

    def restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
