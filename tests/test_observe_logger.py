"""What a run writes and prints while it trains, and that a resumed run goes on without duplicates."""

import ast
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import verl
from verl.config.schema import TrackingConfig
from verl.data.types import Prompt, Segment, Trajectory
from verl.errors import ConfigError, MissingExtraError, UserError
from verl.observe.console import final_line, step_line
from verl.observe.logger import RunLogger
from verl.observe.metrics import METRICS, Max, Mean, Sum, alias_values, metric_info, unknown_metrics
from verl.observe.records import read_jsonl, read_run
from verl.observe.timing import Timer

QUIET = TrackingConfig(backends=[], plots=False)


def train_metrics(step: int) -> dict:
    return {
        "reward/mean": Mean(step, 10),
        "actor/policy_kl": Mean(0.012),
        "response_length/mean": Mean(850, 10),
        "timing_s/gen": Sum(0.5),
        "response_length/max": Max(99),
    }


def test_console_line_has_the_promised_form():
    values = {"reward/mean": 0.42, "critic/vf_loss": 0.083, "actor/policy_kl": 0.012}
    assert step_line(100, values) == "[Step 100] Reward: 0.42 | Value Loss: 0.083 | Policy KL: 0.012"
    full = {**values, "response_length/mean": 85.4, "perf/tokens_per_s": 12345.6, "timing_s/step": 1.251}
    assert step_line(100, full).endswith("Policy KL: 0.012 | Length: 85 | 12,346 tok/s | 1.25 s/step")
    assert final_line(1000, {"reward/mean": 0.87}) == "[Step 1000] Final Reward: 0.87"


def test_console_line_without_critic_and_with_small_or_missing_numbers():
    assert step_line(1, {"reward/mean": 0.0, "actor/approx_kl": 0.0}) == "[Step 1] Reward: 0.00 | Policy KL: 0.000"
    assert step_line(1, {"reward/mean": -0.5, "actor/policy_kl": 1.2e-5}) == "[Step 1] Reward: -0.50 | Policy KL: 1.2e-05"
    assert step_line(1, {"reward/mean": math.nan}) == "[Step 1] Reward: nan"
    odd = {"reward/mean": 0.0, "reward/failures": 3.0, "reward/zero_std_groups": 1.0}
    assert step_line(1, odd) == "[Step 1] Reward: 0.00 | 3 scoring failures | all groups tied"
    assert step_line(1, {**odd, "reward/failures": 0.0, "reward/zero_std_groups": 0.9}) == "[Step 1] Reward: 0.00"
    huge = {"reward/mean": -1234.5, "critic/vf_loss": 12345.6, "actor/policy_kl": 99.9, "response_length/mean": 32768.0}
    assert len(step_line(1_000_000, {**huge, "perf/tokens_per_s": 123456.0, "timing_s/step": 1234.5})) <= 120


def test_console_lines_of_validation_and_sft():
    values = {"val/accuracy": 0.61, "val/gsm8k/accuracy": 0.5, "val/response_length": 84.2, "val/completeness": 0.9}
    assert step_line(5, values, "val") == "[Step 5] Validation Accuracy: 0.610 | Validation gsm8k Accuracy: 0.500 | Length: 84"
    assert step_line(5, {"sft/loss": 1.2345, "timing_s/step": 0.5}, "sft") == "[Step 5] Loss: 1.234 | 0.50 s/step"
    assert final_line(9, {"sft/loss": 0.25}) == "[Step 9] Final Loss: 0.250"


