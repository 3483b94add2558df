"""Typed metrics: how two partial values merge is part of the metric, so ranks and micro-batches cannot get it wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
