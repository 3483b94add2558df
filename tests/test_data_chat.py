"""Prompts and supervised rows as tokens: what a rollout is given, and exactly which tokens are trained on."""

import json
import os
from pathlib import Path

import pytest
from models import CHAT_TEMPLATE, tiny_tokenizer

from verl.config.schema import DataConfig, ModelConfig
from verl.data.chat import encode_prompt, encode_sft, encode_sft_texts, split_dialogue
from verl.data.tokenizer import load_tokenizer
from verl.data.types import Prompt
from verl.errors import DataError, UserError

DATA, MODEL = DataConfig(), ModelConfig()
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Like Qwen3's: the last answer has a thinking block, earlier answers lose theirs."""
SPACED = CHAT_TEMPLATE.replace("\n{{ m['content']", ": {{ m['content']").replace("assistant\n", "assistant: ")
"""The generation prompt ends in a space, which a tokenizer would rather join with the next word."""
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": " It is 4.\n"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def with_template(template, **special):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    for name, value in special.items():
        setattr(tokenizer, name, value)
    return tokenizer


def trained_text(tokenizer, encoding):
    """The runs of trained tokens, decoded one by one."""
    runs, previous = [], False
    for token, flag in zip(encoding.ids, encoding.loss_mask, strict=True):
        if flag:
            runs = [*runs[:-1], [*runs[-1], token]] if previous else [*runs, [token]]
        previous = flag
    return [tokenizer.decode(run) for run in runs]


def test_a_plain_prompt_by_hand(tokenizer):
    data = DataConfig(system_prompt="Be brief.", instruction="Think.")
    ids = encode_prompt(tokenizer, "1 + 1?", data=data, model=MODEL)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1? Think.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_messages_are_left_as_they_are(tokenizer):
    prompt = Prompt(uid="a:0", messages=({"role": "user", "content": "Hi"},))
    data = DataConfig(system_prompt="S", instruction="I")
    assert "S" not in tokenizer.decode(encode_prompt(tokenizer, prompt, data=data, model=MODEL))


def test_without_a_template_the_text_goes_to_the_model_raw(tokenizer):
    data = DataConfig(apply_chat_template=False, instruction="A:", system_prompt="Sums.")
    assert tokenizer.decode(encode_prompt(tokenizer, "1 + 1?", data=data, model=MODEL)) == "Sums.\n\n1 + 1? A:"


def test_enable_thinking_reaches_the_template():
    tokenizer = with_template(REWRITING)
    texts = [
        tokenizer.decode(encode_prompt(tokenizer, "Hi", data=DATA, model=ModelConfig(enable_thinking=value)))
        for value in (None, True, False)
    ]
    assert [text.endswith("</think>\n\n") for text in texts] == [False, False, True]


