"""`verl report RUN [RUN2 ...]`: one self-contained HTML page, and a table for the terminal."""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl.observe.metrics import metric_info
from verl.observe.plots import draw_runs
from verl.observe.records import CONFIG_FILE, INFO_FILE, SAMPLES_FILE, RunRecord, check_writable, read_jsonl, read_run

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem; }
th { border-bottom: 2px solid #ccc; } td { border-bottom: 1px solid #eee; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
td.t { white-space: pre-wrap; max-width: 34rem; overflow-wrap: anywhere; }
pre { background: #f6f6f6; padding: 1rem; overflow: auto; }
img { max-width: 100%; }
"""
_SAMPLES_SHOWN = 12
_TERMINAL_METRICS = (
    "reward/mean",
    "val/accuracy",
    "val/reward",
    "sft/loss",
    "actor/ref_kl",
    "actor/policy_kl",
    "actor/approx_kl",
    "actor/entropy",
    "critic/vf_loss",
    "response_length/mean",
    "response_length/clip_ratio",
    "reward/zero_std_groups",
    "reward/failures",
    "perf/tokens_per_s",
    "timing_s/step",
)


def build_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Write the page: curves, final metrics with meaning and healthy range, samples and configuration of each run.

    Everything is inside the one file. Raises UserError when a folder holds no run.
    """
    runs = [read_run(Path(run_dir)) for run_dir in run_dirs]
    title = escape(" · ".join(run.name for run in runs))
    body = [f"<h1>{title}</h1>", _figure(runs, title), "<h2>Final metrics</h2>", _metrics_table(runs)]
    for run in runs:
        body += [
            f"<h2>{escape(run.name)}: samples</h2>",
            _samples_table(run),
            f"<h2>{escape(run.name)}: run</h2>",
            _run_section(run),
        ]
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f"{page}<body>{''.join(body)}</body></html>\n", encoding="utf-8")
    return output


def report_table(run_dirs: Sequence[Path], width: int = 80) -> str:
    """The headline metrics of each run, first and last value, at most `width` columns wide where names allow."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    runs = [read_run(Path(run_dir)) for run_dir in run_dirs]
    table = Table(box=None, pad_edge=False)
    table.add_column("first → last", no_wrap=True)
    # Names of more than two runs leave the numbers no room.
    heads = [run.name for run in runs] if len(runs) < 3 else [f"[{number}]" for number in range(1, len(runs) + 1)]
    for head in heads:
        table.add_column(Text(head), justify="right", overflow="fold")
    table.add_column("unit")
    names = [name for name in _TERMINAL_METRICS if any(run.series(name)[0] for run in runs)]
    for name in names:
        info = metric_info(name)
        table.add_row(name, *(_first_and_last(run, name) for run in runs), info.unit if info else "")
    text = io.StringIO()
    console = Console(file=text, width=width, no_color=True)
    console.print(table)
    for head, run in zip(heads, runs, strict=True):
        label = run.name if head == run.name else f"{head} {run.name}"
        console.print(f"{label}: step {run.rows[-1]['step']}", highlight=False, markup=False)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: prints the table, writes the page (into the first run's folder unless told otherwise)."""
    parser = argparse.ArgumentParser(prog="verl report", description="Report on runs: an HTML page and a table.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/grpo-qwen3")
    parser.add_argument("--output", type=Path, help="page to write; default: report.html in the first run's folder")
    options = parser.parse_args(arguments)
    output = options.output or options.runs[0] / "report.html"
    for run in options.runs:
        read_run(run)
    check_writable("--output", output, folder=False)
    print(report_table(options.runs), end="")
    print(f"report: {build_report(options.runs, output)}")


def _figure(runs: Sequence[RunRecord], title: str) -> str:
    image = io.BytesIO()
    draw_runs(runs).savefig(image, format="png", dpi=110, facecolor="white")
    return f'<img alt="curves of {title}" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def _metrics_table(runs: Sequence[RunRecord]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.metric_names())
    rows = []
    for name in names:
        info = metric_info(name)
        about = (info.unit, info.meaning, info.healthy) if info else ("", "not in the table of metrics", "")
        values = "".join(f'<td class="n">{escape(_first_and_last(run, name))}</td>' for run in runs)
        rows.append(f"<tr><td>{escape(name)}</td>{values}{''.join(f'<td>{escape(text)}</td>' for text in about)}</tr>")
    heads = ["metric", *(f"{run.name} (first → last)" for run in runs), "unit", "meaning", "healthy"]
    return _table(heads, rows)


def _first_and_last(run: RunRecord, name: str) -> str:
    _, values = run.series(name)
    if not values:
        return ""
    return f"{values[0]:.4g} → {values[-1]:.4g}" if len(values) > 1 else f"{values[0]:.4g}"


def _samples_table(run: RunRecord) -> str:
    path = run.path / SAMPLES_FILE
    samples = read_jsonl(path) if path.exists() else []
    if not samples:
        return "<p>No samples were logged.</p>"
    # Evenly over the run, the last one included, so that the page shows how answers change.
    count = min(_SAMPLES_SHOWN, len(samples))
    chosen = [samples[len(samples) - 1 - (index * len(samples)) // count] for index in reversed(range(count))]
    rows = [
        f'<tr><td class="n">{sample["step"]}</td><td class="t">{escape(_prompt_text(sample["prompt"]))}</td>'
        f'<td class="t">{escape(sample["response"])}</td><td>{escape(str(sample["ground_truth"]))}</td>'
        f'<td class="n">{escape(str(sample["reward"]))}</td></tr>'
        for sample in chosen
    ]
    return _table(["step", "prompt", "response", "ground truth", "reward"], rows)


def _prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{message['role']}] {message['content']}" for message in prompt)


def _run_section(run: RunRecord) -> str:
    parts = []
    for name in (INFO_FILE, CONFIG_FILE):
        path = run.path / name
        if path.exists():
            text = path.read_text(encoding="utf-8")
            text = json.dumps(json.loads(text)[-1], indent=2) if name == INFO_FILE else text
            parts.append(f"<pre>{escape(text)}</pre>")
    return "".join(parts) or "<p>The configuration was not saved.</p>"


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{''.join(rows)}</table>"
