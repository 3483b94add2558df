"""Stop strings, found on the host in a bounded window of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARGIN = 4
"""Tokens decoded beyond what a stop string can span: some tokenizers drop the leading space of what they decode."""


class StopStrings:
    """Does the text of a growing token sequence contain one of `stops`?

    A byte-level token is at least one byte, so the tokens that touch a stop string's end and beginning are among the
    last `len(bytes)`; only these are decoded, once a token.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = max(len(s.encode()) for s in stops) + _MARGIN

    def hit(self, token_ids: Sequence[int]) -> bool:
        """Call after each token; True once the newest token completes a stop string."""
        window = list(token_ids[-self._window :])
        text = self._tokenizer.decode(window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stops)
