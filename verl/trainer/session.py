"""A run on disk: its folder, logger, checkpoints. What RL and SFT share around their loops."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Literal

from verl.checkpoint.background import BackgroundSave
from verl.checkpoint.manager import (
    CheckpointManager,
    KeepBest,
    check_integrity,
    damaged_checkpoints,
    newest_checkpoint,
    resolve_checkpoint,
)
from verl.checkpoint.rng import rng_state, set_rng_state
from verl.config import Config, config_to_yaml
from verl.config.checks import SMALLER_IS_BETTER, best_metric
from verl.config.fields import flat_values
from verl.data.rows import digest_of
from verl.engines.rollout.build import check_engine
from verl.errors import UserError, WorkerLost
from verl.observe.logger import RunLogger
from verl.observe.records import check_writable
from verl.observe.run_info import run_info
from verl.observe.trackers import check_trackers
from verl.trainer.roles import check_layout

STATE_FILE = "trainer.json"
LOCK_FILE = ".lock"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run leaves."""

    run_dir: Path
    step: int
    metrics: dict[str, float]
    """Of the last step."""
    checkpoint: Path | None


def run_directory(config: Config, algorithm: str) -> Path:
    """training.output_dir, or runs/{experiment}; the experiment's default name is {algorithm}-{model}, where the model
    of a checkpoint is called by its run."""
    if config.training.output_dir:
        return Path(config.training.output_dir)
    model = Path(config.model.path)
    if model.parent.name == "checkpoints" and model.parent.parent.name:
        model = model.parent.parent
    return Path("runs") / (config.tracking.experiment or f"{algorithm}-{model.name}")


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """Where a run will be written, and what it will go on from."""

    run_dir: Path
    resume_from: Path | None
    state: dict[str, Any]
    """Of the driver, as the checkpoint holds it; empty without one."""

    @property
    def start_step(self) -> int:
        return self.state.get("step", 0)


def plan_session(config: Config, *, algorithm: str, kind: Literal["train", "sft"], total_steps: int) -> SessionPlan:
    """Look, without writing anything, at the run's folder, device and trackers.

    Raises:
        UserError: the folder cannot be made, holds another run's checkpoint or a finished run; the device or the library
            of a tracker is absent.
    """
    check_layout(config)
    if kind == "train":
        check_engine(config)
    check_trackers(config.tracking)
    run_dir = run_directory(config, algorithm)
    check_writable("training.output_dir", run_dir, folder=True)
    resume_from = _find_resume(config, run_dir, kind)
    plan = SessionPlan(
        run_dir=run_dir,
        resume_from=resume_from,
        state={} if resume_from is None else json.loads((resume_from / STATE_FILE).read_text()),
    )
    if plan.start_step >= total_steps:
        raise UserError(
            f"nothing to train: {resume_from} is at step {plan.start_step} of {total_steps}; raise "
            "training.total_steps (or max_epochs), set training.resume=never, or choose another training.output_dir"
        )
    return plan


def _find_resume(config: Config, run_dir: Path, kind: str) -> Path | None:
    resume = config.training.resume
    if resume == "never":
        return None
    found = _newest_sound(run_dir / "checkpoints") if resume == "auto" else resolve_checkpoint(resume)
    if found is None:
        return None
    check_integrity(found)
    saved = json.loads((found / STATE_FILE).read_text())["fingerprint"]
    differing = [
        f"{key} was {saved.get(key)!r}, is {value!r}"
        for key, value in _fingerprint(config, kind).items()
        if saved.get(key) != value
    ]
    if differing:
        raise UserError(
            f"{found} belongs to another run ({'; '.join(differing)}); set training.resume=never or another training.output_dir"
        )
    return found


def _newest_sound(root: Path) -> Path | None:
    """The newest complete checkpoint. Says which later ones are damaged, and stops rather than start anew over them."""
    newest = newest_checkpoint(root)
    damaged = damaged_checkpoints(root)
    if newest is None and damaged:
        raise UserError(
            f"{damaged[-1]}; no checkpoint in {root} is complete. Set training.resume=never to start anew, or another "
            "training.output_dir"
        )
    for line in damaged:
        print(f"warning: {line}; going on from {newest}")
    return newest


def _fingerprint(config: Config, kind: str) -> dict[str, Any]:
    """Settings a checkpoint cannot be resumed without."""
    return {
        "kind": kind,
        "model.path": config.model.path,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "data.train_files": list(config.data.train_files),
        "data.train_batch_size": config.data.train_batch_size,
        "training.seed": config.training.seed,
    }


_UNTOLD = ("training.output_dir", "training.resume", "training.last_link", "tracking.*")
"""Settings that a resumed run may change without a word: they touch no number."""


def changed_settings(before: Mapping[str, Any], config: Config) -> list[str]:
    """`key old -> new` for each setting that differs from `before`, which holds flat values."""
    return [
        f"{key} {before[key]} -> {value}"
        for key, value in flat_values(config).items()
        if key in before and before[key] != value and not any(fnmatchcase(key, pattern) for pattern in _UNTOLD)
    ]


