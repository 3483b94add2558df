"""`python -m verl.quickstart`: build a model, fine-tune it, train it with GRPO, and compare the three stages."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.data.types import Trajectory
from verl.observe.evaluation import is_correct
from verl.trainer.entry import run_main

NUM_DEMONSTRATIONS = 4000
SLIP_RATE = 0.5
"""Half of the demonstrated subtractions are done as additions: imitation alone learns the slip, a reward corrects it."""
NUM_RL_PROBLEMS = 4000
NUM_HELD_OUT = 300
SFT_STEPS = 700
RL_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class QuickstartPaths:
    root: Path

    def data(self, name: str) -> Path:
        return self.root / "data" / f"{name}.jsonl"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def sft(self) -> Path:
        return self.root / "sft"

    @property
    def rl(self) -> Path:
        return self.root / "rl"


def main(argv: Sequence[str]) -> None:
    """Run the quick start; everything is written below --output."""
    parser = argparse.ArgumentParser(prog="python -m verl.quickstart", description=__doc__)
    parser.add_argument("--output", default="runs/quickstart", metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    from verl.observe.console import quiet_third_party

    quiet_third_party()
    start = time.perf_counter()
    paths = QuickstartPaths(root=Path(args.output))
    print("1/4  word problems and an untrained Qwen3-architecture model")
    make_inputs(paths, args.seed)
    print(f"2/4  supervised fine-tuning on {NUM_DEMONSTRATIONS} worked solutions by a careless pupil")
    from verl.trainer.grpo import GRPOTrainer
    from verl.trainer.sft import SFTTrainer

    sft = SFTTrainer(str(paths.base), config=sft_config(paths, args.seed)).fit()
    print("3/4  GRPO: eight answers a problem, rewarded when they are right")
    rl = GRPOTrainer(str(sft.checkpoint), config=rl_config(paths, args.seed)).fit()
    print(f"4/4  base, SFT and RL on {NUM_HELD_OUT} held-out problems")
    compare(paths, {"base": str(paths.base), "SFT": str(sft.checkpoint), "RL (GRPO)": str(rl.checkpoint)}, args.seed)
    print(f"done in {time.perf_counter() - start:.0f} s; everything is in {paths.root}")


def make_inputs(paths: QuickstartPaths, seed: int) -> None:
    """Write the three data sets (no question in two of them) and the base model."""
    from verl.quickstart.model import build_model
    from verl.quickstart.problems import generate_problems, write_jsonl

    problems = generate_problems(NUM_RL_PROBLEMS + NUM_HELD_OUT, seed)
    known = {p.question for p in problems}
    candidates = generate_problems(2 * NUM_DEMONSTRATIONS, seed + 1, slip_rate=SLIP_RATE)
    demonstrations = [p for p in candidates if p.question not in known][:NUM_DEMONSTRATIONS]
    write_jsonl(demonstrations, paths.data("sft"))
    write_jsonl(problems[:NUM_RL_PROBLEMS], paths.data("rl"))
    write_jsonl(problems[NUM_RL_PROBLEMS:], paths.data("test"))
    build_model(paths.base, [p.question + "\n" + p.answer for p in demonstrations], seed=seed)


def common_config(seed: int) -> dict[str, Any]:
    return {
        "data.max_prompt_length": 64,
        "data.max_response_length": 32,
        "training.seed": seed,
        "training.resume": "never",
        "training.last_link": None,
        "actor.beta2": 0.99,
    }


def sft_config(paths: QuickstartPaths, seed: int) -> dict[str, Any]:
    return common_config(seed) | {
        "data.train_files": [str(paths.data("sft"))],
        "data.train_batch_size": 32,
        "actor.lr": 5e-3,
        "actor.lr_schedule": "cosine",
        "actor.lr_warmup_steps": 10,
        "training.total_steps": SFT_STEPS,
        "training.output_dir": str(paths.sft),
    }


def rl_config(paths: QuickstartPaths, seed: int) -> dict[str, Any]:
    return common_config(seed) | {
        "data.train_files": [str(paths.data("rl"))],
        "data.val_files": [str(paths.data("test"))],
        "data.train_batch_size": 64,
        "rollout.n": 8,
        "rollout.max_num_seqs": 512,
        "actor.lr": 3e-4,
        "actor.lr_schedule": "cosine",
        "actor.lr_warmup_steps": 5,
        "actor.min_lr_ratio": 0.1,
        "training.total_steps": RL_STEPS,
        "training.eval_interval": 0,
        "training.output_dir": str(paths.rl),
    }


def compare(paths: QuickstartPaths, models: Mapping[str, str], seed: int) -> None:
    """Evaluate the stages on the held-out problems; print the table, write it and its plot."""
    from verl.config import EVAL, config_from_dict
    from verl.observe.evaluation import comparison_markdown, comparison_panels, comparison_table
    from verl.observe.plots import plot_comparison
    from verl.observe.report import build_report
    from verl.trainer.standalone import evaluate_model

    config = config_from_dict(common_config(seed), purpose=EVAL)
    measured = [evaluate_model(config, path, str(paths.data("test")), name) for name, path in models.items()]
    summaries = [summary for summary, _ in measured]
    print(comparison_table(summaries))
    print_example({summary.name: answers for summary, answers in measured})
    (paths.root / "results.json").write_text(json.dumps([asdict(s) for s in summaries], indent=1))
    (paths.root / "table.md").write_text(comparison_markdown(summaries))
    print(f"plot: {plot_comparison(paths.root / 'comparison.png', comparison_panels(summaries))}")
    print(f"report: {build_report([paths.rl, paths.sft], paths.root / 'report.html')}")


def print_example(answers: Mapping[str, Sequence[Trajectory]]) -> None:
    """One problem as the stages answer it: the first that the last stage has right and the one before has wrong."""
    *_, before, after = answers.values()
    index = next((i for i, (a, b) in enumerate(zip(before, after, strict=True)) if is_correct(b) and not is_correct(a)), 0)
    print(f"for example: {after[index].prompt.text} (right: {after[index].prompt.ground_truth})")
    for name, trajectories in answers.items():
        print(f"  {name:<10} {trajectories[index].response_text.strip()!r}")


if __name__ == "__main__":
    run_main(main)
