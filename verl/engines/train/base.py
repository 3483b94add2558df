"""What every training engine offers, and what a loss is to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from verl.data.batch import TokenBatch
from verl.observe.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """What one forward pass says of a batch's tokens; every tensor is [T] fp32, aligned like the batch's columns."""

    logprobs: Tensor | None = None
    """log p(token | prefix) at the engine's temperature; None for a value model."""
    entropy: Tensor | None = None
    """Entropy in nats of the distribution each token was drawn from; only when asked for."""
    values: Tensor | None = None
    """Value of the state in which each token was chosen; only from a value model."""


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """A loss over one micro-batch, not yet normalised."""

    total: Tensor
    """Scalar with gradient: the sum over tokens (or sequences) of this micro-batch."""
    metrics: Metrics


class Loss(Protocol):
    """A sum and a count. The engine divides the sum by the *global* count once, so that micro-batching,
    packing and data parallelism cannot change the gradient."""

    prefix: ClassVar[str]
    """First part of the names of this loss's metrics and of its optimizer's: actor, critic, sft."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `ModelOutputs.entropy` has to be computed, with gradient."""
        ...

    def count(self, batch: TokenBatch) -> float:
        """What the sum is divided by, over a whole mini-batch: depends on masks alone, never on outputs."""
        ...

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult: ...


class TrainEngine(Protocol):
    """Forward, backward, optimizer step, export and state of one model."""

    device: torch.device

    def compute(self, batch: TokenBatch, *, entropy: bool = False, all_tokens: bool = False) -> ModelOutputs:
        """Without gradient: log-probs (and entropy) of a language model, or values of a value model, on the CPU.
        They are computed where `loss_mask` is True, or with `all_tokens` at every token that has a prefix; 0 elsewhere."""
        ...

    def forward_backward(self, batch: TokenBatch, loss: Loss, *, count: float | None = None, all_tokens: bool = False) -> Metrics:
        """Accumulate d(loss sum / count) over micro-batches. `count` defaults to `loss.count(batch)`;
        the driver passes the global one when the batch is one rank's share."""
        ...

    def optimizer_step(self) -> Metrics:
        """Clip, guard against non-finite gradients, step, advance the schedule, zero the gradients."""
        ...

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole and in `dtype`, under their Hugging Face names; a tensor is valid until the next is asked for.
        A collective operation where the model is on several ranks: each gets all of them."""
        ...

    def save(self, folder: Path) -> None:
        """Everything exact resume needs: master weights, optimizer, schedule."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A Hugging Face model folder (weights in the compute dtype, config, tokenizer)."""
        ...
