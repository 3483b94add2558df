"""What a person sees while a run trains: one line a step, progress bars on a terminal, and nothing of third parties."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from verl.observe.metrics import alias_values

if TYPE_CHECKING:
    from rich.progress import Progress

Kind = Literal["train", "val", "sft"]


def step_line(step: int, values: Mapping[str, float], kind: Kind = "train") -> str:
    """The console line of one logged step, e.g. `[Step 100] Reward: 0.42 | Value Loss: 0.083 | Policy KL: 0.012`.

    Parts whose metric the step lacks are left out, so that only PPO shows a value loss. Failures of scoring are shown
    where there are some, and `all groups tied` where the samples of every prompt had equal rewards;
    `critic only` says that it is warming up.
    """
    named = {**values, **alias_values(values)}
    if kind == "val":
        parts = [_part(_validation_label(name), value, 3) for name, value in values.items() if _is_headline(name)]
        parts.append(_part("Length", values.get("val/response_length"), 0))
    elif kind == "sft":
        parts = [_part("Loss", named.get("sft/loss"), 3)]
    else:
        parts = [
            _part("Reward", named.get("episode_reward"), 2),
            _part("Value Loss", named.get("critic/vf_loss"), 3),
            _part("Policy KL", named.get("kl_divergence"), 3),
            _part("Length", named.get("response_length"), 0),
            "critic only" if "critic/vf_loss" in values and not any(name.startswith("actor/") for name in values) else None,
            # What no curve would show at once: nothing was learnt, or not what was meant.
            f"{values['reward/failures']:.0f} scoring failures" if values.get("reward/failures") else None,
            "all groups tied" if values.get("reward/zero_std_groups") == 1 else None,
        ]
    tokens_per_s, seconds = named.get("perf/tokens_per_s"), named.get("timing_s/step")
    parts.append(None if tokens_per_s is None else f"{_number(tokens_per_s, 0)} tok/s")
    parts.append(None if seconds is None else f"{_number(seconds, 2)} s/step")
    return f"[Step {step}] " + " | ".join(part for part in parts if part is not None)


def final_line(step: int, values: Mapping[str, float]) -> str:
    """The last line of a run, e.g. `[Step 1000] Final Reward: 0.87` (`Final Loss` after supervised fine-tuning)."""
    if "sft/loss" in values:
        return f"[Step {step}] Final Loss: {_number(values['sft/loss'], 3)}"
    return f"[Step {step}] Final Reward: {_number(alias_values(values).get('episode_reward', math.nan), 2)}"


def _number(value: float, digits: int) -> str:
    """Fixed digits; where three of them would hide a small value exponent form, and none from a thousand on."""
    if value and digits > 2 and abs(value) < 0.5 * 10.0**-digits:
        return f"{value:.1e}"
    return f"{value:,.{digits if abs(value) < 1000 else 0}f}"


def _part(label: str, value: float | None, digits: int) -> str | None:
    return None if value is None else f"{label}: {_number(value, digits)}"


def _is_headline(name: str) -> bool:
    return name.startswith("val/") and name.rsplit("/", 1)[-1] in ("accuracy", "reward", "loss")


def _validation_label(name: str) -> str:
    """`val/gsm8k/accuracy` -> `Validation gsm8k Accuracy`."""
    *source, measure = name.split("/")[1:]
    return " ".join(["Validation", *source, measure.capitalize()])


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class ProgressTask:
    """One bar. Does nothing when there is no terminal."""

    def __init__(self, bars: Progress | None, task_id: Any = None) -> None:
        self._bars, self._task_id = bars, task_id

    def advance(self, amount: float = 1) -> None:
        if self._bars is not None:
            self._bars.advance(self._task_id, amount)

    def describe(self, text: str) -> None:
        """Replace the words before the bar."""
        if self._bars is not None:
            self._bars.update(self._task_id, description=text)


class _SharedBars:
    """All bars of the process live in one display, since a terminal has only one bottom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._display: Progress | None = None
        self._open = 0

    def enter(self) -> Progress:
        with self._lock:
            if self._display is None:
                self._display = _new_display()
                self._display.start()
            self._open += 1
            return self._display

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._display is not None:
                self._display.stop()
                self._display = None


_BARS = _SharedBars()


def _new_display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        # A piped stdout must keep the lines of the run; on a terminal they have to go above the bars.
        redirect_stdout=sys.stdout.isatty(),
    )


@contextmanager
def progress(description: str, total: int | None = None, *, completed: int = 0) -> Iterator[ProgressTask]:
    """A progress bar on stderr while the block runs, below those of enclosing blocks; silent when stderr is no terminal.

    `total` None shows activity without an end. The block calls `.advance()`.
    """
    if not sys.stderr.isatty():
        yield ProgressTask(None)
        return
    bars = _BARS.enter()
    task_id = bars.add_task(description, total=total, completed=completed)
    try:
        yield ProgressTask(bars, task_id)
    finally:
        bars.remove_task(task_id)
        _BARS.leave()


_QUIET_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_QUIET_LOGGERS = ("torch", "accelerate", "matplotlib")
_QUIET_WARNINGS = (*_QUIET_LOGGERS, "transformers", "datasets", "huggingface_hub", "tokenizers", "hydra")


def quiet_third_party() -> None:
    """Silence warnings, log lines and progress bars of the libraries below us. Entry points call it first.

    Environment variables that the user has set win: `TRANSFORMERS_VERBOSITY=info verl train ...` still talks.
    """
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for package in _QUIET_WARNINGS:
        warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
    for package in _QUIET_LOGGERS:
        logging.getLogger(package).setLevel(logging.ERROR)
    # The variables are read at import; where that has happened already, these two have switches of their own.
    if "transformers" in sys.modules and os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    if "datasets" in sys.modules and os.environ["DATASETS_VERBOSITY"] == "error":
        from datasets.utils import logging as datasets_logging

        datasets_logging.set_verbosity_error()
        datasets_logging.disable_progress_bar()
