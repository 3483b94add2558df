"""Final answers: what is found, what is equal, and what is never right by accident."""

import json
import os
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from verl.errors import UserError
from verl.rewards.accuracy import compute_score
from verl.rewards.math_answers import extract_answer, numbers_equal, parse_ground_truth, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", "72"),
        ("The answer is 70.\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### 1,234,567.5", "1234567.5"),
        ("#### $5.00", "5"),
        ("#### −7", "-7"),
        ("#### -$3.50", "-3.5"),
        ("#### $-3.50", "-3.5"),
        ("#### +72", "72"),
        ("#### 72.", "72"),
        ("#### .5", "0.5"),
        ("#### 3%", "3"),
        ("#### 1 234", "1234"),
        ("#### 1/2", "1/2"),
        ("#### 1 1/2", "3/2"),
        ("#### 007", "7"),
        ("####: 55", "55"),
        ("####72", "72"),
        ("#### 72 apples", "72"),
        ("#### 5 m^2", "5"),
        ("**#### 72**", "72"),
        ("#### 72<|im_end|>", "72"),
        ("#### 72\n\nWait, 80 left", "72"),
        ("#### 72\nso again\n#### 72.0", "72"),
        (r"#### \boxed{72}", "72"),
        (r"so \boxed{\$1{,}234}", "1234"),
        (r"so \boxed{11,\! 111}", "11111"),
        (r"so \fbox{7}", "7"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4"),
        (r"\boxed{1\frac12}", "3/2"),
        (r"\boxed{25\%}", "25"),
        (r"\boxed{45^\circ}", "45"),
        (r"\boxed{12 \text{ cm}^2}", "12"),
        (r"\boxed{x = 5}", "5"),
        ("<think>#### 9</think>\n#### 8", "8"),
    ],
)
def test_strict_and_flexible_read_a_marked_answer(text, value):
    for answer_format in ("strict", "flexible"):
        assert extract_answer(text, answer_format).value == Fraction(value), answer_format


@pytest.mark.parametrize(
    ("text", "value", "form"),
    [
        ("The answer is 72", "72", "statement"),
        ("The final answer is $1,000. I hope it is correct.", "1000", "statement"),
        ("The answer to the question is 18.", "18", "statement"),
        ("The answer is that she has 18 eggs.", "18", "statement"),
        ("The answer is 18 dollars per day for 7 days.", "18", "statement"),
        ("the answer is 9*2 = $18 per day", "18", "statement"),
        ("**Answer:** 9 of 12 eggs", "9", "statement"),
        ("Answer:\n18", "18", "statement"),
        ("She sells 9.\nA: 18", "18", "statement"),
        ("The answer is 5. No, the answer is 6. Is the answer right?", "6", "statement"),
        ("#### The answer is 72", "72", "statement"),
        ("#### 1. First step\nthe answer is 18", "18", "statement"),
        ("#### Step 2: add 3\nso 18 remain", "18", "last_number"),
        ("16 - 3 - 4 = 9, and 9 * 2 = $18.", "18", "last_number"),
        ("It falls to -5", "-5", "last_number"),
        (r"which is \frac{1}{3}", "1/3", "last_number"),
        ("她有 5 个，一共有13只鸟。", "13", "last_number"),
    ],
)
def test_only_flexible_reads_an_unmarked_answer(text, value, form):
    found = extract_answer(text)
    assert (found.value, found.form) == (Fraction(value), form)
    assert extract_answer(text, "strict").value is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#### ",
        "#### seventy-two",
        "#### 5 or 6",
        "#### 5 or six",
        "#### 5, 6",
        "#### 9 * 2 = 18",
        "#### 10^6",
        "#### 5k",
        "#### 1e5",
        "#### 1,5",
        "#### 12:30",
        r"\boxed{4\sqrt{2}}",
        r"\boxed{x + 5}",
        r"\boxed{x - 5}",
        r"\boxed{(5, 6)}",
        r"\boxed{5} and \boxed{6}",
        r"\boxed{5",
        "the answer is 5 or 6",
        "the answer is either 5 or 6 eggs",
        "the answer is x + 5",
        r"the answer is 4\sqrt{2}",
        "there are 5 or 6",
        "between 5 and 6",
        "she has 16 - 3",
        "16 - 3 =",
        "x - 5",
        "on 12/25/2020",
        "at 10:30",
        "<think> #### 5",
        "#### " + "9" * 5000,
    ],
)
def test_no_value_where_there_is_not_one_clear_number(text):
    assert extract_answer(text).value is None
    assert extract_answer(text, "strict").value is None


def test_marks_that_disagree_are_wrong_in_strict_and_the_last_counts_in_flexible():
    for text in ("#### 5\nno\n#### 6", "\\boxed{5}\nno\n#### 6", "#### 5\nno\n\\boxed{6}"):
        assert extract_answer(text, "strict").value is None
        assert extract_answer(text, "flexible").value == 6


def test_start_is_where_the_answer_begins():
    assert extract_answer("ab #### 5").start == 3
    assert extract_answer(r"9 * 2 = \boxed{18}").start == 8
    assert extract_answer("so the answer is 5").start == 7
    assert extract_answer("so 5 eggs").start == 3
    assert extract_answer("nothing").start == len("nothing")


