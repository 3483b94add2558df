"""The rows that travel between data set, rollout, reward and trainer.

`Prompt` -> (rollout engine) -> `Completion` -> (environment) -> `Trajectory` -> (reward) -> `TokenBatch`.
Everything here is frozen: a stage returns new objects, it never edits the ones it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Message = Mapping[str, Any]
"""One chat turn: {"role": ..., "content": ...}."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt data set."""

    uid: str
    """Identifies the row for grouping and reports: `{file stem}:{row number}`."""
    messages: tuple[Message, ...]
    """What the policy sees, before the chat template."""
    raw_text: str | None = None
    """Set when the prompt is plain text to be tokenised as it is, without a chat template."""
    text: str | None = None
    """What the row says, where it says text and not messages."""
    data_source: str = ""
    ground_truth: Any = None
    ability: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every further column of the row, by name; `extra_info` of upstream's layout stays under that name."""

    @property
    def shown(self) -> str | list[dict[str, Any]]:
        """The prompt as files show it: text or messages."""
        return self.raw_text if self.raw_text is not None else [dict(message) for message in self.messages]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Tokens out of a rollout engine for one sample of one request."""

    request_id: int
    sample_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was sampled from (after temperature, top-p ...)."""
    finish_reason: FinishReason
    policy_versions: Sequence[int]
    """Version of the weights that produced each token."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError(
                f"a completion needs one log-prob and one version a token, got {len(self.token_ids)} tokens, "
                f"{len(self.logprobs)} log-probs, {len(self.policy_versions)} versions"
            )


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of tokens with one author: the model (trained on) or the environment (never trained on)."""

    token_ids: Sequence[int]
    is_model: bool
    logprobs: Sequence[float] = ()
    """Generator log-probs; one a token when `is_model`, empty otherwise."""
    policy_versions: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode, and, once scored, its reward."""

    prompt: Prompt
    prompt_ids: Sequence[int]
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    group_id: int
    """Samples of one prompt in one step share it."""
    sample_index: int
    """Which sample of its group this is."""
    response_text: str = ""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reward_failure: str | None = None
    """Why scoring failed (exception or deadline), if it did; the reward is then the configured fallback."""

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, the environment's included."""
        return sum(len(s.token_ids) for s in self.segments)

    def with_reward(self, reward: float, parts: Mapping[str, float] | None = None, failure: str | None = None) -> Trajectory:
        return replace(self, reward=reward, reward_parts=dict(parts or {}), reward_failure=failure)


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt and its tokens (chat template and generation prompt included): what the data loader yields."""

    prompt: Prompt
    token_ids: tuple[int, ...]
