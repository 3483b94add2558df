"""Typed metrics: how two partial values merge is part of the metric, so ranks and micro-batches cannot get it wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Mean:
    """A ratio of sums: merging adds numerators and denominators, so unequal parts weigh what they should."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class Sum:
    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True)
class Min:
    value: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True)
class Last:
    """A reading (learning rate, KL coefficient): the newest stands; ranks agree by construction."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


Metric = Mean | Sum | Max | Min | Last
Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge partial metrics of micro-batches, mini-batches or ranks, in order."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


@dataclass(frozen=True)
class MetricInfo:
    """What a logged number means. `healthy` says what a run that goes well shows; empty where no range is meant."""

    unit: str
    meaning: str
    healthy: str = ""


ALIASES: dict[str, tuple[str, ...]] = {
    "episode_reward": ("reward/mean",),
    "kl_divergence": ("actor/policy_kl", "actor/approx_kl"),
    "response_length": ("response_length/mean",),
}
"""Short CSV columns, each with the metrics it is taken from: the first that a step has. The KL is how far the
step's updates moved the policy; that to the reference model has its own name, actor/ref_kl."""


METRICS: dict[str, MetricInfo] = {
    # Rewards and advantages
    "reward/mean": MetricInfo("reward", "mean reward of the step's trajectories", "rises"),
    "reward/std": MetricInfo("reward", "standard deviation of the rewards", "above 0, else there is nothing to learn"),
    "reward/min": MetricInfo("reward", "smallest reward of the step"),
    "reward/max": MetricInfo("reward", "largest reward of the step"),
    "reward/zero_std_groups": MetricInfo("share", "groups whose samples all got the same reward: no gradient", "< 0.8"),
    "reward/failures": MetricInfo("calls", "reward calls that raised, timed out or gave no number", "0"),
    "reward/timeouts": MetricInfo("calls", "reward calls killed at their deadline", "0"),
    "reward/kl_per_sequence": MetricInfo("nats", "KL of a whole response to the reference model, as the reward sees it", "< 10"),
    "reward/kl_penalty": MetricInfo("reward", "mean KL penalty taken from a trajectory's reward", "small beside reward/std"),
    "reward/kl_coef": MetricInfo("-", "coefficient of the KL in the reward"),
    "reward/*": MetricInfo("reward", "mean of one part of the reward, by its name"),
    "advantages/mean": MetricInfo("-", "mean advantage of trained tokens", "near 0"),
    "advantages/max": MetricInfo("-", "largest advantage", "< 10"),
    "advantages/min": MetricInfo("-", "smallest advantage", "> -10"),
    "advantages/std": MetricInfo("-", "standard deviation of the advantages of trained tokens"),
    "returns/*": MetricInfo("reward", "mean, max or min target of the value function"),
    # Policy
    "actor/pg_loss": MetricInfo("-", "clipped policy-gradient loss", "near 0; its trend says little"),
    "actor/loss": MetricInfo("-", "the policy's whole loss, KL and entropy terms included"),
    "actor/ratio_mean": MetricInfo("ratio", "mean of new over old probability of trained tokens", "0.95 to 1.05"),
    "actor/ratio_max": MetricInfo("ratio", "largest ratio of new to old probability", "< 10"),
    "actor/ratio_min": MetricInfo("ratio", "smallest ratio of new to old probability", "> 0.1"),
    "actor/clip_fraction": MetricInfo("share", "trained tokens whose ratio was clipped", "< 0.2"),
    "actor/clip_fraction_low": MetricInfo("share", "trained tokens clipped from below", "< 0.1"),
    "actor/clip_fraction_high": MetricInfo("share", "trained tokens clipped from above", "< 0.1"),
    "actor/dual_clip_fraction": MetricInfo("share", "trained tokens held by the dual clip", "< 0.01"),
    "actor/policy_kl": MetricInfo("nats/token", "KL (k3) of the policy before the step to the one after it", "< 0.02"),
    "actor/approx_kl": MetricInfo("nats/token", "the same as seen inside the updates; 0 in the first", "< 0.02"),
    "actor/ref_kl": MetricInfo("nats/token", "KL from the policy to the reference model", "< 0.1; slow growth"),
    "actor/kl_loss": MetricInfo("nats/token", "KL term of the loss, before its coefficient", "< 0.1; slow growth"),
    "actor/entropy": MetricInfo("nats/token", "entropy of the sampling distribution at trained tokens", "falls slowly, not to 0"),
    "actor/entropy_estimate": MetricInfo("nats/token", "mean -log-prob of the sampled tokens", "falls slowly, not to 0"),
    "actor/grad_norm": MetricInfo("-", "global gradient norm before clipping", "steady; spikes < 10 times the median"),
    "actor/lr": MetricInfo("1/step", "learning rate"),
    "actor/skipped_steps": MetricInfo("steps", "optimizer steps skipped because a gradient was not finite", "0"),
    # Critic
    "critic/vf_loss": MetricInfo("reward^2", "clipped value loss", "falls, then steady"),
    "critic/clip_fraction": MetricInfo("share", "values held by value clipping", "< 0.2"),
    "critic/explained_variance": MetricInfo("share", "variance of the returns that the critic explains", "rises towards 1"),
    "critic/values/*": MetricInfo("reward", "mean, max or min predicted value"),
    "critic/grad_norm": MetricInfo("-", "critic's global gradient norm before clipping", "steady"),
    "critic/lr": MetricInfo("1/step", "critic's learning rate"),
    "critic/skipped_steps": MetricInfo("steps", "critic steps skipped because a gradient was not finite", "0"),
    # Text
    "response_length/mean": MetricInfo("tokens", "mean length of a response", "steady or slow growth"),
    "response_length/max": MetricInfo("tokens", "longest response"),
    "response_length/min": MetricInfo("tokens", "shortest response", "> 1"),
    "response_length/clip_ratio": MetricInfo("share", "responses that ran into the length limit", "< 0.1"),
    "prompt_length/*": MetricInfo("tokens", "mean, max or min length of a prompt"),
    # Progress and speed
    "training/epoch": MetricInfo("epochs", "passes over the data so far"),
    "training/policy_version": MetricInfo("versions", "updates of the policy that the rollout engine has been given"),
    "perf/tokens_per_s": MetricInfo("tokens/s", "prompt and response tokens of the step over its time", "steady"),
    "perf/total_num_tokens": MetricInfo("tokens", "prompt and response tokens of the step"),
    "timing_s/step": MetricInfo("s", "the whole step", "steady"),
    "timing_s/*": MetricInfo("s", "one stage of the step, by its name"),
    # Held-out data
    "val/accuracy": MetricInfo("share", "held-out answers that are right", "rises"),
    "val/reward": MetricInfo("reward", "mean reward of held-out answers", "rises with reward/mean"),
    "val/response_length": MetricInfo("tokens", "mean length of a held-out answer"),
    "val/truncated": MetricInfo("share", "held-out answers that ran into the length limit", "< 0.1"),
    "val/loss": MetricInfo("nats/token", "negative log-likelihood of held-out answers (fine-tuning)", "falls, then levels off"),
    "val/*": MetricInfo("-", "a measure of held-out answers, by its name (per data source where there are several)"),
    # Supervised fine-tuning
    "sft/loss": MetricInfo("nats/token", "negative log-likelihood of the trained tokens", "falls"),
    "sft/grad_norm": MetricInfo("-", "global gradient norm before clipping", "steady"),
    "sft/lr": MetricInfo("1/step", "learning rate"),
    "sft/skipped_steps": MetricInfo("steps", "optimizer steps skipped because a gradient was not finite", "0"),
}
"""Every name that the code may log. `*` stands for the rest of a name; an exact entry wins over a pattern."""


def metric_info(name: str) -> MetricInfo | None:
    """The table's entry for a logged name or a CSV alias; None when the name is unknown."""
    if name in ALIASES:
        return METRICS[ALIASES[name][0]]
    if name in METRICS:
        return METRICS[name]
    return next((info for pattern, info in METRICS.items() if "*" in pattern and fnmatchcase(name, pattern)), None)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Names that the table lacks: tests of a training step assert that there are none."""
    return sorted(name for name in names if metric_info(name) is None)


def alias_values(values: Mapping[str, float]) -> dict[str, float]:
    """The guide's columns (`episode_reward`, `kl_divergence`, `response_length`) that these values can fill."""
    found = {alias: next((values[name] for name in names if name in values), None) for alias, names in ALIASES.items()}
    return {alias: value for alias, value in found.items() if value is not None}