def test_stated_excludes_the_last_number():
    assert extract_answer("#### 5").stated and extract_answer("the answer is 5").stated
    assert not extract_answer("so 5 eggs").stated and not extract_answer("#### 5 or 6").stated


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("5", "5", True),
        ("1000001", "1000000", False),
        ("10000000000000000000000001", "10000000000000000000000000", False),
        ("14.666666666666666", "44/3", True),
        ("0.333", "1/3", False),
        ("0.5000004", "0.5", True),
        ("0.500001", "0.5", False),
        ("1000.999999", "1001", True),
        ("1000.99999", "1001", False),
        ("0.0000001", "0", False),
    ],
)
def test_tolerance(answer, gold, equal):
    assert numbers_equal(Fraction(answer), Fraction(gold)) is equal


@pytest.mark.parametrize(
    ("gold", "value"),
    [
        (18, "18"),
        (0.1, "1/10"),
        (np.float64(2.5), "5/2"),
        (np.array([7]), "7"),
        (Decimal("1.10"), "11/10"),
        ("1,234", "1234"),
        ("#### 18", "18"),
        ("9 * 2 = <<9*2=18>>18 dollars.\n#### 18", "18"),
        (r"so $\boxed{14{,}916}$ it is", "14916"),
        ("3/4", "3/4"),
    ],
)
def test_ground_truth_forms(gold, value):
    assert parse_ground_truth(gold) == Fraction(value)


@pytest.mark.parametrize("gold", [None, "", "blue", "5 or 6", True, float("nan"), [1, 2], r"\sqrt{2}", "5 " + "a" * 300 + " 6"])
def test_a_ground_truth_that_is_no_number_is_the_users_to_mend(gold):
    with pytest.raises(UserError, match="is not a number"):
        parse_ground_truth(gold)


def test_parse_number_reads_one_number_only():
    assert parse_number("18 eggs.") == 18
    assert parse_number("5 = 5.0") == 5
    assert parse_number("3 and 4") is None and parse_number("none") is None


def test_accuracy_scores():
    args = ("openai/gsm8k", "9 * 2 = 18\n#### 18", "18")
    assert compute_score(*args) == {"score": 1.0, "acc": 1.0, "pred": "18"}
    assert compute_score("", "#### 0.75", "3/4", {})["pred"] == "3/4"
    wrong = {"format_score": 0.1, "answer_format": "flexible"}
    assert compute_score("", "#### 17", 18, None, **wrong) == {"score": 0.1, "acc": 0.0, "pred": "17"}
    assert compute_score("", "maybe 17", 18, None, **wrong)["score"] == 0.0, "a last number is not a stated answer"
    assert compute_score("", "#### 5 or 18", 18, None, **wrong) == {"score": 0.0, "acc": 0.0, "pred": ""}
    assert compute_score("", "the answer is 18", 18, answer_format="strict")["score"] == 0.0
    with pytest.raises(UserError, match="answer_format is 'loose'"):
        compute_score("", "5", 5, answer_format="loose")


@pytest.mark.parametrize(
    "unit",
    [
        *("1", "1,", "#### 1\n", "\\boxed{", "\\boxed{1}", "{", "answer ", "answer is ", "answer a a a a a a ", "answer: 1. "),
        *("A: 1\n", "\\frac{1", "1/", "1 or ", " -5", "$", "\\text{", "<think>", " ", "(\n", "1 000 ", "m^", "\\sqrt{1", "* "),
    ],
)
def test_time_is_linear_on_hostile_text(unit):
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        start = time.process_time()
        for answer_format in ("strict", "flexible"):
            extract_answer(text, answer_format)
            extract_answer(text + "x}", answer_format)
        return time.process_time() - start

    # 100 kB, read four times; a quadratic pattern takes minutes.
    assert seconds(100_000) < 10.0


needs_data = pytest.mark.skipif("VERL_TEST_DATA" not in os.environ, reason="VERL_TEST_DATA names the folder of shared test data")


@pytest.fixture
def data_folder() -> Path:
    return Path(os.environ["VERL_TEST_DATA"])


@needs_data
def test_agreement_with_published_verdicts(data_folder):
    rows = [json.loads(line) for line in (data_folder / "grading/math_grading_cases.jsonl").open()]
    agreed = {"model_output": 0, "unit": 0}
    missed = {"model_output": 0, "unit": 0}
    for row in rows:
        if row["answer_correct"] is None:
            continue
        try:
            gold = parse_ground_truth(row["gold"].strip().strip("$"))
        except UserError:
            continue
        value = extract_answer(row["prediction"]).value
        verdict = value is not None and numbers_equal(value, gold)
        assert row["answer_correct"] or not verdict, f"false accept: {row['id']}"
        (agreed if verdict == row["answer_correct"] else missed)[row["kind"]] += 1
    assert agreed["model_output"] >= 1618 and missed["model_output"] == 0
    assert agreed["unit"] >= 94 and missed["unit"] <= 5


@needs_data
def test_every_gold_solution_of_gsm8k_is_right(data_folder):
    rows = [json.loads(line) for line in (data_folder / "gsm8k/test_rows_0000_0659.jsonl").open()]
    assert len(rows) > 600
    for row in rows:
        gold = row["answer"].split("####")[1].strip()
        for answer_format in ("strict", "flexible"):
            assert compute_score("", row["answer"], gold, answer_format=answer_format)["acc"] == 1.0
