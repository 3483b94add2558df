"""Curves of a run and comparison bars, as PNG. Drawn without pyplot, so no display and no global state are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl.observe.metrics import ALIASES
from verl.observe.records import RunRecord, read_run

_COLOURS = ("#2f6db5", "#d9732b", "#3d9157", "#a5489b", "#7b6a4f", "#c23b4b", "#2b9aa8", "#8a8f2c")
_INK, _FAINT = "#333333", "#d8d8d8"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small plot: the first of `metrics` that a run has, over its steps."""

    title: str
    unit: str
    metrics: tuple[str, ...]


PANELS = (
    Panel(title="Reward", unit="mean per answer", metrics=ALIASES["episode_reward"]),
    Panel(title="Policy KL", unit="nats / token", metrics=ALIASES["kl_divergence"]),
    Panel(title="KL to reference", unit="nats / token", metrics=("actor/ref_kl",)),
    Panel(title="Response length", unit="tokens", metrics=ALIASES["response_length"]),
    Panel(title="Entropy", unit="nats / token", metrics=("actor/entropy", "actor/entropy_estimate")),
    Panel(title="Policy loss", unit="", metrics=("actor/loss", "actor/pg_loss")),
    Panel(title="Value loss", unit="", metrics=("critic/vf_loss",)),
    Panel(title="Fine-tuning loss", unit="nats / token", metrics=("sft/loss",)),
    Panel(title="Gradient norm", unit="", metrics=("actor/grad_norm", "sft/grad_norm")),
    Panel(title="Throughput", unit="tokens / s", metrics=("perf/tokens_per_s",)),
)


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Centred average with triangular weights over `span` values either side (2 span + 1 at most the number of values):
    it follows a trend without lagging behind it, as a running mean of the past would. At the ends the weights that
    are there are normalised."""
    weights = 1 - np.abs(np.arange(-span, span + 1)) / (span + 1)
    totals = np.convolve(values, weights, mode="same") / np.convolve(np.ones(len(values)), weights, mode="same")
    return totals.tolist()


def plot_run(run_dir: Path) -> list[Path]:
    """Draw `<run>/curves.png`: reward, validation, KL, length, entropy, losses, throughput and where a step's time goes.

    Panels whose metric the run lacks are left out. Raises UserError when the folder holds no run.
    """
    path = Path(run_dir) / "curves.png"
    _save(draw_runs([read_run(Path(run_dir))]), path)
    return [path]


def draw_runs(runs: Sequence[RunRecord]) -> Figure:
    """The panels of one run, or of several laid over each other (then without the timing)."""
    drawers: list[Any] = []
    for panel in PANELS:
        if any(run.series(*panel.metrics)[0] for run in runs):
            drawers.append(lambda axes, panel=panel: _draw_panel(axes, panel, runs))
        if panel.title == "Reward" and any(_accuracy_names(run) for run in runs):
            drawers.append(lambda axes: _draw_validation(axes, runs))
    if len(runs) == 1 and _stages(runs[0]):
        drawers.append(lambda axes: _draw_timing(axes, runs[0]))
    columns = min(3, max(1, len(drawers)))
    rows = max(1, math.ceil(len(drawers) / columns))
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.5), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, draw in zip(grid, drawers, strict=False):
        draw(axes)
    for axes in grid[len(drawers) :]:
        axes.set_visible(False)
    figure.suptitle(" · ".join(run.name for run in runs), fontsize=12, color=_INK)
    return figure


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RunRecord]) -> None:
    for run, colour in zip(runs, _cycle(len(runs)), strict=True):
        steps, values = run.series(*panel.metrics)
        if not steps:
            continue
        # A short run has no noise worth smoothing away.
        if len(values) >= 10:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
            values = smooth(values, span=max(2, len(values) // 25))
        axes.plot(steps, values, color=colour, linewidth=1.8, label=run.name, marker="o" if len(values) == 1 else "")
    _dress(axes, panel.title, panel.unit)
    if len(runs) > 1:
        axes.legend(fontsize=7, frameon=False)


def _accuracy_names(run: RunRecord) -> list[str]:
    return [name for name in run.metric_names() if name.startswith("val/") and name.endswith("accuracy")]


def _draw_validation(axes: Axes, runs: Sequence[RunRecord]) -> None:
    lines = [(run, name) for run in runs for name in _accuracy_names(run)]
    for (run, name), colour in zip(lines, _cycle(len(lines)), strict=True):
        steps, values = run.series(name)
        source = name.removeprefix("val/").removesuffix("accuracy").strip("/")
        label = " ".join(filter(None, (run.name if len(runs) > 1 else "", source or "all", f"{100 * values[-1]:.1f}")))
        percent = [100 * value for value in values]
        axes.plot(steps, percent, color=colour, marker="o", markersize=3.5, linewidth=1.8, label=label)
    _dress(axes, "Held-out accuracy", "%, last value in the legend")
    axes.set_ylim(top=min(100, axes.get_ylim()[1]))
    axes.legend(fontsize=7, frameon=False)


def _stages(run: RunRecord) -> list[str]:
    return [name for name in run.metric_names() if name.startswith("timing_s/") and name != "timing_s/step"]


def _draw_timing(axes: Axes, run: RunRecord) -> None:
    """Stacked mean seconds of each stage over up to 40 spans of steps, the costliest stage at the bottom."""
    rows = [row for row in run.rows if any(row.get(stage) is not None for stage in _stages(run))]
    totals = {stage: sum(row.get(stage) or 0.0 for row in rows) for stage in _stages(run)}
    ranked = sorted(totals, key=lambda stage: -totals[stage])
    shown, rest = ranked[:6], ranked[6:]
    span = math.ceil(len(rows) / 40)
    chunks = [rows[start : start + span] for start in range(0, len(rows), span)]
    steps = [chunk[0]["step"] for chunk in chunks]
    widths = [chunk[-1]["step"] - chunk[0]["step"] + 1 for chunk in chunks]
    floor = [0.0] * len(chunks)
    for stages, colour in zip([[stage] for stage in shown] + ([rest] if rest else []), _cycle(len(shown) + 1), strict=False):
        heights = [sum(row.get(stage) or 0.0 for row in chunk for stage in stages) / len(chunk) for chunk in chunks]
        label = stages[0].removeprefix("timing_s/") if len(stages) == 1 else "other"
        axes.bar(steps, heights, width=widths, bottom=floor, align="edge", color=colour, label=label, linewidth=0)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    _dress(axes, "Time of a step", "s")
    axes.set_ylim(0, 1.35 * max(floor))
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center", handlelength=1, columnspacing=1)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measured value and its interval, in the panel's unit."""

    name: str
    value: float
    low: float
    high: float