def test_tools_reach_the_template():
    tokenizer = with_template("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHAT_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}]
    text = tokenizer.decode(encode_prompt(tokenizer, "Hi", data=DATA, model=MODEL, tools=tools))
    assert text.startswith("[calculator]<|im_start|>user")


def test_a_tokenizer_without_a_template_is_told_both_ways_out():
    with pytest.raises(UserError, match=r"set model.chat_template to a Jinja file, or data.apply_chat_template=false"):
        encode_prompt(with_template(None), "Hi", data=DATA, model=MODEL)


def test_a_template_for_typed_parts_gets_them_and_lost_text_is_an_error():
    parts = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert tiny_tokenizer().decode(encode_prompt(with_template(parts), "Hi you", data=DATA, model=MODEL)) == "Hi you"
    with pytest.raises(DataError, match="leaves out what the user says"):
        encode_prompt(with_template("{{ messages[0].role }}"), "Hi you", data=DATA, model=MODEL)


def test_tools_and_calls_that_a_template_drops_are_an_error(tokenizer):
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    with pytest.raises(DataError, match="leaves out the tools"):
        encode_prompt(tokenizer, "Hi", data=DATA, model=MODEL, tools=tools)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"x": 1}}}
    row = [*DIALOGUE[1:2], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(DataError, match="leaves out the tool calls of the assistant"):
        encode_sft(tokenizer, row, model=MODEL)


def test_a_template_that_refuses_is_one_line_with_the_row():
    tokenizer = with_template("{{ raise_exception('System role not supported') }}")
    prompt = Prompt(uid="train:7", messages=({"role": "system", "content": "x"}, {"role": "user", "content": "y"}))
    with pytest.raises(DataError, match=r"train:7: the chat template refuses the messages \(system, user\): System role not"):
        encode_prompt(tokenizer, prompt, data=DATA, model=MODEL)


def test_every_assistant_turn_is_trained_on_with_its_end(tokenizer):
    encoding = encode_sft(tokenizer, DIALOGUE, model=MODEL)
    assert trained_text(tokenizer, encoding) == ["2<|im_end|>", " It is 4.\n<|im_end|>"]
    rendered = tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    # The template's newline after the last <|im_end|> is never generated, so the row ends before it.
    assert tokenizer.decode(encoding.ids) == rendered.removesuffix("\n")


@pytest.mark.parametrize("answer", ["4", "buys", " 4", "\n\n4", "  \n", "<|im_end|> said he", "漢字 🎉", "4 4 4"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, REWRITING, SPACED], ids=["chatml", "rewriting", "spaced"])
def test_an_sft_row_begins_with_exactly_what_a_rollout_is_given(answer, template):
    tokenizer = with_template(template)
    prompt = encode_prompt(tokenizer, "What is 2 + 2?", data=DATA, model=MODEL)
    row = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": answer}]
    encoding = encode_sft(tokenizer, row, model=MODEL)
    assert tuple(encoding.ids[: len(prompt)]) == prompt
    assert encoding.loss_mask == [False] * len(prompt) + [True] * (len(encoding.ids) - len(prompt))
    assert tokenizer.decode(encoding.ids[len(prompt) :]).endswith(answer + "<|im_end|>")


def test_tokens_do_not_reach_over_the_border_of_a_turn():
    """`assistant: ` and `buys` would be joined in one token ` buys`; in a rollout the space is given and `buys` chosen."""
    tokenizer = with_template(SPACED)
    assert "Ġbuys" in tokenizer.tokenize("assistant: buys")
    row = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "buys"}]
    encoding = encode_sft(tokenizer, row, model=MODEL)
    assert trained_text(tokenizer, encoding) == ["buys<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(encoding.ids[encoding.loss_mask.index(True) - 1]) == "Ġ"


def test_a_template_that_does_not_end_turns_gets_eos(tokenizer):
    plain = with_template(
        "{% for m in messages %}{{ m.role }}> {{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant> {% endif %}"
    )
    encoding = encode_sft(plain, DIALOGUE[1:3], model=MODEL)
    assert encoding.ids[-1] == plain.eos_token_id
    assert encoding.loss_mask[-1]


def test_turns_that_the_template_rewrites_are_left_out_and_counted():
    tokenizer = with_template(REWRITING)
    text = split_dialogue(tokenizer, DIALOGUE, model=MODEL)
    assert text.skipped_turns == 1
    (encoding,) = encode_sft_texts(tokenizer, [text])
    assert trained_text(tokenizer, encoding) == ["<think>\n\n</think>\n\n It is 4.\n<|im_end|>"]


def test_many_rows_at_once_equal_one_by_one(tokenizer):
    dialogues = [DIALOGUE, DIALOGUE[:3], DIALOGUE[1:3], DIALOGUE[1:]]
    texts = [split_dialogue(tokenizer, dialogue, model=MODEL) for dialogue in dialogues]
    assert encode_sft_texts(tokenizer, texts) == [encode_sft(tokenizer, dialogue, model=MODEL) for dialogue in dialogues]


def test_rows_that_cannot_be_trained_on(tokenizer):
    with pytest.raises(DataError, match=r"a:3: no assistant message to train on \(roles: system, user\)"):
        encode_sft(tokenizer, DIALOGUE[:2], model=MODEL, where="a:3")
    odd = with_template("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}")
    with pytest.raises(DataError, match="renders the last answer otherwise than after its generation prompt"):
        encode_sft(odd, DIALOGUE[1:3], model=MODEL)


def test_load_tokenizer_reads_the_template_and_finds_padding(tmp_path, tokenizer):
    bare = tiny_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(tmp_path / "tok")
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "tok"), chat_template=str(tmp_path / "t.jinja")))
    assert tokenizer.decode(encode_prompt(loaded, "Hi", data=DATA, model=MODEL)) == "Hi!"
    assert (loaded.pad_token, loaded.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(loaded) == len(bare)
    other = load_tokenizer(ModelConfig(path="/nowhere/at/all", tokenizer_path=str(tmp_path / "tok")))
    assert other.chat_template == CHAT_TEMPLATE


def test_the_end_of_sequence_pads_only_when_nothing_else_can(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "<|endoftext|>", None
    tokenizer.save_pretrained(tmp_path / "tok")
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "tok")))
    assert loaded.pad_token == loaded.eos_token == "<|endoftext|>"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(), "model.path is empty"),
        (ModelConfig(path="./no/such/folder"), "model.path=no/such/folder: no such folder"),
        (ModelConfig(path="x", tokenizer_path="/none"), "model.tokenizer_path=/none: no such folder"),
    ],
)
def test_a_missing_tokenizer_names_the_setting(model, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(model)


def test_an_empty_folder_and_an_absent_template(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no tokenizer found; it needs tokenizer\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "empty")))
    tokenizer.save_pretrained(tmp_path / "tok")
    with pytest.raises(UserError, match=r"model.chat_template=none.jinja: cannot be read .*; give a Jinja file"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "tok"), chat_template="none.jinja"))


