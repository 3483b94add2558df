"""`python -m verl.trainer.main_eval --model_path DIR [DIR ...] --eval_dataset FILE [section.key=value ...]`.

Prints accuracy, mean number of reasoning steps and completeness with 95 % intervals, one row a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from verl.trainer.entry import parse_arguments, run_main


def main(argv: Sequence[str]) -> None:
    """Evaluate one model or several side by side."""
    import argparse

    parser = argparse.ArgumentParser(prog="verl eval", description="Evaluate models on held-out problems, side by side.")
    parser.add_argument(
        "--model_path",
        type=os.path.expanduser,
        nargs="+",
        required=True,
        metavar="DIR",
        help="model, checkpoint or run folders, or hub ids",
    )
    parser.add_argument(
        "--eval_dataset",
        type=os.path.expanduser,
        required=True,
        metavar="FILE",
        help="data file or folder; the suffix may be left out",
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call the models in the table")
    parser.add_argument(
        "--output",
        type=os.path.expanduser,
        metavar="DIR",
        help="write results.json, table.md and every answer (answers.jsonl) here",
    )
    args, overrides = parse_arguments(parser, argv)
    from verl.config import EVAL, load_config
    from verl.errors import ConfigError
    from verl.observe.console import quiet_third_party
    from verl.observe.evaluation import comparison_markdown, comparison_table
    from verl.observe.records import check_writable

    quiet_third_party()
    if args.names and len(args.names) != len(args.model_path):
        raise ConfigError(f"--names has {len(args.names)} names for {len(args.model_path)} models; give one a model")
    if args.output:
        check_writable("--output", Path(args.output), folder=True)
    from verl.trainer.inputs import resolve_model
    from verl.trainer.run_settings import trained_settings
    from verl.trainer.standalone import evaluate_model, model_names, resolve_dataset

    base = None if args.config else trained_settings(args.model_path, EVAL)
    config = load_config(args.config, overrides, purpose=EVAL, base=base)

    for path in args.model_path:
        resolve_model(path)  # every path is checked before the first model loads
    dataset = resolve_dataset(args.eval_dataset)
    summaries, answers = [], []
    for name, path in zip(args.names or model_names(args.model_path), args.model_path, strict=True):
        summary, trajectories = evaluate_model(config, path, dataset, name)
        summaries.append(summary)
        answers += [_answer(name, t) for t in trajectories]
    print(comparison_table(summaries))
    if args.output:
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps([asdict(s) for s in summaries], indent=1))
        (folder / "table.md").write_text(comparison_markdown(summaries))
        (folder / "answers.jsonl").write_text("".join(json.dumps(a, default=str) + "\n" for a in answers))
        print(f"written: {folder}")


def _answer(name: str, trajectory) -> dict:
    return {
        "model": name,
        "uid": trajectory.prompt.uid,
        "sample": trajectory.sample_index,
        "prompt": trajectory.prompt.shown,
        "response": trajectory.response_text,
        "ground_truth": trajectory.prompt.ground_truth,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
    }


if __name__ == "__main__":
    run_main(main)