def test_files_are_readable_after_every_step_and_columns_may_come_late(tmp_path):
    logger = RunLogger(tmp_path, QUIET, 3)
    logger.log(0, {"val/accuracy": 0.1}, kind="val")
    for step in (1, 2, 3):
        extra = {"critic/vf_loss": 0.5} if step == 3 else {}
        logger.log(step, {**train_metrics(step), **extra})
        table = pd.read_csv(tmp_path / "metrics.csv")
        assert table.step.tolist() == list(range(step + 1))
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == step + 1
    logger.log(3, {"val/accuracy": 0.7}, kind="val")
    logger.close()
    table = pd.read_csv(tmp_path / "metrics.csv")
    # One row a step: the validation of step 3 joined its training row.
    assert table.step.tolist() == [0, 1, 2, 3] and table.kind.tolist() == ["val", "train", "train", "train"]
    assert table.episode_reward.tolist()[1:] == pytest.approx([0.1, 0.2, 0.3])
    assert table.kl_divergence.tolist()[1:] == [0.012] * 3 and table.response_length.tolist()[1:] == [85.0] * 3
    assert table["val/accuracy"].tolist()[::3] == [0.1, 0.7] and table["critic/vf_loss"].notna().tolist() == [False] * 3 + [True]
    assert [row["kind"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == ["val", "train", "train", "train", "val"]


def test_numbers_that_are_not_finite_stay_valid_json_and_csv(tmp_path):
    with RunLogger(tmp_path, QUIET, 1) as logger:
        logger.log(1, {"reward/mean": math.nan, "actor/grad_norm": math.inf, "actor/lr": 1e-6})
    line = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["reward/mean"] is None and row["actor/lr"] == 1e-6
    assert math.isnan(pd.read_csv(tmp_path / "metrics.csv").episode_reward[0])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def log(logger, steps):
        for step in steps:
            logger.log(step, train_metrics(step))
            logger.log_samples(step, [trajectory(step)])
            if step % 2 == 0:
                logger.log(step, {"val/accuracy": step / 10}, kind="val")

    def content(folder):
        rows = [{**row, "time": 0} for row in read_jsonl(folder / "metrics.jsonl")]
        return rows, pd.read_csv(folder / "metrics.csv").drop(columns="time"), (folder / "samples.jsonl").read_text()

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    log(RunLogger(whole, QUIET, 6), range(1, 7))
    log(RunLogger(cut, QUIET, 6), range(1, 6))
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "ki')  # killed while writing
    log(RunLogger(cut, QUIET, 6, resumed_step=4), range(5, 7))
    (rows, table, samples), (cut_rows, cut_table, cut_samples) = content(whole), content(cut)
    assert rows == cut_rows and samples == cut_samples
    pd.testing.assert_frame_equal(table, cut_table)


def test_a_new_run_in_an_old_folder_keeps_the_old_numbers_aside(tmp_path):
    for reward in (0.1, 0.2, 0.3):
        with RunLogger(tmp_path, QUIET, 1) as logger:
            logger.log(1, {"reward/mean": reward})
    kept = [read_jsonl(tmp_path / name)[0]["reward/mean"] for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")]
    assert kept == [0.1, 0.2, 0.3]
    assert pd.read_csv(tmp_path / "metrics.csv").episode_reward.tolist() == [0.3]


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is no JSON"):
        read_run(tmp_path)


def trajectory(number: int, reward: float = 1.0) -> Trajectory:
    prompt = Prompt(
        uid=f"train:{number}", messages=({"role": "user", "content": f"{number} + 1?"},), ground_truth=str(number + 1)
    )
    segment = Segment(token_ids=[1, 2, 3], is_model=True, logprobs=[0.0] * 3, policy_versions=[0] * 3)
    return Trajectory(
        prompt=prompt,
        prompt_ids=[5],
        segments=(segment,),
        finish_reason="stop",
        group_id=number,
        sample_index=0,
        response_text=f"#### {number + 1}",
        reward=reward,
    )


def test_samples_are_spread_over_the_step(tmp_path):
    with RunLogger(tmp_path, TrackingConfig(backends=[], plots=False, log_samples=3), 1) as logger:
        logger.log_samples(1, [trajectory(number) for number in range(9)])
        logger.log_samples(2, [trajectory(0)])
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [sample["uid"] for sample in samples] == ["train:0", "train:3", "train:6", "train:0"]
    assert samples[1]["response"] == "#### 4" and samples[1]["ground_truth"] == "4" and samples[1]["response_length"] == 3
    assert samples[1]["prompt"] == [{"role": "user", "content": "3 + 1?"}]


def test_lines_go_to_stdout_and_end_with_the_final_one(tmp_path, capsys):
    with RunLogger(tmp_path, TrackingConfig(plots=False), 4, console_every=2) as logger:
        for step in (1, 2, 3, 4):
            logger.log(step, {"reward/mean": step / 10})
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["[Step 2] Reward: 0.20", "[Step 4] Reward: 0.40", "[Step 4] Final Reward: 0.40"]
    assert printed.err == ""  # no terminal, no bars


def test_a_failed_run_prints_no_final_line(tmp_path, capsys):
    with pytest.raises(RuntimeError), RunLogger(tmp_path, TrackingConfig(), 4) as logger:
        logger.log(1, {"reward/mean": 0.5})
        raise RuntimeError
    assert "Final" not in capsys.readouterr().out


BARS = """
import time
from pathlib import Path
from verl.config.schema import TrackingConfig
from verl.observe.console import progress
from verl.observe.logger import RunLogger
with RunLogger(Path({folder!r}), TrackingConfig(plots=False), 2) as logger:
    for step in (1, 2):
        with progress("Generating", total=8) as bar:
            for _ in range(8):
                bar.advance()
                time.sleep(0.05)
        logger.log(step, {{"reward/mean": 0.5}})
"""


def test_bars_show_on_a_terminal_with_the_lines_above(tmp_path):
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    script = BARS.format(folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    while chunk := _read(master):
        seen += chunk
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert re.search(r"Training .*1/2", text) and re.search(r"Generating .*[2-8]/8", text)
    assert "[Step 2] Final Reward: 0.50" in text and "Traceback" not in text
    assert seen.decode().count("\x1b[?25l") == seen.decode().count("\x1b[?25h")  # the cursor is given back


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side has closed
        return b""


def test_tensorboard_gets_every_number_and_forgets_what_a_resume_overwrites(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = TrackingConfig(backends=["tensorboard"], plots=False)
    with RunLogger(tmp_path, tracking, 3) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"reward/mean": step / 10})
    with RunLogger(tmp_path, tracking, 3, resumed_step=1) as logger:
        logger.log(2, {"reward/mean": 0.9})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.9)]


def test_a_missing_or_unknown_tracker_is_one_clear_line(tmp_path, monkeypatch):
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)  # what an import finds where the package is absent
        with pytest.raises(MissingExtraError, match=rf"{package} is not installed; run: pip install -e '.*\[tracking\]'"):
            RunLogger(tmp_path, TrackingConfig(backends=[package]), 1)
    with pytest.raises(ConfigError, match=r"tracking\.backends holds 'wandbb'; use some of: console, tensorboard"):
        RunLogger(tmp_path, TrackingConfig(backends=["wandbb"]), 1)  # type: ignore[list-item]


