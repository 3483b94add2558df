"""From trajectories to rewards: scale, parts, failures, metrics, and the checks before training."""

import logging
from dataclasses import replace

import pytest

from verl.config.schema import DataConfig, RewardConfig
from verl.data.datasets import make_prompt
from verl.data.rows import load_rows
from verl.data.types import Prompt, Segment, Trajectory
from verl.errors import UserError
from verl.observe.metrics import Mean, Sum, metric_values
from verl.rewards.outcome import read_result
from verl.rewards.score import build_reward, reward_request

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "throw":
        raise ValueError("no score today")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "number":
        return 0.25
    return {"score": 1.0 + bonus, "length": len(solution_str), "level": extra_info["level"], "pred": solution_str}

def trl(prompts, completions, level, **columns):
    return [float(level[0]) + len(prompts[0])]
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return str(path)


def prompt(uid="rows:0", ground_truth="18", **extra):
    return Prompt(uid=uid, messages=({"role": "user", "content": "q"},), ground_truth=ground_truth, extra=extra)


def trajectory(text, **kwargs):
    segment = Segment(token_ids=(1, 2), is_model=True, logprobs=(0.0, 0.0), policy_versions=(0, 0))
    return Trajectory(
        prompt=prompt(**kwargs),
        prompt_ids=(3,),
        segments=(segment,),
        finish_reason="stop",
        group_id=0,
        sample_index=0,
        response_text=text,
    )


def test_accuracy_is_scaled_and_its_parts_are_not():
    with build_reward(RewardConfig(scale=2.0, format_score=0.25)) as reward:
        scored, metrics = reward.score([trajectory("#### 18"), trajectory("#### 17"), trajectory("no idea")])
    assert [t.reward for t in scored] == [2.0, 0.5, 0.0]
    assert [t.reward_parts for t in scored] == [
        {"score": 1.0, "acc": 1.0},
        {"score": 0.25, "acc": 0.0},
        {"score": 0.0, "acc": 0.0},
    ]
    assert all(t.reward_failure is None for t in scored)
    assert metrics == {
        "reward/score": Mean(1.25, 3.0),
        "reward/acc": Mean(1.0, 3.0),
        "reward/failures": Sum(0.0),
        "reward/timeouts": Sum(0.0),
    }


def test_custom_reward_with_failures(reward_file, caplog):
    config = RewardConfig(
        **{"type": "custom", "function": reward_file, "function_kwargs": {"bonus": 0.5}},
        **{"scale": 10.0, "failure_reward": -1.0, "timeout_s": 1.0, "workers": 2},
    )
    texts = ["abc", "hang", "throw", "nan", "number", "throw", "a"]
    with build_reward(config) as reward, caplog.at_level(logging.WARNING):
        scored, metrics = reward.score([trajectory(text, level=i) for i, text in enumerate(texts)])
        reward.score([trajectory("throw"), trajectory("a", level=1)])
    assert [t.response_text for t in scored] == texts
    assert [t.reward for t in scored] == [15.0, -1.0, -1.0, -1.0, 2.5, -1.0, 15.0]
    assert scored[0].reward_parts == {"score": 1.5, "length": 3.0, "level": 0.0} and scored[4].reward_parts == {}
    assert [t.reward_failure for t in scored] == [
        *(None, "no result within 1 s (reward.timeout_s)", "ValueError: no score today", "the function returned nan"),
        *(None, "ValueError: no score today", None),
    ]
    assert metric_values(metrics) == {
        **{"reward/score": 1.5, "reward/length": 2.0, "reward/level": 3.0},
        **{"reward/failures": 4.0, "reward/timeouts": 1.0},
    }
    # One message a kind, the traceback once.
    assert len(caplog.records) == 3
    assert caplog.text.count('raise ValueError("no score today")') == 1


