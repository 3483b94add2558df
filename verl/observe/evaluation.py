r"""What is measured on held-out problems, with intervals, and the table that sets models side by side.

Definitions, for scored trajectories of P prompts with one or more samples each:

- *accuracy*: the mean over prompts of the share of right samples. A sample is right when the reward function's part
  `acc` is above 0.5; where it gives no such part, when its reward is above 0; never when its scoring failed.
- *reasoning steps*: distinct lines or sentences before the final answer that hold a number and at least one letter or
  operator. A bare number, a list marker ("2.", "Step 3:") and a repetition are no steps; nor is the statement of the
  answer ("#### 18", "the answer is 18"), though a calculation in front of it is ("9 * 2 = \boxed{18}").
- *completeness*: the share of samples that ended by themselves and state a final answer: `#### N`, a box, or "the
  answer is N". A number that merely comes last does not count.
- *length*: response tokens. *reward*: as the trainer sees it, scale included.

Intervals are at 95 %. Samples of one prompt are not independent, so a share's interval is Wilson's (1927) at an
effective sample size n = p (1 - p) P / s², with s² the variance (ddof 0) of the prompts' means: P for one sample a
prompt, which is Wilson's own interval, and at most all samples. Where p is 0 or 1, n = P. The interval of a mean is
mean +- 1.96 s / sqrt(P) with s² the variance (ddof 1) of the prompts' means; there is none for one prompt.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl.data.types import Trajectory
from verl.rewards.math_answers import extract_answer

if TYPE_CHECKING:
    from verl.observe.plots import Bar

Z_95 = statistics.NormalDist().inv_cdf(0.975)
Interval = tuple[float, float]

_SEGMENT_END = re.compile(r"\n|[.!?;。](?=\s|$)")
_LIST_MARKER = re.compile(r"\s*(?:[-*•#>]{1,6}\s+)?(?:\**(?:step\s*)?\(?[0-9]{1,3}[.):]\**(?:\s|$))?", re.IGNORECASE)
_NOT_ALONE = re.compile(r"[^\W\d_]|[-+*/×÷=<>^]")


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """One model on one set of problems. Shares are between 0 and 1; see the top of this module for the definitions."""

    name: str
    n: int
    """Prompts."""
    num_samples: int
    """Answers in all."""
    accuracy: float
    accuracy_interval: Interval
    mean_reasoning_steps: float
    reasoning_steps_interval: Interval | None
    completeness: float
    completeness_interval: Interval
    mean_length: float
    """Tokens."""
    mean_reward: float
    truncated: float
    """Share of samples that ran into the length limit."""
    failures: int
    """Samples whose scoring failed."""
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    """k = 1, 2, 4, ... and n, where every prompt has the same number n > 1 of samples."""
    majority: float | None = None
    """maj@n, under the same condition."""

    def metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}/accuracy`, `reward`, `response_length`, `truncated`, `completeness`, `reasoning_steps`, `pass@k`, `maj@n`."""
        values = {
            "accuracy": self.accuracy,
            "reward": self.mean_reward,
            "response_length": self.mean_length,
            "truncated": self.truncated,
            "completeness": self.completeness,
            "reasoning_steps": self.mean_reasoning_steps,
            **{f"pass@{k}": value for k, value in self.pass_at_k.items() if k > 1},
        }
        if self.majority is not None:
            values[f"maj@{self.num_samples // self.n}"] = self.majority
        return {f"{prefix}/{name}": value for name, value in values.items()}


def summarize(name: str, trajectories: Sequence[Trajectory]) -> EvalSummary:
    """Measure scored trajectories; samples of one prompt share `prompt.uid` and `group_id`.

    Raises:
        ValueError: there are none, or one has no reward yet.
    """
    if not trajectories:
        raise ValueError("nothing to summarise: no trajectories")
    groups: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault((trajectory.prompt.uid, trajectory.group_id), []).append(trajectory)
    samples = list(groups.values())

    accuracy, accuracy_interval = clustered_share(_by_group(samples, is_correct))
    completeness, completeness_interval = clustered_share(_by_group(samples, is_complete))
    steps, steps_interval = clustered_mean(_by_group(samples, lambda t: reasoning_steps(t.response_text)))
    if steps_interval is not None:
        steps_interval = max(0.0, steps_interval[0]), steps_interval[1]  # a count
    sizes = {len(group) for group in samples}
    size = sizes.pop() if len(sizes) == 1 else 1
    return EvalSummary(
        name=name,
        n=len(samples),
        num_samples=len(trajectories),
        accuracy=accuracy,
        accuracy_interval=accuracy_interval,
        mean_reasoning_steps=steps,
        reasoning_steps_interval=steps_interval,
        completeness=completeness,
        completeness_interval=completeness_interval,
        mean_length=clustered_mean(_by_group(samples, lambda t: t.response_length))[0],
        mean_reward=clustered_mean(_by_group(samples, _reward))[0],
        truncated=clustered_share(_by_group(samples, lambda t: t.finish_reason == "length"))[0],
        failures=sum(t.reward_failure is not None for t in trajectories),
        pass_at_k=_pass_at_powers(samples, size) if size > 1 else {},
        majority=statistics.fmean(majority_correct(group) for group in samples) if size > 1 else None,
    )


