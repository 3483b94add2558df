"""The reward `accuracy`: 1 for the right final number, else 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.rewards.math_answers import extract_answer, numbers_equal, parse_ground_truth


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    format_score: float = 0.0,
    answer_format: str = "flexible",
) -> dict[str, Any]:
    """Grade the final answer of a GSM8K-style problem.

    Args:
        data_source: unused; part of the signature every reward function has.
        solution_str: the whole response.
        ground_truth: a number, a text that is one, or a solution that ends in `#### N`.
        extra_info: unused.
        format_score: score of a wrong answer that is stated clearly: `#### N`, a box, or (flexible) "the answer is N".
        answer_format: `strict` or `flexible`, see `verl.rewards.math_answers`.

    Returns:
        `score`; `acc`, 1.0 or 0.0 whatever `format_score` is; `pred`, the number read as text ("18", "3/4") or "".

    Raises:
        UserError: the ground truth is not a number, or `answer_format` is unknown.
    """
    gold = parse_ground_truth(ground_truth)
    answer = extract_answer(solution_str, answer_format)
    correct = answer.value is not None and numbers_equal(answer.value, gold)
    score = 1.0 if correct else format_score if answer.stated else 0.0
    return {"score": score, "acc": float(correct), "pred": "" if answer.value is None else str(answer.value)}
