"""Small runs for tests of trainers: their input, their configuration, and the comparison of their histories."""

import json
from pathlib import Path

import pytest

from verl.quickstart.model import build_model
from verl.quickstart.problems import generate_problems, write_jsonl


def make_inputs(folder: Path) -> dict[str, str]:
    """A small model, and sums to train and test it on."""
    problems = generate_problems(40, 0)
    build_model(folder / "model", [p.question + p.answer for p in problems], seed=0, hidden_size=32, num_layers=2)
    write_jsonl(problems[:30], folder / "train.jsonl")
    write_jsonl(problems[30:], folder / "test.jsonl")
    return {"model": str(folder / "model"), "train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}


def keys(inputs, out, **changes):
    base = {
        "data.train_files": [inputs["train"]],
        "data.val_files": [inputs["test"]],
        "data.train_batch_size": 4,
        "data.max_response_length": 8,
        "rollout.n": 3,
        "actor.lr": 1e-3,
        "actor.mini_batch_size": 2,
        "actor.max_tokens_per_micro_batch": 150,
        "reward.function": f"{Path(__file__).resolve()}:digits",
        "training.total_steps": 5,
        "training.eval_interval": 0,
        "training.output_dir": str(out),
        "training.last_link": None,
        "tracking.plots": False,
    }
    return base | {key.replace("__", "."): value for key, value in changes.items()}


def digits(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def history(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("time",) and not k.startswith(("timing_s", "perf"))} for row in rows]


def assert_alike(run: Path, other: Path, tolerance: float):
    for row, twin in zip(history(run), history(other), strict=True):
        assert row.keys() == twin.keys()
        for name, value in row.items():
            want = pytest.approx(twin[name], rel=tolerance, abs=tolerance) if isinstance(value, float) else twin[name]
            assert value == want, (row["step"], name)
