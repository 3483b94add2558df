"""`python -m verl.trainer.main_generation --model_path DIR --input FILE --output FILE.parquet [section.key=value ...]`.

Answers every prompt `rollout.val_n` times and writes the rows with a column `responses` (a list of texts).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.trainer.entry import parse_arguments, run_main

if TYPE_CHECKING:
    import pyarrow as pa

    from verl.data.types import Prompt


def main(argv: Sequence[str]) -> None:
    """Generate answers for a data set."""
    import argparse

    parser = argparse.ArgumentParser(prog="verl generate", description="Answer every prompt of a data set.")
    parser.add_argument("--model_path", required=True, metavar="DIR", help="model, checkpoint or run folder, or hub id")
    parser.add_argument("--input", required=True, metavar="FILE", help="data file or folder; the suffix may be left out")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write: .parquet or .jsonl")
    args, overrides = parse_arguments(parser, argv)
    from verl.config import GENERATE, load_config
    from verl.errors import ConfigError
    from verl.observe.console import plural, quiet_third_party
    from verl.observe.records import check_writable

    quiet_third_party()
    if Path(args.output).suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--output={args.output}: the suffix says the format; use .parquet or .jsonl")
    if Path(args.output).resolve() == Path(args.input).resolve():
        raise ConfigError(f"--output={args.output} is the input; the answers would replace the questions: name another file")
    check_writable("--output", Path(args.output), folder=False)
    from verl.trainer.roles import closing_runtime
    from verl.trainer.rollouts import generate, validation_sampling
    from verl.trainer.run_settings import trained_settings
    from verl.trainer.standalone import load_for_inference

    base = None if args.config else trained_settings([args.model_path], GENERATE)
    config = load_config(args.config, overrides, purpose=GENERATE, base=base)

    runtime, rollout, prompts, config = load_for_inference(config, args.model_path, args.input)
    sampling = validation_sampling(config)
    with closing_runtime(runtime):
        trajectories = generate(rollout, prompts, sampling, seed=config.training.seed, step=0)
    rows = []
    for start in range(0, len(trajectories), sampling.n):
        group = trajectories[start : start + sampling.n]
        rows.append(_row(group[0].prompt, [t.response_text for t in group]))
    _write(rows, Path(args.output))
    print(f"written: {args.output} ({plural(len(rows), 'row')}, {plural(sampling.n, 'response')} each)")


def _row(prompt: Prompt, responses: list[str]) -> dict[str, Any]:
    """What was asked and answered, then the row's further columns; one whose name is taken is called `input_NAME`."""
    own = {
        "uid": prompt.uid,
        "prompt": prompt.shown,
        "data_source": prompt.data_source,
        "ground_truth": None if prompt.ground_truth is None else str(prompt.ground_truth),
        "responses": responses,
    }
    return own | {f"input_{name}" if name in own else name: value for name, value in prompt.extra.items()}


def _write(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)  # rows of JSON need not have the same
    pq.write_table(pa.table({name: _column([row.get(name) for row in rows]) for name in names}), path)


def _column(values: list[Any]) -> pa.Array:
    """An Arrow column; values that are of several kinds, or of one that parquet lacks, as JSON text."""
    import pyarrow as pa

    try:
        column = pa.array(values)
        if not _has_empty_struct(column.type):
            return column
    except (pa.ArrowException, OverflowError):
        pass
    return pa.array([None if value is None else json.dumps(value, default=str) for value in values])


def _has_empty_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    children = [kind.field(index).type for index in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not children) or any(map(_has_empty_struct, children))


if __name__ == "__main__":
    run_main(main)