def plot_comparison(path: Path, panels: Mapping[str, Sequence[Bar]], *, title: str = "") -> Path:
    """Draw bars with intervals, one panel a measure: {"accuracy, %": [Bar(name="base", ...), Bar(name="SFT", ...)]}."""
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    for axes, (measure, bars) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        names = [bar.name for bar in bars]
        # An interval may begin a rounding error above its value: a bar at 0, say.
        errors = [[max(0.0, b.value - b.low) for b in bars], [max(0.0, b.high - b.value) for b in bars]]
        axes.bar(names, [bar.value for bar in bars], color=_cycle(len(bars)), width=0.62)
        axes.errorbar(names, [bar.value for bar in bars], yerr=errors, fmt="none", ecolor=_INK, elinewidth=1.1, capsize=4)
        for position, bar in enumerate(bars):
            axes.annotate(
                f"{bar.value:.3g}", (position, bar.high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9
            )
        axes.margins(y=0.15)
        if measure.endswith("%"):
            axes.set_ylim(top=min(100, axes.get_ylim()[1]))
        _dress(axes, measure, "", steps=False)
    figure.suptitle(title, fontsize=12, color=_INK)
    _save(figure, path)
    return path


def _dress(axes: Axes, title: str, unit: str, *, steps: bool = True) -> None:
    axes.set_title(f"{title}  ({unit})" if unit else title, fontsize=9.5, loc="left", color=_INK)
    axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    if steps:
        axes.set_xlabel("step", fontsize=8, color=_INK)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _cycle(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white")
