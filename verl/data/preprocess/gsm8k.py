"""GSM8K (Cobbe et al. 2021) in upstream's columns.

The input is the hub's data set, a raw file (JSON list, JSONL, CSV or parquet with `question` and `answer`), or a folder
with train.* and test*.*. Rows of a single file are split by their `split` field if they have one, else some are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.data.datasets import final_number
from verl.data.hub import hub_reachable
from verl.data.preprocess.layout import Splits, hold_out, parser, run, word_problem_row, write_splits
from verl.data.rows import SPLIT_NAMES, Row, Rows, Split, load_rows, split_files
from verl.errors import DataError, UserError

DATA_SOURCE = "openai/gsm8k"
HUB_NAME = "hf:openai/gsm8k@main"
TEST_SIZE = 0.1
"""Held out of an input without test rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run(_convert, argv)


def _convert(argv: Sequence[str] | None) -> None:
    options = parser("Convert GSM8K to parquet.", "data/gsm8k")
    options.add_argument("--input_path", help="raw file or folder; none: the hub")
    args = options.parse_args(argv)
    if args.input_path:
        splits = read_splits(args.input_path, instruction=args.instruction, test_size=args.test_size, seed=args.seed)
    else:
        splits = read_hub(args.instruction)
    write_splits(splits, args.output_path, args.split)


def convert_row(row: Row, *, instruction: str, where: str) -> dict[str, Any]:
    """One question with its worked answer, which ends in `#### N`, or is the number alone.

    Raises:
        DataError: a field is missing or the answer has no final number.
    """
    for name in ("question", "answer"):
        if row.get(name) in (None, ""):
            raise DataError(f"{where}: no field {name!r}; the row has {', '.join(row) or 'none'}")
    answer = str(row["answer"])
    number = final_number(answer) or final_number(f"#### {answer}")
    if number is None:
        raise DataError(f"{where}: the answer must end in '#### N', or be a number; it ends in {answer[-40:]!r}")
    return word_problem_row(str(row["question"]), answer, number, source=DATA_SOURCE, instruction=instruction)


def read_splits(path: str, *, instruction: str, test_size: float | None = None, seed: int = 0) -> Splits:
    """Train and test rows of a raw file or folder. `test_size` defaults to a tenth when the input has no test rows."""
    folder = Path(path).expanduser()
    if folder.is_dir() and split_files(folder, "test"):
        return {split: _convert_all(load_rows([path], split=split), instruction) for split in ("train", "test")}
    if not folder.exists():
        raise UserError(f"--input_path={path}: no such file or folder")
    train = load_rows([path], split="train")
    test = _second_list(path, train)
    if test is not None:
        return {"train": _convert_all(train, instruction), "test": _convert_all(test, instruction)}
    rows = _convert_all(train, instruction)
    if all("split" in row for row in train):
        held_out = [str(row["split"]) in SPLIT_NAMES["test"] for row in train]
    else:
        held_out = hold_out(range(len(rows)), TEST_SIZE if test_size is None else test_size, seed).tolist()
    return {
        "train": [row for row, test_row in zip(rows, held_out, strict=True) if not test_row],
        "test": [row for row, test_row in zip(rows, held_out, strict=True) if test_row],
    }


def _second_list(path: str, train: Rows) -> Rows | None:
    """The test rows of a JSON object that has lists under train and test; None when the file has one list."""
    if Path(path).suffix != ".json":
        return None
    test = load_rows([path], split="test")
    return test if list(test) != list(train) else None


def read_hub(instruction: str) -> Splits:
    """The hub's train and test rows."""
    if not hub_reachable():
        raise UserError(
            "the hub cannot be reached for openai/gsm8k; give a local copy: --input_path FILE "
            "(JSON or JSONL rows with question and answer, or a folder with train.jsonl and test.jsonl)"
        )
    splits: tuple[Split, ...] = ("train", "test")
    return {split: _convert_all(load_rows([HUB_NAME], split=split), instruction) for split in splits}


def _convert_all(rows: Rows, instruction: str) -> list[dict[str, Any]]:
    return [convert_row(row, instruction=instruction, where=rows.where(i)) for i, row in enumerate(rows)]


if __name__ == "__main__":
    raise SystemExit(main())
