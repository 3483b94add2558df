"""Prompt data sets: rows of any known layout as `Prompt`s, and their tokens.

Two layouts are understood without settings: upstream's (`data_source`, `prompt` as a list of messages,
`ability`, `reward_model.ground_truth`, `extra_info`) and plain ones (`prompt`, `question` or `problem` as
text; `answer` or `solution`). `data.prompt_key` and `data.answer_key` name other columns. Whatever else a
row holds reaches the reward under its own name in `Prompt.extra`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from verl.config.schema import DataConfig, ModelConfig
from verl.data.chat import Tools, encode_prompts, plain_text_prompt, raw_text
from verl.data.rows import FIELDS, Row, Rows, Split, load_rows
from verl.data.types import EncodedPrompt, Message, Prompt
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("verl.data")

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "solution")
LENGTH_CHUNK = 1024
"""Prompts tokenised at once to learn their lengths: enough to keep all threads of a fast tokenizer busy."""

_FINAL_NUMBER = re.compile(r"####\s*\$?(-?[\d.,]*\d)[^\d\n]*\Z")


def final_number(text: str) -> str | None:
    """N of a text that ends in `#### N` (GSM8K's convention, Cobbe et al. 2021), thousands separators removed; else None."""
    match = _FINAL_NUMBER.search(text.rstrip())
    return match[1].replace(",", "") if match else None


def lookup(row: Row, key: str) -> Any:
    """`row[key]`, where a dot steps into a nested object (`reward_model.ground_truth`); None when it is not there."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def find_column(row: Row, wanted: str | None, usual: Sequence[str], setting: str, where: str) -> str:
    """The column to read: `wanted` if set, else the first of `usual` that the row has.

    Raises:
        DataError: there is none; names the columns there are and the setting to use.
    """
    names = [wanted] if wanted else usual
    for name in names:
        if lookup(row, name) is not None:
            return name
    missing = " or ".join(repr(name) for name in names)
    raise DataError(f"{where}: no column {missing}; the row has {', '.join(row) or 'none'}; set {setting}")


def as_messages(value: Any, column: str, where: str) -> tuple[Message, ...]:
    """A chat out of a data file, checked. Keys that Arrow fills with null for want of a value are left out."""
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {column}[{i}] must be an object with role and content, got {_short(message)}")
        kept = {key: item for key, item in message.items() if item is not None or key == "content"}
        if kept.get("content") is None and "tool_calls" not in kept:
            raise DataError(f"{where}: {column}[{i}] ({message['role']}) has no content")
        messages.append(kept)
    if not messages:
        raise DataError(f"{where}: {column} has no messages")
    return tuple(messages)


def prompt_of(row: Row, column: str, data: DataConfig, where: str) -> tuple[tuple[Message, ...], str | None]:
    """(messages, raw text or None) of a row's prompt column, system prompt and instruction added to plain text."""
    value = lookup(row, column)
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: column {column!r} is empty")
        return plain_text_prompt(value, data)
    if isinstance(value, list | tuple):
        messages = as_messages(value, column, where)
        return messages, None if data.apply_chat_template else raw_text(messages, where)
    raise DataError(f"{where}: column {column!r} must be text or a list of messages, got {_short(value)}")


def make_prompt(row: Row, *, uid: str, where: str, data: DataConfig) -> Prompt:
    """A data row as a `Prompt`. `where` (file:line) begins every error.

    The ground truth of an answer that ends in `#### N` is N; the whole answer stays in `extra`.
    """
    column = find_column(row, data.prompt_key, PROMPT_COLUMNS, "data.prompt_key", where)
    messages, text = prompt_of(row, column, data, where)
    ground_truth = None
    if data.answer_key or any(lookup(row, name) is not None for name in ANSWER_COLUMNS):
        answer_column = find_column(row, data.answer_key, ANSWER_COLUMNS, "data.answer_key", where)
        ground_truth = lookup(row, answer_column)
        if isinstance(ground_truth, str):
            ground_truth = final_number(ground_truth) or ground_truth
    return Prompt(
        uid=uid,
        messages=messages,
        raw_text=text,
        text=value if isinstance(value := lookup(row, column), str) else None,
        data_source=str(row.get("data_source") or ""),
        ground_truth=ground_truth,
        ability=str(row.get("ability") or ""),
        extra={name: value for name, value in row.items() if name not in (column, "data_source", "ability")},
    )


class PromptView(Sequence[Prompt]):
    """The prompts of a data set without their tokens: what reward checks and reports read."""

    def __init__(self, dataset: PromptDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._dataset.prompt(i) for i in range(*index.indices(len(self)))]
        return self._dataset.prompt(index)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptDataset(Sequence[EncodedPrompt]):
    """Prompts with their tokens. Rows are decoded and tokenised when asked for, so that memory stays that of the files."""

    rows: Rows
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    model: ModelConfig
    split: Split = "train"
    tools: Tools | None = None
    """Shown to the model by the chat template."""
    indices: np.ndarray
    """[N] which rows are in the set."""
    lengths: np.ndarray | None = None
    """[N] tokens of each prompt; None before `filter_overlong`."""
    num_dropped: int = 0
    """Rows that `filter_overlong` took out."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> EncodedPrompt:  # type: ignore[override]
        prompt = self.prompt(index)
        (ids,) = encode_prompts(self.tokenizer, [prompt], model=self.model, tools=self.tools)
        return EncodedPrompt(prompt=prompt, token_ids=tuple(ids))

    def __iter__(self) -> Iterator[EncodedPrompt]:
        return (self[i] for i in range(len(self)))

    def batch(self, indices: Sequence[int]) -> list[EncodedPrompt]:
        """Several prompts, tokenised in one call."""
        prompts = [self.prompt(i) for i in indices]
        encoded = encode_prompts(self.tokenizer, prompts, model=self.model, tools=self.tools)
        return [EncodedPrompt(prompt=p, token_ids=tuple(ids)) for p, ids in zip(prompts, encoded, strict=True)]

    def prompt(self, index: int) -> Prompt:
        """The prompt without its tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        row = int(self.indices[index])
        return make_prompt(self.rows[row], uid=self.rows.uid(row), where=self.rows.where(row), data=self.data)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts without their tokens, made as they are read."""
        return PromptView(self)


def filter_overlong(dataset: PromptDataset) -> PromptDataset:
    """The prompts of at most `data.max_prompt_length` tokens; says how many were dropped.

    Every row is read, checked and tokenised once; only lengths are kept.

    Raises:
        DataError: a row is unusable; none is left; or one is too long and `data.filter_overlong_prompts` is false.
    """
    limit = dataset.data.max_prompt_length
    lengths = np.zeros(len(dataset), dtype=np.int32)
    for start in range(0, len(dataset), LENGTH_CHUNK):
        chunk = [dataset.prompt(i) for i in range(start, min(start + LENGTH_CHUNK, len(dataset)))]
        ids = encode_prompts(dataset.tokenizer, chunk, model=dataset.model, tools=dataset.tools)
        lengths[start : start + len(chunk)] = [len(tokens) for tokens in ids]
    kept = keep_short(lengths, limit, dataset.rows, dataset.data, dataset.split, what="prompts", setting="data.max_prompt_length")
    return PromptDataset(
        rows=dataset.rows,
        tokenizer=dataset.tokenizer,
        data=dataset.data,
        model=dataset.model,
        split=dataset.split,
        tools=dataset.tools,
        indices=dataset.indices[kept],
        lengths=lengths[kept],
        num_dropped=len(lengths) - len(kept),
    )


def keep_short(
    lengths: np.ndarray, limit: int, rows: Rows, data: DataConfig, split: Split, *, what: str, setting: str
) -> np.ndarray:
    """[K] positions in `lengths` [N] of at most `limit` tokens; the rest is counted aloud, or an error."""
    kept = np.flatnonzero(lengths <= limit)
    dropped = len(lengths) - len(kept)
    if not dropped:
        return kept
    longest = int(lengths.argmax())
    counted = f"{FIELDS[split]}: {dropped} of {len(lengths)} {what} are over {setting}={limit} tokens"
    if not data.filter_overlong_prompts:
        raise DataError(
            f"{counted} (longest {lengths[longest]}: {rows.where(longest)}); raise {setting}, "
            "or set data.filter_overlong_prompts=true to drop them"
        )
    if not len(kept):
        raise DataError(f"{counted}, so none is left (shortest {lengths.min()}); raise {setting}")
    # A warning reaches the terminal under Python's default logging, and files where a program has set some up.
    logger.warning("%s and were dropped (longest %d)", counted, lengths[longest])
    return kept


def load_prompt_dataset(
    files: Sequence[str],
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    *,
    tools: Tools | None = None,
) -> PromptDataset:
    """The usable prompts of `files`, every row checked, over-long ones filtered and counted.

    `split` ("train" or "test") picks the file in a folder and says whether `max_train_rows` or `max_val_rows` applies.

    Raises:
        DataError: file, column or row that cannot be used, in one line; nothing is left.
    """
    max_rows = data.max_train_rows if split == "train" else data.max_val_rows
    rows = load_rows(files, split=split, max_rows=max_rows)
    dataset = PromptDataset(
        rows=rows, tokenizer=tokenizer, data=data, model=model, split=split, tools=tools, indices=np.arange(len(rows))
    )
    return filter_overlong(dataset)


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