def test_a_function_that_works_for_no_sample_of_a_step_ends_the_run(reward_file):
    with build_reward(RewardConfig(type="custom", function=reward_file, workers=1)) as reward:
        scored, _ = reward.score([trajectory("a", level=1), trajectory("throw")])  # a sample's own failure
        with pytest.raises(UserError, match=r"failed for all 2 samples of this step \(ValueError: no score today\); mend it"):
            reward.score([trajectory("throw"), trajectory("throw")])
    assert scored[1].reward_failure == "ValueError: no score today"


def test_trl_function_and_its_columns(reward_file):
    config = RewardConfig(type="custom", function=f"{reward_file}:trl", workers=1)
    with build_reward(config) as reward:
        reward.check([prompt(level=2)])
        with pytest.raises(
            UserError, match="needs the column 'level'; the data has answer, solution, ground_truth, data_source, lvl"
        ):
            reward.check([prompt(lvl=2)])
        assert reward.score([trajectory("x", level=2)])[0][0].reward == 3.0


def test_extra_info_keeps_its_keys_and_gains_the_columns():
    row = Prompt(
        uid="rows:0",
        messages=({"role": "user", "content": "q"},),
        data_source="gsm8k",
        ground_truth=1,
        extra={"extra_info": {"index": 4, "split": "train"}, "level": 3, "split": "other"},
    )
    request = reward_request(row, "text")
    assert request.extra_info == {"level": 3, "split": "train", "index": 4}
    assert (request.data_source, request.solution_str, request.ground_truth) == ("gsm8k", "text", 1)
    assert request.prompt == [{"role": "user", "content": "q"}]
    assert reward_request(Prompt(uid="", messages=(), raw_text="1+1=", extra={"extra_info": None}), "").prompt == "1+1="


def test_check_finds_ground_truths_that_accuracy_cannot_use():
    with build_reward(RewardConfig()) as reward:
        reward.check([prompt(ground_truth=g) for g in (18, "1,000", "so\n#### 3")])
        with pytest.raises(UserError, match=r"2 of 3 rows have none \(first: rows:1\); set data.answer_key"):
            reward.check([prompt(), prompt("rows:1", None), prompt("rows:2", None)])
        with pytest.raises(UserError, match="row rows:1: the ground truth 'blue' is not a number"):
            reward.check([prompt(), prompt("rows:1", "blue")])
        # A row that was never checked is a failure of its own, not the end of the run.
        scored, metrics = reward.score([trajectory("#### 1", ground_truth=None), trajectory("#### 18")])
    assert [t.reward for t in scored] == [0.0, 1.0] and "is not a number" in scored[0].reward_failure
    assert metrics["reward/failures"] == Sum(1.0)


def test_a_function_that_cannot_be_imported_is_found_before_training(tmp_path):
    reward = build_reward(RewardConfig(type="custom", function=str(tmp_path / "nowhere.py"), workers=1))
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.py"):
        reward.check([])
    with pytest.raises(UserError, match=r"reward\.function is not set"):
        build_reward(RewardConfig(type="custom"))


@pytest.mark.parametrize("key", ["mean", "min", "zero_std_groups"])
def test_a_part_may_not_have_the_name_of_a_metric_of_the_trainer(key):
    outcome = read_result({"score": 1.0, key: 3})
    assert outcome.score is None and outcome.kind == "bad_result" and f"{key!r}" in outcome.failure
    assert read_result({"score": 1.0, "length": 3}).parts == {"score": 1.0, "length": 3.0}


def test_a_trl_function_gets_strings_for_text_and_messages_for_messages(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "def f(prompts, completions):\n    return [float(isinstance(prompts[0], str) and isinstance(completions[0], str))]"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1"}\n{"prompt": [{"role": "user", "content": "1 + 1"}]}\n')
    rows = load_rows([str(tmp_path / "rows.jsonl")], split="train")
    prompts = [make_prompt(row, uid=str(i), where="rows", data=DataConfig()) for i, row in enumerate(rows)]
    trajectories = [replace(trajectory("2"), prompt=p) for p in prompts]
    with build_reward(RewardConfig(type="custom", function=f"{file}:f", workers=1)) as reward:
        scored, _ = reward.score(trajectories)
    assert [t.reward for t in scored] == [1.0, 0.0]
