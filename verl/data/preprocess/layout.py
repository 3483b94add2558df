"""The columns every converter writes, and the options and files the converters share.

One row: `data_source`, `prompt` (list of messages), `ability`, `reward_model` {style, ground_truth},
`extra_info` {split, index, question, answer, ...}. `extra_info.answer` is a worked solution, for SFT.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""Appended to every question, so that a grader can find the answer."""

Splits = dict[str, list[dict[str, Any]]]
"""Rows by "train" and "test"."""


def word_problem_row(
    question: str, solution: str, ground_truth: str, *, source: str, instruction: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A question with a numeric answer in upstream's columns; `write_splits` fills in `extra_info`'s split and index."""
    text = f"{question} {instruction}" if instruction else question
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"question": question, "answer": solution, **(extra or {})},
    }


def parser(description: str, default_output: str) -> argparse.ArgumentParser:
    """The options all converters have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--output_path", default=default_output, help="folder for train.parquet and test.parquet, or one .parquet file"
    )
    options.add_argument(
        "--split", choices=["train", "test", "all"], help="rows that go to a single .parquet file (default: by its name)"
    )
    options.add_argument("--instruction", default=INSTRUCTION, help='put after each question; "" for none')
    options.add_argument("--test_size", type=float, help="share of the rows to hold out when the input has no test rows")
    options.add_argument("--seed", type=int, default=0, help="of the held-out rows")
    return options


def hold_out(groups: Sequence[Any], test_size: float, seed: int) -> np.ndarray:
    """[N] True for about `test_size` of the rows; rows with the same group (a hashable) stay on one side."""
    if not 0 < test_size < 1:
        raise UserError(f"--test_size={test_size} must be between 0 and 1")
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    row_groups = np.array([numbers[group] for group in groups])
    sizes = np.bincount(row_groups)
    order = np.random.default_rng(seed).permutation(len(sizes))
    before = np.concatenate([[0], sizes[order].cumsum()[:-1]])
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[order[before < round(test_size * len(row_groups))]] = True
    return chosen[row_groups]


def write_splits(splits: Splits, output: str, split: str | None) -> list[Path]:
    """Write a folder (train.parquet, test.parquet) or, when `output` ends in .parquet, that file; says what was written.

    Raises:
        UserError: no rows for the file that was asked for.
    """
    path = Path(output).expanduser()
    for name, rows in splits.items():
        for index, row in enumerate(rows):
            row["extra_info"] = {"split": name, "index": index, **row["extra_info"]}
    if path.suffix != ".parquet":
        return [_write(rows, path / f"{name}.parquet", name) for name, rows in splits.items() if rows]
    if split is None:
        split = "test" if "test" in path.stem and "train" not in path.stem else "train"
    rows = [row for name, rows in splits.items() if split in (name, "all") for row in rows]
    if not rows:
        raise UserError(
            f"--output_path={output} takes the {split} rows, and the input has none; choose with --split train|test|all"
        )
    return [_write(rows, path, split)]


def _write(rows: list[dict[str, Any]], path: Path, name: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    os.replace(partial, path)
    print(f"{name}: {len(rows)} rows written to {path}")
    return path


def run(convert: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None) -> int:
    """Exit code of a converter: 0, or 2 after one line about the user's mistake."""
    try:
        convert(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
