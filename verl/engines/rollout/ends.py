"""Which tokens end an answer."""

from __future__ import annotations

from typing import Any


def end_of_sequence_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """The ends of sequence of the model at `path`, by its generation config or else its config, and the tokenizer's."""
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # none there
        found = AutoConfig.from_pretrained(path).get_text_config().eos_token_id
    return merged_ids(found, tokenizer)


def merged_ids(found: int | list[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """`found` in a generation config (chat models have several), and the tokenizer's end of sequence; each once."""
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))
