"""Measures on held-out problems: hand-computed shares, intervals, pass@k, maj@n, steps, and the tables."""

import itertools
import json
import math
import os
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from verl.data.types import Prompt, Segment, Trajectory
from verl.observe.evaluation import (
    clustered_mean,
    clustered_share,
    comparison_markdown,
    comparison_panels,
    comparison_table,
    is_correct,
    majority_correct,
    pass_at_k,
    reasoning_steps,
    summarize,
    wilson_interval,
)


def trajectory(group, text, reward, *, sample=0, finish="stop", tokens=10, parts=None, failure=None):
    segment = Segment(token_ids=(1,) * tokens, is_model=True, logprobs=(0.0,) * tokens, policy_versions=(0,) * tokens)
    return Trajectory(
        prompt=Prompt(uid=f"rows:{group}", messages=()),
        prompt_ids=(1,),
        segments=(segment,),
        finish_reason=finish,
        group_id=group,
        sample_index=sample,
        response_text=text,
        reward=reward,
        reward_parts={"acc": reward} if parts is None else parts,
        reward_failure=failure,
    )


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [
        # By hand with z = 1.959964, z² = 3.841459. share 0, n 10: high = z²/(n + z²) = 3.841459/13.841459.
        (0.0, 10, 0.0, 0.277533),
        (1.0, 10, 0.722467, 1.0),
        # share 0.5, n 10: centre 0.5, half = z sqrt(0.025 + z²/400) / (1 + z²/10) = 1.959964 * 0.186018 / 1.3841459.
        (0.5, 10, 0.236593, 0.763407),
        (0.85, 100, 0.767164, 0.906940),
        (0.32, 100, 0.236691, 0.416626),
    ],
)
def test_wilson_interval(share, n, low, high):
    assert wilson_interval(share, n) == pytest.approx((low, high), abs=1e-5)


def test_one_sample_a_prompt_is_wilsons_interval():
    groups = [[1.0]] * 32 + [[0.0]] * 68
    assert clustered_share(groups) == (0.32, pytest.approx(wilson_interval(0.32, 100)))
    assert clustered_share([[1.0]] * 10) == (1.0, pytest.approx(wilson_interval(1.0, 10)))


def test_repeated_samples_that_all_agree_count_as_one():
    # Ten prompts, each right or wrong in all of its eight samples: nothing is learnt from the repetitions.
    share, interval = clustered_share([[1.0] * 8] * 5 + [[0.0] * 8] * 5)
    assert (share, interval) == (0.5, pytest.approx(wilson_interval(0.5, 10)))


def test_effective_sample_size_by_hand():
    # Means 1/4, 1/2, 3/4: share 1/2, variance (1/16 + 0 + 1/16)/3 = 1/24, n = 0.25 * 3 * 24 = 18, but there are 12 samples.
    groups = [[1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 0]]
    assert clustered_share(groups) == (0.5, pytest.approx(wilson_interval(0.5, 12)))
    # Means 0, 1/2, 1: variance 1/6, n = 0.25 * 3 * 6 = 4.5.
    groups = [[0.0] * 4, [1.0, 1, 0, 0], [1.0] * 4]
    assert clustered_share(groups) == (0.5, pytest.approx(wilson_interval(0.5, 4.5)))


def test_prompts_weigh_the_same_whatever_their_samples():
    assert clustered_share([[1.0], [0.0, 0.0, 0.0]])[0] == 0.5
    assert clustered_mean([[4.0], [1.0, 2.0, 3.0]])[0] == 3.0


def test_interval_of_a_mean_by_hand():
    # Means 1, 2, 3: standard deviation 1, half-width 1.959964/sqrt(3) = 1.131586.
    assert clustered_mean([[1.0], [2.0], [3.0]]) == (2.0, pytest.approx((0.868414, 3.131586), abs=1e-5))
    assert clustered_mean([[5.0, 6.0]]) == (5.5, None)


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (5, 0, 3, 0.0),
        (5, 5, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 1 - 1 / 6),
        (10, 3, 5, 1 - 21 / 252),
        (4, 2, 3, 1.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    outcomes = [1, 1, 0, 0, 0, 0, 0]
    for k in range(1, 8):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="at least 8 samples"):
        pass_at_k(7, 2, 8)


