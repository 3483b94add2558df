"""Easy word problems (AddSub, MultiArith, SingleOp, SingleEq, SVAMP) in upstream's columns, with worked solutions.

Input rows have `question`, `answer` and `equation`, such as `X = 70 - 27`, `( 76.0 - 25.0 )`, `14*(0.25+0.5)=x` or
`70-x=27`. A solution has one line for each operation, in the order one would do them (`70 - 27 = 43`), and ends in
`#### N`. Arithmetic is exact.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from verl.data.preprocess.layout import Splits, hold_out, parser, run, word_problem_row, write_splits
from verl.data.rows import Row, Rows, load_rows
from verl.errors import DataError, UserError

TEST_SIZE = 0.2
TOLERANCE = Fraction(1, 100_000)
"""How far a computed result may be from the published answer, which is rounded in a few rows."""

_OPERATIONS = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run(_convert, argv)


def _convert(argv: Sequence[str] | None) -> None:
    options = parser("Convert easy word problems to parquet.", "data/arithmetic")
    options.add_argument("--input_path", required=True, nargs="+", help="JSONL files, or a folder of them")
    args = options.parse_args(argv)
    rows = load_rows(_files(args.input_path))
    test_size = TEST_SIZE if args.test_size is None else args.test_size
    splits = convert_rows(rows, instruction=args.instruction, test_size=test_size, seed=args.seed)
    dropped = len(rows) - sum(len(part) for part in splits.values())
    write_splits(splits, args.output_path, args.split)
    if dropped:
        print(f"{dropped} training rows left out: their equation does not lead to their answer")


def _files(paths: Sequence[str]) -> list[str]:
    files: list[str] = []
    for path in paths:
        folder = Path(path).expanduser()
        if not folder.exists():
            raise UserError(f"--input_path={path}: no such file or folder")
        found = sorted(str(file) for file in folder.glob("*.jsonl")) if folder.is_dir() else [path]
        if not found:
            raise UserError(f"--input_path={path}: the folder has no .jsonl files")
        files += found
    return files


def convert_rows(rows: Rows, *, instruction: str, test_size: float, seed: int) -> Splits:
    """Train and test rows. Near-copies of a problem (the sets share some, reworded) fall on the same side.

    Rows whose equation does not give their answer stay in the test split, where only the answer counts, and are left
    out of the training split.
    """
    held_out = hold_out([problem_key(row, rows.where(i)) for i, row in enumerate(rows)], test_size, seed)
    splits: Splits = {"train": [], "test": []}
    for i, row in enumerate(rows):
        solution = worked_solution(str(row.get("equation", "")), str(row["answer"]))
        if solution is None and not held_out[i]:
            continue
        answer = plain_number(Fraction(str(row["answer"])))
        extra = {"equation": str(row.get("equation", "")), "steps": row.get("steps"), "id": str(row.get("id", i))}
        source = f"arithmetic/{Path(rows.where(i).rsplit(':', 1)[0]).stem}"
        converted = word_problem_row(
            row["question"], solution or f"#### {answer}", answer, source=source, instruction=instruction, extra=extra
        )
        splits["test" if held_out[i] else "train"].append(converted)
    return splits


def problem_key(row: Row, where: str) -> tuple[Any, ...]:
    """What rewordings of one problem have in common: its first word (a name, mostly), its numbers and its answer."""
    for name in ("question", "answer"):
        if row.get(name) in (None, ""):
            raise DataError(f"{where}: no field {name!r}; the row has {', '.join(row) or 'none'}")
    try:
        answer = Fraction(str(row["answer"]))
    except ValueError as error:
        raise DataError(f"{where}: the answer must be a number, got {row['answer']!r}") from error
    numbers = sorted(Fraction(number) for number in re.findall(r"\d+(?:\.\d+)?", row["question"].replace(",", "")))
    first = re.search(r"[a-z]+", row["question"].lower())
    return first and first[0], tuple(numbers), answer


def worked_solution(equation: str, answer: str) -> str | None:
    """One line for each operation and `#### N`; None when the equation cannot be solved or gives another answer.

    >>> worked_solution("70-x=27", "43")
    '70 - 27 = 43\\n#### 43'
    """
    lines: list[str] = []
    try:
        result = _solve(equation, lines)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    if abs(result - Fraction(answer)) > TOLERANCE:
        return None
    return "\n".join([*lines, f"#### {plain_number(Fraction(answer))}"])


def plain_number(value: Fraction) -> str:
    """`43`, `11.9`: no exponent, no trailing zeros; a number without end is cut after six places."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def _solve(equation: str, lines: list[str]) -> Fraction:
    """Value of x in `A = B`, where x occurs once, or value of an expression; the steps are appended to `lines`."""
    sides = [ast.parse(side.strip().lower(), mode="eval").body for side in equation.split("=")]
    if len(sides) == 1:
        return _evaluate(sides[0], lines)
    if len(sides) != 2 or _has_x(sides[0]) == _has_x(sides[1]):
        raise ValueError("x must be on one side")
    unknown, known = sides if _has_x(sides[0]) else reversed(sides)
    return _isolate(unknown, known, lines)


def _isolate(unknown: ast.expr, known: ast.expr, lines: list[str]) -> Fraction:
    """x of `unknown = known`, undoing one operation of `unknown` after the other."""
    target = _evaluate(known, lines)
    while isinstance(unknown, ast.BinOp):
        x_left = _has_x(unknown.left)
        if x_left and _has_x(unknown.right):
            raise ValueError("x occurs twice")
        other = _evaluate(unknown.right if x_left else unknown.left, lines)
        kind = type(unknown.op)
        if kind is ast.Add:
            target = _step(target, ast.Sub, other, lines)
        elif kind is ast.Mult:
            target = _step(target, ast.Div, other, lines)
        elif kind is ast.Sub:
            target = _step(target, ast.Add, other, lines) if x_left else _step(other, ast.Sub, target, lines)
        elif kind is ast.Div:
            target = _step(target, ast.Mult, other, lines) if x_left else _step(other, ast.Div, target, lines)
        else:
            raise ValueError(f"unknown operation {kind.__name__}")
        unknown = unknown.left if x_left else unknown.right
    if not isinstance(unknown, ast.Name):
        raise ValueError("x is inside something that is no operation")
    return target


def _evaluate(node: ast.expr, lines: list[str]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _evaluate(node.left, lines), _evaluate(node.right, lines)
        return _step(left, type(node.op), right, lines)
    raise ValueError(f"cannot evaluate {ast.dump(node)}")


def _step(left: Fraction, kind: type[ast.operator], right: Fraction, lines: list[str]) -> Fraction:
    symbol, function = _OPERATIONS[kind]
    result = function(left, right)
    lines.append(f"{plain_number(left)} {symbol} {plain_number(right)} = {plain_number(result)}")
    return result


def _has_x(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Name) for child in ast.walk(node))


if __name__ == "__main__":
    raise SystemExit(main())
