"""`RunLogger`: every number of a run goes through here to the files, the console and the trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.config.schema import TrackingConfig
from verl.data.types import Trajectory
from verl.observe.console import Kind, final_line, progress, step_line
from verl.observe.metrics import Metric
from verl.observe.records import (
    METRICS_FILE,
    SAMPLES_FILE,
    CsvTable,
    append_line,
    read_jsonl,
    set_aside,
    to_json_line,
    write_atomically,
)
from verl.observe.trackers import open_trackers

_BAR_LABEL = {"train": "Training", "sft": "Fine-tuning"}


class RunLogger:
    """Writes `metrics.jsonl`, `metrics.csv` and `samples.jsonl` in the run's folder, one console line a step, and
    moves the run's progress bar. Use as a context manager: leaving it without an exception prints the final line
    and draws the plots.

    One run a folder. `resumed_step` 0 starts a run: files of an earlier one in the folder are kept under
    `metrics.1.jsonl` and the like. Above 0, rows after that step are dropped, so a resumed run has no duplicates.
    """

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingConfig,
        total_steps: int | None,
        *,
        kind: Kind = "train",
        resumed_step: int = 0,
        console_every: int = 1,
    ) -> None:
        """`kind` labels the progress bar, train or sft. `console_every`: steps between console lines."""
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._tracking = tracking
        self._total_steps = total_steps
        self._console_every = console_every if "console" in tracking.backends else 0
        self._metrics_file = self.run_dir / METRICS_FILE
        self._samples_file = self.run_dir / SAMPLES_FILE
        for path in (self._metrics_file, self._samples_file):
            if path.exists():
                _keep_until(path, resumed_step) if resumed_step else set_aside(path)
        rows = read_jsonl(self._metrics_file) if self._metrics_file.exists() else []
        self._csv = CsvTable(self.run_dir / "metrics.csv", rows)
        self._last: tuple[int, Mapping[str, float]] | None = None
        self._trackers = open_trackers(self.run_dir, tracking, resumed_step)
        self._stack = ExitStack()
        self._bar = self._stack.enter_context(progress(_BAR_LABEL[kind], total_steps, completed=resumed_step))

    def log(self, step: int, metrics: Mapping[str, Metric | float], kind: Kind = "train") -> None:
        """Record one step. `kind` says what was measured: a training step, a validation, or a step of SFT."""
        values = {name: float(m if isinstance(m, int | float) else m.value) for name, m in metrics.items()}
        row = {"step": step, "kind": kind, "time": round(time.time(), 3), **values}
        append_line(self._metrics_file, to_json_line(row))
        self._csv.add(row)
        for tracker in self._trackers:
            tracker.log(step, values)
        if kind != "val":
            self._last = (step, values)
            self._bar.advance()
        if self._console_every and (kind == "val" or step % self._console_every == 0 or step == self._total_steps):
            print(step_line(step, values, kind), flush=True)

    def log_samples(self, step: int, trajectories: Sequence[Trajectory], kind: Kind = "train") -> None:
        """Append `tracking.log_samples` trajectories, spread evenly over those given, to samples.jsonl."""
        count = min(self._tracking.log_samples, len(trajectories))
        for index in range(count):
            trajectory = trajectories[index * len(trajectories) // count]
            append_line(self._samples_file, to_json_line({"step": step, "kind": kind, **_sample(trajectory)}))

    def finish(self) -> None:
        """Print the final line and, unless tracking.plots is off, draw the curves."""
        self.close()
        if self._last is None:
            return
        if self._console_every:
            print(final_line(*self._last), flush=True)
        if self._tracking.plots:
            from verl.observe.plots import plot_run

            for path in plot_run(self.run_dir):
                if self._console_every:
                    print(f"plots: {path}", flush=True)

    def close(self) -> None:
        """End the progress bar and the trackers. Called again it does nothing."""
        self._stack.close()
        while self._trackers:
            self._trackers.pop().close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.close()


def _keep_until(path: Path, step: int) -> None:
    write_atomically(path, "".join(to_json_line(row) for row in read_jsonl(path) if row["step"] <= step))


def _sample(trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "uid": prompt.uid,
        "prompt": prompt.shown,
        "response": trajectory.response_text,
        "ground_truth": prompt.ground_truth,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "reward_failure": trajectory.reward_failure,
        "finish_reason": trajectory.finish_reason,
        "response_length": trajectory.response_length,
    }