def group_of(*answers, gold="5"):
    return [trajectory(0, f"#### {a}" if a else "well", float(a == gold), sample=i) for i, a in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        (("5", "5", "6"), 1.0),
        (("5", "6", "6"), 0.0),
        (("5", "6"), 0.5),
        (("5", "6", "7"), 1 / 3),
        (("5", None, None, None), 1.0),
        ((None, None), 0.0),
        (("6", "5", "6", "5", "7"), 0.5),
    ],
)
def test_majority(answers, value):
    assert majority_correct(group_of(*answers)) == pytest.approx(value)


def test_majority_counts_answers_equal_as_numbers():
    right = [trajectory(0, text, 1.0) for text in ("#### 0.5", "the answer is 1/2")]
    assert majority_correct([*right, trajectory(0, "#### 7", 0.0)]) == 1.0


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", 0),
        ("#### 5", 0),
        ("The answer is 18.", 0),
        ("7\n8\n9\nThe answer is 9", 0),
        ("She has eggs. They are sold.\n#### 5", 0),
        ("16 - 3 = 13 eggs are left.\nSo 13 * 2 = $26.\n#### 26", 2),
        ("16 - 3 = 13.5 eggs are left. So 13.5 * 2 = 27. The answer is 27.", 2),
        ("5 + 6 = 11\n 5 +  6 = 11\n5 + 6 = 11\n#### 11", 1),
        ("1. 5 + 6 = 11\n2. 5 + 6 = 11\n3. so 12\n#### 12", 2),
        ("1.\n2.\nStep 3:\n#### 12", 0),
        ("**Step 1:** Count\n- 3 x 4 = 12 in all\nThe answer is 12", 1),
        (r"There are 9. So 9 * 2 = \boxed{18}", 2),
        ("She has 9 hens that lay 2 each. That is 18", 1),
    ],
)
def test_reasoning_steps(text, steps):
    assert reasoning_steps(text) == steps


@pytest.mark.skipif("VERL_TEST_DATA" not in os.environ, reason="VERL_TEST_DATA names the folder of shared test data")
def test_steps_of_gold_solutions_are_their_lines():
    file = Path(os.environ["VERL_TEST_DATA"]) / "gsm8k/test_rows_0000_0659.jsonl"
    answers = [json.loads(line)["answer"] for line in file.open()]
    lines = statistics.fmean(answer.count("\n") for answer in answers)
    assert statistics.fmean(map(reasoning_steps, answers)) == pytest.approx(lines, rel=0.02)


def test_correctness_follows_acc_then_the_reward_and_never_a_failure():
    assert is_correct(trajectory(0, "", 0.1, parts={"acc": 1.0}))
    assert not is_correct(trajectory(0, "", 0.1, parts={"acc": 0.0}))
    assert is_correct(trajectory(0, "", 0.1, parts={}))
    assert not is_correct(trajectory(0, "", 0.0, parts={}))
    assert not is_correct(trajectory(0, "", 1.0, parts={}, failure="threw"))


def test_an_interval_of_counts_is_never_below_zero():
    answers = ["2 + 3 = 5\n#### 5", "#### 5", "#### 5", "#### 5"]
    summary = summarize("m", [trajectory(i, answer, 1.0) for i, answer in enumerate(answers)])
    assert summary.mean_reasoning_steps == 0.25
    assert summary.reasoning_steps_interval[0] == 0.0 < summary.reasoning_steps_interval[1]


def test_summary_by_hand():
    trajectories = [
        trajectory(0, "2 + 3 = 5\n#### 5", 1.0, tokens=10),
        trajectory(1, "so 2 + 3 = 6\n1 + 5 = 6\n#### 6", 0.0, tokens=20),
        trajectory(2, "2 + 3 is 5", 1.0, tokens=6),
        trajectory(3, "#### 5", 1.0, finish="length", tokens=64),
    ]
    summary = summarize("m", trajectories)
    assert (summary.n, summary.num_samples, summary.accuracy, summary.completeness) == (4, 4, 0.75, 0.5)
    assert summary.accuracy_interval == pytest.approx(wilson_interval(0.75, 4))
    assert summary.completeness_interval == pytest.approx(wilson_interval(0.5, 4))
    # In the third, "2 + 3 is" lies before the answer.
    assert [reasoning_steps(t.response_text) for t in trajectories] == [1, 2, 1, 0]
    assert summary.mean_reasoning_steps == 1.0 and summary.mean_length == 25.0 and summary.mean_reward == 0.75
    assert summary.truncated == 0.25 and summary.failures == 0
    assert summary.pass_at_k == {} and summary.majority is None
    assert summary.metrics("val") == {
        **{"val/accuracy": 0.75, "val/reward": 0.75, "val/response_length": 25.0, "val/truncated": 0.25},
        **{"val/completeness": 0.5, "val/reasoning_steps": 1.0},
    }


