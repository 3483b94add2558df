"""What every rollout engine offers: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.data.types import Completion


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled."""

    max_tokens: int
    n: int = 1
    """Samples of this prompt; they share the prompt's key-value cache."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    seed: int | None = None
    """Sample i of the request draws from its own stream, derived from (seed, i): results do not depend on
    which other requests are in flight. None: derived from the engine's seed and the request's number."""
    stop: tuple[str, ...] = ()
    """Generation ends when the text contains one of these; the tokens that complete it are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends of sequence besides the tokenizer's."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end of sequence is sampled before this many tokens."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    request_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One new token of a running sample, for streaming callers."""

    request_id: int
    sample_index: int
    token_id: int
    logprob: float


class RolloutEngine(Protocol):
    """One model that generates. All token ids; text is the caller's affair (stop strings excepted)."""

    policy_version: int
    """Version of the weights now loaded; 0 for the initial ones."""
    needs_weights: bool
    """Whether `sleep` let go of the weights, so that `load_weights` has to come before the next generation."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Run requests to the end; completions ordered by request, then by sample index."""
        ...

    def stream(self, requests: Sequence[GenerationRequest], *, tokens: bool = False) -> Iterator[Completion | TokenEvent]:
        """Completions as they finish, in that order; with `tokens`, every token as well."""
        ...

    def cancel(self, request_id: int) -> None:
        """End a running request: its samples come back with what they have and finish_reason 'cancelled'."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights under Hugging Face names; caches made with older weights are dropped."""
        ...

    @property
    def weight_dtype(self) -> torch.dtype:
        """What `load_weights` takes without conversion."""
        ...

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights it generates with, whole, under Hugging Face names."""
        ...

    def sleep(self) -> None:
        """Free what generation needs on the device (cache, and weights that are the engine's own)."""
        ...

    def wake(self) -> None: ...
