"""Optional trackers beside the files that are always written. Their libraries load when they are asked for."""

from __future__ import annotations

import importlib.util
import math
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from verl.config.schema import TrackingConfig
from verl.errors import ConfigError, MissingExtraError


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, run_dir: Path, tracking: TrackingConfig, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tracking") from error
        # purge_step hides what an interrupted run logged after the checkpoint that is resumed from.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; its id is kept in the run folder, so that a resumed run goes on under it."""

    def __init__(self, run_dir: Path, tracking: TrackingConfig, resumed_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "tracking") from error
        id_file = run_dir / "wandb_id.txt"
        run_id = id_file.read_text() if resumed_step and id_file.is_file() else uuid.uuid4().hex
        id_file.write_text(run_id)
        self._run = wandb.init(
            project=tracking.project,
            name=tracking.experiment or run_dir.name,
            dir=str(run_dir),
            id=run_id,
            resume="allow",
            settings=wandb.Settings(silent=True),
        )
        # Its own step counter refuses to go back, which a resumed run does; ours is an ordinary metric.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """An MLflow run on the tracking server of MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: Path, tracking: TrackingConfig, resumed_step: int) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise MissingExtraError("mlflow", "tracking") from error
        self._mlflow = mlflow
        id_file = run_dir / "mlflow_id.txt"
        mlflow.set_experiment(tracking.project)
        run_id = id_file.read_text() if resumed_step and id_file.is_file() else None
        run = mlflow.start_run(run_id=run_id, run_name=tracking.experiment or run_dir.name)
        id_file.write_text(run.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, TrackingConfig, int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""Values of tracking.backends besides `console`; each is also the name of the library it needs."""


def check_trackers(tracking: TrackingConfig) -> None:
    """Raises ConfigError for an unknown backend, MissingExtraError where its library is not installed."""
    for name in tracking.backends:
        if name != "console" and name not in TRACKERS:
            raise ConfigError(f"tracking.backends holds {name!r}; use some of: console, {', '.join(TRACKERS)}")
        if name != "console" and importlib.util.find_spec(name) is None:
            raise MissingExtraError(name, "tracking")


def open_trackers(run_dir: Path, tracking: TrackingConfig, resumed_step: int) -> list[Tracker]:
    """One tracker a backend asked for. Raises ConfigError for an unknown one, MissingExtraError for an absent library."""
    check_trackers(tracking)
    return [TRACKERS[name](run_dir, tracking, resumed_step) for name in tracking.backends if name != "console"]