def is_correct(trajectory: Trajectory) -> bool:
    """Right by the reward function's own `acc`, else by a reward above 0."""
    if trajectory.reward_failure is not None:
        return False
    if "acc" in trajectory.reward_parts:
        return trajectory.reward_parts["acc"] > 0.5
    return _reward(trajectory) > 0


def is_complete(trajectory: Trajectory) -> bool:
    """It ended by itself and states a final answer."""
    return trajectory.finish_reason == "stop" and extract_answer(trajectory.response_text).stated


def reasoning_steps(text: str) -> int:
    """Distinct lines or sentences of a response that reason with numbers; see the top of this module."""
    before = text[: extract_answer(text).start]
    steps = set()
    for segment in _SEGMENT_END.split(before):
        marker = _LIST_MARKER.match(segment)
        content = segment[marker.end() :] if marker else segment
        if any(c.isdigit() for c in content) and _NOT_ALONE.search(content):
            steps.add(" ".join(content.lower().split()))
    return len(steps)


def wilson_interval(share: float, n: float) -> Interval:
    """Wilson's 95 % score interval of a share measured on `n` independent trials (`n` may be an effective, broken number)."""
    z2 = Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At the ends the formula gives the end itself, were it not for rounding.
    return 0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half)


def clustered_share(groups: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Mean over groups of their mean, for values between 0 and 1, and its interval; see the top of this module."""
    means = [statistics.fmean(group) for group in groups]
    share = statistics.fmean(means)
    n = float(len(groups))
    if 0 < share < 1:
        variance = statistics.pvariance(means, share)
        independent = float(sum(map(len, groups)))
        n = min(independent, share * (1 - share) * n / variance) if variance > 0 else independent
    return share, wilson_interval(share, n)


def clustered_mean(groups: Sequence[Sequence[float]]) -> tuple[float, Interval | None]:
    """Mean over groups of their mean, and its interval; None for a single group."""
    means = [statistics.fmean(group) for group in groups]
    mean = statistics.fmean(means)
    if len(means) < 2:
        return mean, None
    half = Z_95 * statistics.stdev(means) / math.sqrt(len(means))
    return mean, (mean - half, mean + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of `k` of the samples is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: `k` is not between 1 and `num_samples`.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_correct(group: Sequence[Trajectory]) -> float:
    """Whether the most frequent answer of the samples is right; a tie counts as the share of right answers among the tied.

    Answers are equal as numbers. Samples without one do not vote; 0 when none votes.
    """
    votes: dict[str, list[bool]] = {}
    for trajectory in group:
        value = extract_answer(trajectory.response_text).value
        if value is not None:
            votes.setdefault(str(value), []).append(is_correct(trajectory))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return statistics.fmean(float(answers[0]) for answers in votes.values() if len(answers) == most)


def comparison_table(summaries: Sequence[EvalSummary]) -> str:
    """Models side by side for a terminal, at most 80 columns; 95 % intervals stand below the values."""
    widths = (18, 14, 13, 14, 7, 8)
    lines = [_row(("model", "accuracy %", "steps", "complete %", "tokens", "reward"), widths)]
    lines.append("─" * len(lines[0]))
    for s in summaries:
        name = s.name if len(s.name) <= widths[0] else "…" + s.name[1 - widths[0] :]
        values = (f"{100 * s.accuracy:.1f}", f"{s.mean_reasoning_steps:.1f}", f"{100 * s.completeness:.1f}")
        lines.append(_row((name, *values, f"{s.mean_length:.0f}", f"{s.mean_reward:.3f}"), widths))
        intervals = (_percent(s.accuracy_interval), _plain(s.reasoning_steps_interval), _percent(s.completeness_interval))
        lines.append(_row((_counts(s), *(f"[{text}]" if text else "" for text in intervals), "", ""), widths))
        if s.majority is not None:
            lines += _wrapped(_several(s), indent="  ", width=sum(widths))
    lines.append("[ ]: 95 % interval · steps: distinct lines or sentences that reason with numbers")
    lines.append("complete: ended by itself and states a final answer · n: problems×samples")
    return "\n".join(lines)


def comparison_markdown(summaries: Sequence[EvalSummary]) -> str:
    """The same table for a page; 95 % intervals in brackets."""
    several = any(s.majority is not None for s in summaries)
    header = ["model", "accuracy, %", "reasoning steps", "complete, %", "tokens", "reward", "problems"]
    rows = [header + ["several samples"] * several]
    rows.append(["---"] + ["---:"] * (len(header) - 1) + ["---"] * several)
    for s in summaries:
        row = [
            s.name.replace("|", "\\|"),
            f"{100 * s.accuracy:.1f} [{_percent(s.accuracy_interval)}]",
            f"{s.mean_reasoning_steps:.1f}" + (f" [{text}]" if (text := _plain(s.reasoning_steps_interval)) else ""),
            f"{100 * s.completeness:.1f} [{_percent(s.completeness_interval)}]",
            f"{s.mean_length:.0f}",
            f"{s.mean_reward:.3f}",
            _counts(s),
        ]
        rows.append(row + [", ".join(_several(s))] * several)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def comparison_panels(summaries: Sequence[EvalSummary]) -> dict[str, list[Bar]]:
    """The three measures with their intervals, as `verl.observe.plots.plot_comparison` draws them."""
    from verl.observe.plots import Bar

    def bars(
        value: Callable[[EvalSummary], float], interval: Callable[[EvalSummary], Interval | None], scale: float
    ) -> list[Bar]:
        bounds = [(value(s), interval(s) or (value(s), value(s))) for s in summaries]
        return [
            Bar(name=s.name, value=scale * middle, low=scale * low, high=scale * high)
            for s, (middle, (low, high)) in zip(summaries, bounds, strict=True)
        ]

    return {
        "accuracy, %": bars(lambda s: s.accuracy, lambda s: s.accuracy_interval, 100),
        "reasoning steps": bars(lambda s: s.mean_reasoning_steps, lambda s: s.reasoning_steps_interval, 1),
        "complete, %": bars(lambda s: s.completeness, lambda s: s.completeness_interval, 100),
    }


def _by_group(groups: Sequence[Sequence[Trajectory]], measure: Callable[[Trajectory], float]) -> list[list[float]]:
    return [[float(measure(trajectory)) for trajectory in group] for group in groups]


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.prompt.uid} has no reward yet; score it first")
    return trajectory.reward


def _pass_at_powers(groups: Sequence[Sequence[Trajectory]], size: int) -> dict[int, float]:
    ks = sorted({2**i for i in range(size.bit_length()) if 2**i <= size} | {size})
    correct = [sum(map(is_correct, group)) for group in groups]
    return {k: statistics.fmean(pass_at_k(size, c, k) for c in correct) for k in ks}


def _counts(s: EvalSummary) -> str:
    if s.num_samples % s.n:
        return f"n={s.n} ({s.num_samples})"
    return f"n={s.n}" if s.num_samples == s.n else f"n={s.n}×{s.num_samples // s.n}"


def _several(s: EvalSummary) -> list[str]:
    if s.majority is None:
        return []
    shares = [f"pass@{k} {100 * value:.1f} %" for k, value in s.pass_at_k.items()]
    return [*shares, f"maj@{s.num_samples // s.n} {100 * s.majority:.1f} %"]


def _percent(interval: Interval) -> str:
    return f"{100 * interval[0]:.1f}, {100 * interval[1]:.1f}"


def _plain(interval: Interval | None) -> str:
    return f"{interval[0]:.1f}, {interval[1]:.1f}" if interval else ""


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True)))
    return (first + "".join(rest)).rstrip()


def _wrapped(items: Iterable[str], *, indent: str, width: int) -> list[str]:
    lines = [indent]
    for item in items:
        if len(lines[-1]) + len(item) + 2 > width:
            lines.append(indent)
        lines[-1] += item + "  "
    return [line.rstrip() for line in lines]