def test_summary_of_several_samples():
    rewards = {0: (1, 1, 1, 1), 1: (1, 0, 0, 0), 2: (0, 0, 0, 0)}
    trajectories = [
        trajectory(g, f"#### {5 if r else 6 + i}", float(r), sample=i) for g, rs in rewards.items() for i, r in enumerate(rs)
    ]
    summary = summarize("m", trajectories)
    assert (summary.n, summary.num_samples) == (3, 12)
    assert summary.accuracy == pytest.approx((1 + 1 / 4 + 0) / 3)
    assert summary.pass_at_k == {1: pytest.approx(5 / 12), 2: pytest.approx(1.5 / 3), 4: pytest.approx(2 / 3)}
    assert summary.majority == pytest.approx((1 + 1 / 4 + 0) / 3), "four different answers tie, one of them right"
    assert {"val/pass@2", "val/pass@4", "val/maj@4"} < set(summary.metrics("val"))
    assert summarize("m", trajectories[::-1]) == summary, "the order of the samples does not matter"


def test_what_cannot_be_summarised():
    with pytest.raises(ValueError, match="no trajectories"):
        summarize("m", [])
    with pytest.raises(ValueError, match="rows:0 has no reward yet"):
        summarize("m", [trajectory(0, "x", None, parts={})])


def summaries():
    base = [trajectory(g, "so 5", float(g % 3 == 0), finish="length", tokens=512) for g in range(100)]
    tuned = [trajectory(g, f"2 + {i} = 5\n#### 5", float(g % 5 > 0), sample=i) for g in range(100) for i in range(16)]
    return [summarize("a/very/long/path/to/checkpoints/base", base), summarize("RL|final", tuned)]


def test_table_fits_a_terminal_and_holds_the_numbers():
    lines = comparison_table(summaries()).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["model", "accuracy", "%", "steps", "complete", "%", "tokens", "reward"]
    assert lines[2].split() == ["…/checkpoints/base", "34.0", "0.0", "0.0", "512", "0.340"]
    assert "[25.5, 43.7]" in lines[3] and lines[3].startswith("n=100 ")
    assert lines[4].split() == ["RL|final", "80.0", "1.0", "100.0", "10", "0.800"]
    assert lines[5].startswith("n=100×16 ")
    assert any("pass@16 80.0 %" in line for line in lines) and any("maj@16 80.0 %" in line for line in lines)


def test_markdown_is_one_regular_table():
    rows = comparison_markdown(summaries()).splitlines()
    columns = {row.replace("\\|", "").count("|") for row in rows}
    assert len(rows) == 4 and columns == {9}
    assert "34.0 [25.5, 43.7]" in rows[2] and "RL\\|final" in rows[3] and "maj@16 80.0 %" in rows[3]
    one = comparison_markdown([summarize("x", [trajectory(0, "#### 5", 1.0)])]).splitlines()
    assert "several samples" not in one[0] and "| 0.0 |" in one[2]


def test_panels_are_what_the_plot_draws(tmp_path):
    from verl.observe.plots import plot_comparison

    panels = comparison_panels(summaries())
    accuracy = panels["accuracy, %"][0]
    assert (round(accuracy.low, 1), round(accuracy.value, 1), round(accuracy.high, 1)) == (25.5, 34.0, 43.7)
    assert plot_comparison(tmp_path / "c.png", panels).stat().st_size > 1000


def test_a_summary_is_plain_json():
    text = json.dumps([asdict(s) for s in summaries()], allow_nan=False)
    assert math.isclose(json.loads(text)[0]["accuracy"], 0.34)
