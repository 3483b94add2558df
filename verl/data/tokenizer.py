"""Loading the tokenizer a model was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.schema import ModelConfig
from verl.data.hub import hub_reachable, looks_like_path
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
"""What models use for padding, tried in this order when a tokenizer names none."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer_path`, else of `model.path`, with `model.chat_template` in force.

    A tokenizer without a padding token gets one that it has in its vocabulary, preferably not the end of
    sequence. Which one hardly matters: TokenBatch has no padding, and nothing in this project compares
    token ids with it (loss masks are recorded when tokens are made), so eos keeps its meaning either way.

    Raises:
        UserError: the folder, the tokenizer in it, or the template file is not there.
    """
    from transformers import AutoTokenizer

    field = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    name = model.tokenizer_path or model.path
    if not name:
        raise UserError("model.path is empty; set it to a Hugging Face folder or a hub id")
    local = looks_like_path(name)
    if local:
        name = str(Path(name).expanduser())
        if not Path(name).is_dir():
            raise UserError(f"{field}={name}: no such folder; set it to a Hugging Face folder or a hub id")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=model.trust_remote_code, local_files_only=local or not hub_reachable()
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if local:
            fix = "it needs tokenizer.json or the files of a slow tokenizer; set model.tokenizer_path to a folder that has them"
        elif not hub_reachable():
            fix = "the hub cannot be reached and the model is not in the local cache; give a local folder"
        else:
            fix = f"the hub has no such tokenizer, or not for you ({_first_line(error)}); give a local folder"
        raise UserError(f"{field}={name}: no tokenizer found; {fix}") from error
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
    if tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        spare = [token for token in PAD_TOKENS if token in vocabulary and token != tokenizer.eos_token]
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    return tokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template={path}: cannot be read ({_first_line(error)}); give a Jinja file") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
