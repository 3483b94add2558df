"""Supervised rows: dialogues or question-answer pairs as ids and loss masks, and batches of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.config.schema import DataConfig, ModelConfig
from verl.data.batch import TokenBatch
from verl.data.chat import SFTText, Tools, encode_sft_texts, split_dialogue
from verl.data.datasets import ANSWER_COLUMNS, PROMPT_COLUMNS, as_messages, find_column, keep_short, lookup, prompt_of
from verl.data.rows import Row, Rows, Split, load_rows
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("verl.data")

RESPONSE_COLUMNS = ("response", "completion", "extra_info.answer", *ANSWER_COLUMNS[1:])
"""Where the text to imitate is; `extra_info.answer` is the worked solution in upstream's layout."""


ENCODE_CHUNK = 512
"""Rows tokenised at once while they are checked."""


def sft_text(row: Row, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: ModelConfig, where: str) -> SFTText:
    """A row's text and what of it is trained on: `messages` with assistant turns, or a prompt column and a response column.

    The prompt is put as it is for RL (`data.system_prompt`, `data.instruction`, chat template or plain text), so that
    what was learnt here is what rollouts start from. `data.answer_key` names another response column.
    """
    column = data.prompt_key or ("messages" if row.get("messages") else None)
    if column and _is_dialogue(lookup(row, column)):
        messages = as_messages(lookup(row, column), column, where)
    else:
        column = find_column(row, data.prompt_key, PROMPT_COLUMNS, "data.prompt_key", where)
        answer_column = find_column(row, data.answer_key, RESPONSE_COLUMNS, "data.answer_key", where)
        response = _response_text(lookup(row, answer_column), answer_column, where)
        messages, text = prompt_of(row, column, data, where)
        if text is not None:
            return SFTText(pieces=[(text, False), (response, True)], plain=True)
        messages = (*messages, {"role": "assistant", "content": response})
    return split_dialogue(tokenizer, messages, model=model, tools=_tools(row.get("tools"), where), where=where)


def _tools(value: Any, where: str) -> Tools | None:
    """The column `tools`: schemas as objects, or as JSON text, which is how parquet files tend to hold them."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: column 'tools' is not JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{where}: column 'tools' must be a list of schemas, got {value!r:.60}")
    return value


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(m, dict) and m.get("role") == "assistant" for m in value)


def _response_text(value: Any, column: str, where: str) -> str:
    """The response as text; a list that holds one assistant message counts as its content."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = as_messages(value, column, where)[0]["content"]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: column {column!r} must be the text of the response, got {value!r:.60}")
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class SFTDataset(Sequence[tuple[list[int], list[bool]]]):
    """(ids, loss mask) of each row, made when asked for."""

    rows: Rows
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    model: ModelConfig
    indices: np.ndarray
    """[N] which rows are in the set."""
    lengths: np.ndarray
    """[N] tokens of each row."""
    num_dropped: int = 0
    """Rows over data.max_prompt_length + data.max_response_length tokens."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[list[int], list[bool]]:  # type: ignore[override]
        return self._encode([index])[0]

    def _encode(self, indices: Sequence[int]) -> list[tuple[list[int], list[bool]]]:
        texts = []
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            row = int(self.indices[index])
            where = self.rows.where(row)
            texts.append(sft_text(self.rows[row], tokenizer=self.tokenizer, data=self.data, model=self.model, where=where))
        return [(encoding.ids, encoding.loss_mask) for encoding in encode_sft_texts(self.tokenizer, texts)]

    def __iter__(self) -> Iterator[tuple[list[int], list[bool]]]:
        return (self[i] for i in range(len(self)))

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """Rows as a TokenBatch with the columns input_ids and loss_mask."""
        encoded = self._encode(indices)
        return TokenBatch(
            torch.tensor([0, *np.cumsum([len(ids) for ids, _ in encoded])]),
            input_ids=torch.tensor([i for ids, _ in encoded for i in ids]),
            loss_mask=torch.tensor([flag for _, mask in encoded for flag in mask]),
        )


def load_sft_dataset(
    files: Sequence[str], data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, split: Split = "train"
) -> SFTDataset:
    """The usable rows of `files`, each one encoded once to check it; over-long ones are dropped and counted.

    Raises:
        DataError: file, column or row that cannot be used; nothing is left.
    """
    rows = load_rows(files, split=split, max_rows=data.max_train_rows if split == "train" else data.max_val_rows)
    lengths: list[int] = []
    rewritten = 0
    for start in range(0, len(rows), ENCODE_CHUNK):
        texts = [
            sft_text(rows[i], tokenizer=tokenizer, data=data, model=model, where=rows.where(i))
            for i in range(start, min(start + ENCODE_CHUNK, len(rows)))
        ]
        rewritten += sum(text.skipped_turns > 0 for text in texts)
        lengths += [len(encoding.ids) for encoding in encode_sft_texts(tokenizer, texts)]
    if rewritten:
        logger.warning(
            "%d of %d dialogues have assistant turns that the chat template rewrites later on; those turns are not trained on",
            rewritten,
            len(rows),
        )
    limit = data.max_prompt_length + data.max_response_length
    setting = "data.max_prompt_length+data.max_response_length"
    token_counts = np.array(lengths, dtype=np.int32)
    kept = keep_short(token_counts, limit, rows, data, split, what="rows", setting=setting)
    return SFTDataset(
        rows=rows,
        tokenizer=tokenizer,
        data=data,
        model=model,
        indices=kept,
        lengths=token_counts[kept],
        num_dropped=len(rows) - len(kept),
    )
