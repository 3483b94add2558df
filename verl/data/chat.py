"""From messages to tokens: the prompt of a rollout, and the ids and loss mask of an SFT row.

Both come from one rendering of the chat template, so an SFT row begins with exactly the ids that the
model is given in a rollout. The loss mask follows from where the assistant's turns lie in the rendered
text, never from looking for ids or words in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

from verl.config.schema import DataConfig, ModelConfig
from verl.data.types import Message, Prompt
from verl.errors import DataError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools that a chat template shows to the model."""


def plain_text_prompt(text: str, data: DataConfig) -> tuple[tuple[Message, ...], str | None]:
    """(messages, raw text) of a prompt that is plain text: `data.instruction` after it, `data.system_prompt` before it.

    The raw text is None when a chat template will be applied. Without one the system prompt stands
    in front of the text, a blank line between.
    """
    if data.instruction:
        text = f"{text} {data.instruction}"
    messages: tuple[Message, ...] = ({"role": "user", "content": text},)
    if data.system_prompt:
        messages = ({"role": "system", "content": data.system_prompt}, *messages)
    return messages, None if data.apply_chat_template else raw_text(messages)


def raw_text(messages: Sequence[Message], where: str = "prompt") -> str:
    """What a base model is given for `messages`: their texts, a blank line between. A dialogue cannot be put so."""
    if any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: a dialogue needs a chat template; set data.apply_chat_template=true")
    return "\n\n".join(str(message["content"]) for message in messages)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt | str, *, data: DataConfig, model: ModelConfig, tools: Tools | None = None
) -> tuple[int, ...]:
    """Token ids the model is given for `prompt`: chat template and generation prompt included.

    A string is a plain-text prompt, `data`'s system prompt and instruction still to be put around it; a
    `Prompt` has them already. `Prompt.raw_text`, when set, is tokenised as it is, with the special tokens
    (bos) that the tokenizer adds to plain text.

    Raises:
        UserError: the tokenizer has no chat template.
        DataError: the template refuses these messages.
    """
    if isinstance(prompt, str):
        messages, text = plain_text_prompt(prompt, data)
        prompt = Prompt(uid="prompt", messages=messages, raw_text=text)
    return tuple(encode_prompts(tokenizer, [prompt], model=model, tools=tools)[0])


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, model: ModelConfig, tools: Tools | None = None
) -> list[list[int]]:
    """`encode_prompt` of many prompts at once, which is several times faster."""
    ids: list[list[int]] = [[] for _ in prompts]
    for raw in (False, True):
        chosen = [i for i, prompt in enumerate(prompts) if (prompt.raw_text is not None) == raw]
        texts = [prompt_text(tokenizer, prompts[i], model=model, tools=tools) for i in chosen]
        # A chat template writes its own bos.
        for i, encoded in zip(chosen, tokenize(tokenizer, texts, special_tokens=raw), strict=True):
            ids[i] = encoded
    return ids


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, model: ModelConfig, tools: Tools | None = None) -> str:
    """The text the model is given for `prompt`, special tokens of the chat template written out."""
    if prompt.raw_text is not None:
        return prompt.raw_text
    return render(tokenizer, prompt.messages, model=model, tools=tools, generation_prompt=True, where=prompt.uid)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special_tokens: bool = False) -> list[list[int]]:
    """Ids of each text. The tokenizer's warning about the model's length is off: callers check limits."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=special_tokens, return_attention_mask=False, verbose=False)["input_ids"]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    model: ModelConfig,
    tools: Tools | None = None,
    generation_prompt: bool = False,
    where: str = "prompt",
) -> str:
    """Text of `messages` under the tokenizer's chat template. `where` names the row in errors."""
    import jinja2

    if tokenizer.chat_template is None:
        raise UserError(
            "model.chat_template: the tokenizer has no chat template; set model.chat_template to a Jinja file, "
            "or data.apply_chat_template=false to give the prompts as plain text"
        )
    options = {} if model.enable_thinking is None else {"enable_thinking": model.enable_thinking}
    # Templates of models that see images read lists of typed parts; a plain string they refuse or pass over in silence.
    problem: Exception | None = None
    lost = ""
    for chat in ([dict(message) for message in messages], [_with_parts(message) for message in messages]):
        try:
            text: Any = tokenizer.apply_chat_template(
                chat,
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **cast(Any, options),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            problem = problem or error
            continue
        lost = _left_out(messages, tools or (), text)
        if not lost:
            return text
    if lost:
        raise DataError(f"{where}: the chat template leaves out {lost}; change the row or set model.chat_template")
    roles = ", ".join(str(message["role"]) for message in messages)
    reason = str(problem).strip().split("\n")[0]
    raise DataError(
        f"{where}: the chat template refuses the messages ({roles}): {reason}; change the row or set model.chat_template"
    ) from problem


def _with_parts(message: Message) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _left_out(messages: Sequence[Message], tools: Tools, text: str) -> str:
    """What a template does not know of and drops without a word: user texts, tool calls, tools; empty when all is there."""
    for message in messages:
        content = message.get("content")
        if message["role"] == "user" and isinstance(content, str) and content.strip() not in text:
            return "what the user says"
        for call in message.get("tool_calls") or ():
            if call.get("function", call)["name"] not in text:
                return "the tool calls of the assistant"
    for tool in tools:
        if tool.get("function", tool)["name"] not in text:
            return "the tools"
    return ""


@dataclass(frozen=True, kw_only=True)
class SFTText:
    """A supervised row as text, cut at the borders of the assistant's turns."""

    pieces: list[tuple[str, bool]]
    """(text, trained on) in order."""
    plain: bool = False
    """Not rendered by a chat template: the pieces are a plain-text prompt and its response."""
    skipped_turns: int = 0
    """Assistant turns left out because the template renders them otherwise once a later turn follows."""


@dataclass(frozen=True, kw_only=True)
class SFTEncoding:
    """Token ids of one supervised row, and which of them are trained on."""

    ids: list[int]
    loss_mask: list[bool]
    """True for what the assistant wrote and the token that ends its turn."""


def encode_sft(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    model: ModelConfig,
    tools: Tools | None = None,
    where: str = "row",
) -> SFTEncoding:
    """Ids and loss mask of a dialogue: `split_dialogue`, then `encode_sft_texts`, of one row."""
    return encode_sft_texts(tokenizer, [split_dialogue(tokenizer, messages, model=model, tools=tools, where=where)])[0]


def split_dialogue(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    model: ModelConfig,
    tools: Tools | None = None,
    where: str = "row",
) -> SFTText:
    """The rendered dialogue, cut where assistant turns begin and end; every assistant turn is trained on.

    An assistant turn is what the template adds to the dialogue so far plus its generation prompt, up to and
    including the special token that ends the turn (what a template puts after that, a newline say, is never
    generated and so not trained on).

    Templates that rewrite earlier turns (Qwen3 drops their thinking) are trained on the turns they keep,
    the last one always; `skipped_turns` counts the others.

    Raises:
        DataError: no assistant turn, or the last one does not begin with the template's generation prompt.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"{where}: no assistant message to train on (roles: {', '.join(m['role'] for m in messages)})")
    messages = messages[: turns[-1] + 1]  # What follows the last assistant turn cannot be trained on.
    text = render(tokenizer, messages, model=model, tools=tools, where=where)
    enders = tuple(_turn_enders(tokenizer).values())
    pieces: list[tuple[str, bool]] = []
    done = skipped = 0
    for turn in turns:
        prefix = render(tokenizer, messages[:turn], model=model, tools=tools, generation_prompt=True, where=where)
        whole = text if turn == turns[-1] else render(tokenizer, messages[: turn + 1], model=model, tools=tools, where=where)
        if not text.startswith(prefix) or not text.startswith(whole):
            if turn == turns[-1]:
                raise DataError(
                    f"{where}: the chat template renders the last answer otherwise than after its generation prompt, so its "
                    "tokens cannot be told apart; set model.enable_thinking=false, or a model.chat_template made for training"
                )
            skipped += 1
            continue
        body = whole.rstrip()
        end = len(body) if body.endswith(enders) else len(whole)
        pieces += [(text[done : len(prefix)], False), (text[len(prefix) : end], True)]
        done = end
    return SFTText(pieces=pieces, skipped_turns=skipped)


def encode_sft_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[SFTText]) -> list[SFTEncoding]:
    """Ids and loss masks of many rows, tokenised together.

    Ids are those of the whole text when its tokens respect the borders of the pieces, else of the pieces one by one:
    where an answer that starts with a newline would merge with the template's, a rollout gives the model the
    prompt's tokens and lets it start a new one, so that is what it must learn from. A row that ends without a special
    token gets the tokenizer's eos, trained on.
    """
    encoded: list[list[list[int]]] = [[] for _ in rows]
    chats = [i for i, row in enumerate(rows) if not row.plain]
    joined = tokenize(tokenizer, [text for i in chats for text in accumulate(text for text, _ in rows[i].pieces)])
    split_up = [i for i, row in enumerate(rows) if row.plain]
    for i in chats:
        count = len(rows[i].pieces)
        prefixes, joined = joined[:count], joined[count:]
        whole = prefixes[-1]
        if all(whole[: len(prefix)] == prefix for prefix in prefixes):
            encoded[i] = [whole[start:end] for start, end in pairwise([0, *map(len, prefixes)])]
        else:
            split_up.append(i)
    for i in split_up:
        (first, _), *rest = rows[i].pieces
        encoded[i] = [
            *tokenize(tokenizer, [first], special_tokens=rows[i].plain),
            *tokenize(tokenizer, [text for text, _ in rest]),
        ]
    enders = _turn_enders(tokenizer)
    return [_close(tokenizer, row, parts, enders) for row, parts in zip(rows, encoded, strict=True)]


def _close(tokenizer: PreTrainedTokenizerBase, row: SFTText, parts: list[list[int]], enders: dict[int, str]) -> SFTEncoding:
    ids = [i for part in parts for i in part]
    mask = [flag for part, (_, flag) in zip(parts, row.pieces, strict=True) for _ in part]
    if ids[-1] not in enders:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "model.path: the tokenizer has no eos token to end answers with; name one in its tokenizer_config.json"
            )
        ids.append(cast(int, tokenizer.eos_token_id))
        mask.append(True)
    return SFTEncoding(ids=ids, loss_mask=mask)


def _turn_enders(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Special tokens that may end a turn (eos, `<|eot_id|>`, `<end_of_turn>` ...): id to text."""
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
