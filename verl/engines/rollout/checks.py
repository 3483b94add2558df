"""Requests are checked before any work: one line that names the field, its value and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from verl.engines.rollout.base import GenerationRequest, SamplingParams
from verl.errors import UserError


def check_requests(requests: Sequence[GenerationRequest], *, max_model_len: int, vocab_size: int, has_tokenizer: bool) -> None:
    """Raise `UserError` for the first request that cannot be run."""
    seen: set[int] = set()
    for request in requests:
        name, ids, sampling = request.request_id, request.prompt_ids, request.sampling
        if name in seen:
            raise UserError(f"request_id={name} is used twice; give each request its own")
        seen.add(name)
        if not len(ids):
            raise UserError(
                f"request {name} has an empty prompt; give it one token at least, the beginning-of-sequence token say"
            )
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise UserError(
                f"request {name} holds token id {bad}, outside the model's vocabulary of {vocab_size}; check the tokenizer"
            )
        _check_sampling(sampling, name, vocab_size)
        if len(ids) + sampling.max_tokens > max_model_len:
            raise UserError(
                f"request {name}: prompt of {len(ids)} tokens plus max_tokens={sampling.max_tokens} exceeds "
                f"max_model_len={max_model_len}; shorten one of them or raise rollout.max_model_len"
            )
        if sampling.stop and not has_tokenizer:
            raise UserError(f"stop={list(sampling.stop)} needs a tokenizer; give the engine one or use stop_token_ids")


def _check_sampling(p: SamplingParams, name: int, vocab_size: int) -> None:
    rules = (
        (p.max_tokens >= 1, "max_tokens", p.max_tokens, "1 or more"),
        (p.n >= 1, "n", p.n, "1 or more"),
        (0 <= p.temperature < float("inf"), "temperature", p.temperature, "0 (greedy) or more"),
        (0 < p.top_p <= 1, "top_p", p.top_p, "above 0 and at most 1"),
        (p.top_k == -1 or p.top_k >= 1, "top_k", p.top_k, "-1 (off) or 1 or more"),
        (0 <= p.min_p <= 1, "min_p", p.min_p, "from 0 to 1"),
        (0 <= p.min_tokens <= p.max_tokens, "min_tokens", p.min_tokens, f"from 0 to max_tokens={p.max_tokens}"),
        (all(p.stop), "stop", list(p.stop), "non-empty strings"),
        (
            all(0 <= i < vocab_size for i in p.stop_token_ids),
            "stop_token_ids",
            list(p.stop_token_ids),
            f"ids from 0 to {vocab_size - 1}",
        ),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise UserError(f"request {name}: {field}={value} cannot work; use {allowed}")
