"""What a run writes while it trains, and how it is read back: metrics.jsonl (the source), metrics.csv, samples.jsonl.

metrics.jsonl holds one object a `RunLogger.log` call: step, kind, time (Unix seconds), then the metrics; a number
that is not finite is null. metrics.csv holds one row a step, made from the same calls.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import UserError
from verl.observe.metrics import alias_values

Row = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.yaml"
INFO_FILE = "run.json"

ROW_KEYS = ("step", "kind", "time")
"""Keys of a row that are no metrics."""


def check_writable(name: str, path: Path, *, folder: bool) -> None:
    """Before any work: can `path` be written as a folder (or file)? Changes nothing.

    name: the setting or option it comes from, for the message.
    Raises UserError when something of the other kind stands there or the place cannot be written to.
    """
    if path.exists() and path.is_dir() is not folder:
        raise UserError(f"{name}={path} is a {'file' if folder else 'folder'}; name a {'folder' if folder else 'file'}")
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if existing != path and not existing.is_dir():
        raise UserError(f"{name}={path} cannot be made: {existing} is no folder; name another")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{name}={path} cannot be written: {existing} is not writable; name another")


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def set_aside(path: Path) -> None:
    """Rename `metrics.jsonl` to the first free `metrics.N.jsonl`."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)


def append_line(path: Path, line: str) -> None:
    """One write call, unbuffered: a reader never sees half a line, and a killed run loses none."""
    with path.open("ab", buffering=0) as file:
        # Half a surrogate pair (a model may produce one) becomes its escape, which JSON reads back.
        file.write(line.encode("utf-8", "backslashreplace"))


def to_json_line(row: Mapping[str, Any]) -> str:
    finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    return json.dumps(finite, ensure_ascii=False, default=str) + "\n"


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file that may still be written: a last line torn by a crash is left out; any other bad line is an error."""
    *lines, _torn = path.read_bytes().split(b"\n")  # not splitlines(), which takes U+2028 in a text for an end
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is no JSON ({error}); mend or remove that line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is no JSON object; mend or remove that line")
        rows.append(row)
    return rows


class CsvTable:
    """metrics.csv: one row a step, validation merged into the training row of its step; columns may appear late.

    The file is whole at any moment: rows are appended with one write, and a wider header or an amended row
    replaces the file by rename.
    """

    def __init__(self, path: Path, rows: Iterable[Row] = ()) -> None:
        """Start the file anew from `rows`, as read from metrics.jsonl."""
        self.path = path
        self._columns: list[str] = ["step", "kind", "time"]
        self._last: Row | None = None
        kept: list[Row] = []
        for row in rows:
            if self._joins_last(row):
                kept[-1] = self._last = self._merged(row)
            else:
                self._last = self._with_aliases(row)
                kept.append(self._last)
        self._replace(kept)

    def add(self, row: Row) -> None:
        """Append the row, or join it to the last one when they are the training and the validation of one step."""
        if self._joins_last(row):
            self._last = self._merged(row)
            self._replace([*self._read()[:-1], self._last])
            return
        self._last = self._with_aliases(row)
        if any(name not in self._columns for name in self._last):
            self._replace([*self._read(), self._last])
        else:
            append_line(self.path, self._format([self._last]))

    def _joins_last(self, row: Row) -> bool:
        last = self._last
        return (
            last is not None
            and last["step"] == row["step"]
            and last["kind"] != row["kind"]
            and "val" in (last["kind"], row["kind"])
        )

    def _merged(self, row: Row) -> Row:
        assert self._last is not None
        kind = row["kind"] if self._last["kind"] == "val" else self._last["kind"]
        return {**self._last, **self._with_aliases(row), "kind": kind}

    @staticmethod
    def _with_aliases(row: Row) -> Row:
        return {**{key: row[key] for key in ROW_KEYS}, **alias_values(row), **row}

    def _read(self) -> list[Row]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _replace(self, rows: list[Row]) -> None:
        for row in rows:
            self._columns.extend(name for name in row if name not in self._columns)
        write_atomically(self.path, ",".join(self._columns) + "\n" + self._format(rows))

    def _format(self, rows: Iterable[Row]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            writer.writerow(["" if _is_missing(row.get(name)) else row[name] for name in self._columns])
        return text.getvalue()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run read back from its folder."""

    path: Path
    name: str
    rows: tuple[Row, ...]
    """As in metrics.jsonl, in the order written."""

    def series(self, *metrics: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the first of these metrics that the run has; empty lists when it has none."""
        for metric in metrics:
            points = [(row["step"], row[metric]) for row in self.rows if row.get(metric) is not None]
            if points:
                return [step for step, _ in points], [value for _, value in points]
        return [], []

    def metric_names(self) -> list[str]:
        """Every metric the run has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name not in ROW_KEYS))


def read_run(run_dir: Path) -> RunRecord:
    """Read a run's metrics. Raises UserError when the folder holds no run or the run logged nothing."""
    source = run_dir / METRICS_FILE
    if not source.is_file():
        raise UserError(f"{run_dir} is no run folder (it has no {METRICS_FILE}); name a folder such as runs/grpo-qwen3")
    rows = read_jsonl(source)
    if not rows:
        raise UserError(f"{source} is empty: the run has not finished a step yet")
    return RunRecord(path=run_dir, name=run_dir.resolve().name, rows=tuple(rows))