def test_an_unreachable_hub_is_one_line(monkeypatch):
    monkeypatch.setattr("verl.data.tokenizer.hub_reachable", lambda: False)
    with pytest.raises(UserError, match="owner/no-such-model: no tokenizer found; the hub cannot be reached") as error:
        load_tokenizer(ModelConfig(path="owner/no-such-model"))
    assert "\n" not in str(error.value)


@pytest.mark.skipif("VERL_TEST_DATA" not in os.environ, reason="needs the folder of real chat templates")
def test_real_templates_train_on_the_answers_and_nothing_else():
    """For 71 published templates: each trained run is one answer, whole, with at most markup of its own around it."""
    folder = Path(os.environ["VERL_TEST_DATA"]) / "chat_templates"
    facts = json.loads((folder / "template_facts.json").read_text())
    dialogue = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "It is two."},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": "It is four."},
    ]
    trained = 0
    refused = []
    for name in facts:
        tokenizer = with_template((folder / name).read_text(), bos_token="<|endoftext|>")
        try:
            text = split_dialogue(tokenizer, dialogue, model=MODEL, where=name)
        except DataError as error:
            assert str(error).startswith(name)
            refused.append(name)
            continue
        (encoding,) = encode_sft_texts(tokenizer, [text])
        runs = trained_text(tokenizer, encoding)
        answers = ["It is two.", "It is four."][text.skipped_turns :]
        assert len(runs) == len(answers), name
        for run, answer in zip(runs, answers, strict=True):
            assert run.count("It is") == 1 and answer in run, name
            assert "1 + 1" not in run and "And 2" not in run, name
        trained += 1
    # These open every answer with a thinking block that their rendering of an answer without thinking lacks.
    assert {name.split("__")[1].split(".")[0].removesuffix("_training") for name in refused} <= {
        "deepseekv3",
        "nemotron_3_nano",
        "nemotron_3_super",
        "nemotron_3_ultra",
    }
    assert trained + len(refused) == len(facts) >= 71