class RunSession:
    """Opens the run's folder and finds what to resume from; saves and restores the driver's own state."""

    def __init__(self, config: Config, *, algorithm: str, kind: Literal["train", "sft"], total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        training = config.training
        run_dir = run_directory(config, algorithm)
        check_writable("training.output_dir", run_dir, folder=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(run_dir)
        link = Path(training.last_link) if training.last_link else None
        # First, since it completes or clears what a killed run left there.
        self.checkpoints = CheckpointManager(
            run_dir / "checkpoints", keep_last=training.keep_last, last_link=link, keep_best=_keep_best(config, kind)
        )
        self._background: BackgroundSave | None = None
        self._validated: tuple[int, Mapping[str, float]] = (-1, {})
        plan = plan_session(config, algorithm=algorithm, kind=kind, total_steps=total_steps)
        self.run_dir, self.resume_from, self.state, self.start_step = run_dir, plan.resume_from, plan.state, plan.start_step
        run_info(run_dir, config_to_yaml(config))
        # Fine-tuning takes many short steps; twenty lines say as much as hundreds.
        console_every = max(1, total_steps // 20) if kind == "sft" else 1
        self.logger = RunLogger(
            self.run_dir, config.tracking, total_steps, kind=kind, resumed_step=self.start_step, console_every=console_every
        )
        self._kind = kind
        self._digest: str | None = None
        if self.resume_from is not None:
            self.checkpoints.use(self.resume_from)
            print(f"resuming after step {self.start_step} from {self.resume_from} (training.resume=never starts anew)")
            if self.state.get("data_digest", self._data_digest()) != self._data_digest():
                print("warning: data.train_files hold other rows than when the checkpoint was saved")
            if changed := changed_settings(self.state.get("config", {}), config):
                print(f"resuming with changed settings: {', '.join(changed)}")

    def due(self, step: int, interval: int | None) -> bool:
        """Whether something done every `interval` steps is due: None means after the last step only, 0 never."""
        if interval == 0:
            return False
        return step == self.total_steps or (interval is not None and step % interval == 0)

    def _data_digest(self) -> str:
        if self._digest is None:
            self._digest = digest_of(self.config.data.train_files)
        return self._digest

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Take note of what validation measured at `step`, for the checkpoint of that step."""
        self._validated = (step, values)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        write_models: Callable[[Path], None],
        written: Callable[[bool], bool],
    ) -> Path:
        """One atomic checkpoint: models by `write_models`, the driver's `state`, random number generators.

        With training.async_save `write_models` only begins, `written` tells when all is there (see `BackgroundSave`), and
        the checkpoint is in the place returned after a later `after_step` or at the end of the run.
        """
        self.finish_saving()
        at, measured = self._validated
        with ExitStack() as saving:
            folder = saving.enter_context(self.checkpoints.saving(step, measured if at == step else {}))
            write_models(folder)
            record = {**state, "rng": rng_state(), "step": step, "config": flat_values(self.config)}
            record["data_digest"] = self._data_digest()
            record["fingerprint"] = _fingerprint(self.config, self._kind)
            (folder / STATE_FILE).write_text(json.dumps(record))
            if self.config.training.async_save:
                self._background = BackgroundSave(saving.pop_all(), written)
        return self.checkpoints.folder(step)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written in the background, if there is one."""
        background, self._background = self._background, None
        if background is not None:
            background.advance(wait_for_it=True)

    def after_step(self, step: int, save: Callable[[], Path]) -> None:
        """Go on with a checkpoint in the background. If Ctrl-C came, keep the work and raise KeyboardInterrupt."""
        background, self._background = self._background, None
        if background is not None and not background.advance():
            self._background = background
        if self._interrupt.came:
            self.save_before_leaving(step, save)
            raise KeyboardInterrupt

    def save_before_leaving(self, step: int, save: Callable[[], Path]) -> None:
        """Save what was learnt since the last checkpoint, unless checkpoints are off."""
        self.finish_saving()
        if self.config.training.save_interval == 0 or step == self.start_step:
            return
        if not self.due(step, self.config.training.save_interval):
            folder = save()
            self.finish_saving()
            print(f"saved: {folder}")

    def __enter__(self) -> RunSession:
        self._interrupt = _Interrupt()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        background, self._background = self._background, None
        try:
            if background is not None:
                background.finish_after(error, workers_answer=not isinstance(error, WorkerLost | KeyboardInterrupt))
        finally:
            self._interrupt.restore()
            self.release()

    def release(self) -> None:
        """Give the run's folder free: another run may write there."""
        self._lock.close()

    def restore_rng(self) -> None:
        """Put the random number generators back to where the checkpoint left them."""
        if self.resume_from is not None:
            set_rng_state(self.state["rng"])


def _keep_best(config: Config, kind: str) -> KeepBest | None:
    if not config.training.keep_best:
        return None
    metric = best_metric(config, sft=kind == "sft")
    return KeepBest(number=config.training.keep_best, metric=metric, smaller_is_better=metric in SMALLER_IS_BETTER)


def _lock(run_dir: Path) -> IO[str]:
    """A lock on the run's folder, held for as long as the file is open; the system frees it when the process ends."""
    file = (run_dir / LOCK_FILE).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"training.output_dir={run_dir}: another run is writing there; wait for it, or name another") from None
    except OSError:  # a file system without locks
        pass
    return file


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
