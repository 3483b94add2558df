"""GRPO step time and start-up: verl against TRL's GRPOTrainer, on one tiny model, on a CPU.

    python -m venv .venv-core && .venv-core/bin/pip install torch==2.13.0 -e .
    python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
    .venv-core/bin/python benchmarks/grpo_step_vs_trl.py compare --trl-python .venv-trl/bin/python

runs both trainers in turn, each in a fresh process and in an environment with nothing else installed, and prints
seconds a step (wall and CPU, median over steps after the first) and seconds from process start to the end of the
tenth step, with the ratios of the rounds.

Work: a two-layer Qwen3 of hidden size 64 (164 k parameters), 8 prompts of 24 tokens (chat template included, the same
for both) x 8 samples, exactly 64 new tokens each, one update a step, float32, no reference model, the same Python
reward (share of digits), the same thread count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPTS, SAMPLES, NEW_TOKENS, STEPS = 8, 8, 64, 12


def digit_share(data_source, solution_str, ground_truth, extra_info) -> float:
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def questions(count: int) -> list[str]:
    rng = random.Random(0)
    return [f"What is {rng.randint(0, 99)} + {rng.randint(0, 99)}?" for _ in range(count)]


def make_model(folder: Path) -> None:
    from verl.quickstart.model import build_model

    texts = [f"{q} The answer is {i}." for i, q in enumerate(questions(4000))]
    build_model(folder, texts, seed=0, vocab_size=1024, hidden_size=64, num_layers=2, max_position_embeddings=2048)


def run_verl(model: str, out: Path) -> None:
    from verl.trainer.grpo import GRPOTrainer

    data = out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps({"prompt": q, "answer": ""}) + "\n" for q in questions(256)))
    marks: list[tuple[float, float]] = []

    class Timed(GRPOTrainer):
        def step(self, prompts):
            wall, cpu = time.perf_counter(), time.process_time()
            metrics = super().step(prompts)
            marks.append((time.perf_counter() - wall, time.process_time() - cpu))
            if len(marks) == 10:
                ends.append(time.time())
            return metrics

    ends: list[float] = []
    config = {
        "data.train_files": [str(data)],
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 64,
        "data.max_response_length": NEW_TOKENS,
        "rollout.n": SAMPLES,
        "rollout.ignore_eos": True,
        "actor.lr": 1e-3,
        "training.total_steps": STEPS,
        "training.output_dir": str(out.with_suffix("")),
        "training.save_interval": 0,
        "training.last_link": None,
        "training.resume": "never",
        "tracking.plots": False,
    }
    Timed(model, reward_function=f"{Path(__file__).resolve()}:digit_share", config=config).fit()
    out.write_text(json.dumps({"steps": marks, "tenth": ends[0]}))


def run_trl(model: str, out: Path) -> None:
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **columns):
        return [digit_share("", c[0]["content"], "", None) for c in completions]

    marks: list[tuple[float, float]] = []
    ends: list[float] = []

    class Marker(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.begun = time.perf_counter(), time.process_time()

        def on_step_end(self, *args, **kwargs):
            marks.append((time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]))
            if len(marks) == 10:
                ends.append(time.time())

    config = GRPOConfig(
        output_dir=str(out.with_suffix("")),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        max_steps=STEPS,
        learning_rate=1e-3,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions(256)]),
        callbacks=[Marker()],
    )
    trainer.train()
    out.write_text(json.dumps({"steps": marks, "tenth": ends[0]}))


def compare(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        make_model(model)
        rows: dict[str, list[dict[str, float]]] = {"verl": [], "trl": []}
        for round_number in range(args.rounds):
            for name, python in (("verl", sys.executable), ("trl", args.trl_python)):
                out = Path(scratch, f"{name}{round_number}.json")
                command = [python, __file__, name, "--model", str(model), "--out", str(out)]
                begun = time.time()
                env = {
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "OMP_NUM_THREADS": str(args.threads),
                }
                result = subprocess.run(command, capture_output=True, text=True, env=env)
                if result.returncode:
                    sys.exit(f"{name} failed:\n{result.stderr[-3000:]}")
                record = json.loads(out.read_text())
                walls, cpus = zip(*record["steps"][1:], strict=True)
                rows[name].append(
                    {
                        "s/step wall": statistics.median(walls),
                        "s/step CPU": statistics.median(cpus),
                        "start to 10th step": record["tenth"] - begun,
                    }
                )
        print(f"{PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens, {args.threads} thread(s), {args.rounds} rounds")
        print(f"{'':<20}{'verl':>10}{'TRL':>10}{'TRL / verl':>14}  (medians; ratio: median of rounds)")
        for measure in rows["verl"][0]:
            ours, theirs = ([r[measure] for r in rows[name]] for name in ("verl", "trl"))
            ratio = statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
            print(f"{measure:<20}{statistics.median(ours):>10.3f}{statistics.median(theirs):>10.3f}{ratio:>13.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "verl", "trl"))
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "compare":
        compare(args)
    else:
        {"verl": run_verl, "trl": run_trl}[args.what](args.model, args.out)


if __name__ == "__main__":
    main()