def test_timer_adds_up_and_resets(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = Timer()
    for _ in range(2):
        with timer("gen"):
            pass
    assert timer.seconds("gen") == 2.5 and timer.seconds("other") == 0
    assert timer.metrics() == {"timing_s/gen": Sum(2.5)}
    with pytest.raises(KeyError), timer("gen"):
        raise KeyError
    assert timer.metrics() == {"timing_s/gen": Sum(1.0)}


def test_table_of_metrics():
    assert unknown_metrics(["reward/mean", "timing_s/gen", "val/easy/accuracy", "episode_reward", "actor/pg_los"]) == [
        "actor/pg_los"
    ]
    assert metric_info("timing_s/step") is METRICS["timing_s/step"]  # the exact entry, not the pattern
    assert metric_info("reward/steps").meaning.startswith("mean of one part")
    assert alias_values({"actor/approx_kl": 1.0, "actor/policy_kl": 2.0}) == {"kl_divergence": 2.0}
    assert all(info.unit and info.meaning for info in METRICS.values())


def test_every_metric_named_in_the_code_is_in_the_table():
    """String constants that look like a metric, anywhere in the package but here."""
    family = re.compile(
        r"(actor|critic|reward|advantages|returns|response_length|prompt_length|rollout|training|perf|sft)/[a-z_/]+"
    )
    names = {
        node.value
        for path in Path(verl.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and family.fullmatch(node.value)
    }
    assert {"actor/pg_loss", "reward/zero_std_groups"} <= names
    prefixes = {name for name in names if any(pattern.startswith(f"{name}/") for pattern in METRICS)}
    assert unknown_metrics(names - prefixes) == []
