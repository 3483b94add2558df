"""What comes out of scoring one sample, and how a reward function's return value is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TAKEN_KEYS = frozenset(
    (
        *("mean", "std", "min", "max", "failures", "timeouts"),
        *("zero_std_groups", "kl_per_sequence", "kl_coef", "kl_penalty"),
    )
)
"""Names under `reward/` that the trainer's own metrics have."""

FailureKind = Literal["exception", "bad_result", "timeout", "died"]


@dataclass(frozen=True, kw_only=True)
class ScoreOutcome:
    """A score, or the reason why there is none."""

    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Every finite number of a dict result, by key, `score` included."""
    failure: str | None = None
    """One line; None when there is a score."""
    kind: FailureKind | None = None
    traceback: str | None = None
    """Of an exception in the function."""


def read_result(result: Any) -> ScoreOutcome:
    """A number (bool, NumPy and 0-d tensors included), or a mapping with a number under `score`; all else is a failure.

    None, NaN and infinity are failures too: taken as a reward, each would be a silent zero or spoil a whole batch.
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            return _bad(f"the function returned a dict without 'score', with {', '.join(map(str, result)) or 'nothing'}")
        if taken := sorted(TAKEN_KEYS & {str(key) for key in result}):
            return _bad(f"the function returned a dict with {taken[0]!r}, a name of the trainer's own metrics; rename it")
        numbers = {str(key): _number(value) for key, value in result.items()}
        parts = {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
        value, shown = numbers["score"], result["score"]
    else:
        parts, value, shown = {}, _number(result), result
    if value is None:
        text = " ".join(repr(shown).split())
        return _bad(f"the function returned {text[:60]} ({type(shown).__name__}), not a number")
    if not math.isfinite(value):
        return _bad(f"the function returned {value}")
    return ScoreOutcome(score=value, parts=parts)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):  # an array of several elements
        return None


def _bad(reason: str) -> ScoreOutcome:
    return ScoreOutcome(failure=reason, kind="bad_result")
