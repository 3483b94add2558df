"""Prompt data sets and supervised ones: layouts, lengths, filters and the errors of bad rows."""

import json
import logging
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models import tiny_tokenizer

from verl.config.schema import DataConfig, ModelConfig
from verl.data.chat import encode_prompt
from verl.data.datasets import final_number, load_prompt_dataset
from verl.data.sft import load_sft_dataset
from verl.errors import DataError

MODEL = ModelConfig()
UPSTREAM = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7, "question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"},
    "level": 3,
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="train.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return [str(tmp_path / name)]

    return write_rows


def load(files, tokenizer, data=None, split="train", **options):
    return load_prompt_dataset(files, data or DataConfig(**options), MODEL, tokenizer, split)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_upstream_rows_load_unchanged(form, tmp_path, write, tokenizer):
    files = write(UPSTREAM)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([UPSTREAM]), tmp_path / "train.parquet")
        files = [str(tmp_path / "train.parquet")]
    (encoded,) = load(files, tokenizer, instruction="not for messages", system_prompt="nor this")
    prompt = encoded.prompt
    assert list(prompt.messages) == UPSTREAM["prompt"]
    assert (prompt.uid, prompt.data_source, prompt.ability, prompt.ground_truth) == ("train:0", "openai/gsm8k", "math", "2")
    assert prompt.extra == {name: UPSTREAM[name] for name in ("reward_model", "extra_info", "level")}
    assert encoded.token_ids == encode_prompt(tokenizer, prompt, data=DataConfig(), model=MODEL)


def test_plain_rows_get_system_prompt_and_instruction_and_keep_their_columns(write, tokenizer):
    row = {"question": "1 + 1?", "answer": "One and one.\n#### 1,002", "hint": "count", "data_source": "own"}
    (encoded,) = load(write(row), tokenizer, system_prompt="S", instruction="I")
    assert list(encoded.prompt.messages) == [{"role": "system", "content": "S"}, {"role": "user", "content": "1 + 1? I"}]
    assert encoded.prompt.ground_truth == "1002"
    assert encoded.prompt.extra == {"answer": row["answer"], "hint": "count"}
    assert encoded.prompt.data_source == "own"


@pytest.mark.parametrize(
    ("row", "options", "question", "truth"),
    [
        ({"prompt": "p", "question": "q", "answer": "a"}, {}, "p", "a"),
        ({"problem": "x", "solution": r"\boxed{3}"}, {}, "x", r"\boxed{3}"),
        ({"prompt": "p", "q": "q", "answer": 1, "gold": [1, 2]}, {"prompt_key": "q", "answer_key": "gold"}, "q", [1, 2]),
        ({"prompt": "p", "meta": {"q": "deep", "a": "b"}}, {"prompt_key": "meta.q", "answer_key": "meta.a"}, "deep", "b"),
        ({"prompt": "p"}, {}, "p", None),
        ({"prompt": None, "question": "q", "answer": "## 3"}, {}, "q", "## 3"),
        ({"prompt": "p", "answer": "a", "reward_model": {"ground_truth": "first"}}, {}, "p", "first"),
    ],
)
def test_which_columns_are_read(row, options, question, truth, write, tokenizer):
    (encoded,) = load(write(row), tokenizer, **options)
    assert encoded.prompt.messages[0]["content"] == question
    assert encoded.prompt.ground_truth == truth


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So\n#### 18", "18"),
        ("#### -3.50", "-3.50"),
        ("#### $1,234 ", "1234"),
        ("#### 5 apples", "5"),
        ("#### 5\nnot the end", None),
        ("18", None),
        ("#### x", None),
        ("#### 1 and 2", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_base_models_get_plain_text(write, tokenizer):
    data = DataConfig(apply_chat_template=False, instruction="Answer:")
    plain, chat = load(write({"prompt": "1 + 1?"}, UPSTREAM), tokenizer, data)
    assert tokenizer.decode(plain.token_ids) == plain.prompt.raw_text == "1 + 1? Answer:"
    assert tokenizer.decode(chat.token_ids) == "Be brief.\n\n1 + 1?"


def test_nulls_that_arrow_fills_in_do_not_reach_the_template(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "Tom"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages}]), tmp_path / "r.parquet")
    (encoded,) = load([str(tmp_path / "r.parquet")], tokenizer)
    assert list(encoded.prompt.messages) == [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "Tom"}]


def test_overlong_prompts_are_dropped_and_counted(write, tokenizer, caplog):
    files = write(*({"prompt": "x" * n} for n in (3, 300, 5, 400)))
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        dataset = load(files, tokenizer, max_prompt_length=100)
    assert [encoded.prompt.uid for encoded in dataset] == ["train:0", "train:2"]
    assert dataset.num_dropped == 2
    assert dataset.lengths.tolist() == [len(encoded.token_ids) for encoded in dataset]
    assert caplog.messages == [
        "data.train_files: 2 of 4 prompts are over data.max_prompt_length=100 tokens and were dropped (longest "
        f"{load(files, tokenizer).lengths.max()})"
    ]


def test_a_prompt_exactly_at_the_limit_stays(write, tokenizer):
    files = write({"prompt": "x" * 30})
    length = int(load(files, tokenizer).lengths[0])
    assert len(load(files, tokenizer, max_prompt_length=length)) == 1
    with pytest.raises(DataError, match=f"1 of 1 prompts are over .*={length - 1} tokens, so none is left"):
        load(files, tokenizer, max_prompt_length=length - 1)


def test_without_the_filter_an_overlong_prompt_is_an_error(write, tokenizer):
    with pytest.raises(DataError, match=r"longest \d+: .*train.jsonl:2\); raise data.max_prompt_length, or set data.filter"):
        load(write({"prompt": "x"}, {"prompt": "x" * 99}), tokenizer, max_prompt_length=50, filter_overlong_prompts=False)


def test_only_the_first_rows_of_the_split_are_used(write, tokenizer):
    files = write(*({"prompt": str(i)} for i in range(9)))
    data = DataConfig(max_train_rows=4, max_val_rows=2)
    assert [e.prompt.uid for e in load(files, tokenizer, data)] == [f"train:{i}" for i in range(4)]
    assert len(load(files, tokenizer, data, split="test")) == 2


def test_prompts_and_batches_agree_with_items(write, tokenizer):
    dataset = load(write(*({"prompt": "x" * i} for i in range(1, 9))), tokenizer)
    assert dataset.batch([5, 0, 5]) == [dataset[5], dataset[0], dataset[5]]
    assert list(dataset.prompts) == [encoded.prompt for encoded in dataset]
    assert len(dataset.prompts) == 8
    with pytest.raises(IndexError):
        dataset[8]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"text": "x"},
            {},
            "train.jsonl:1: no column 'prompt' or 'question' or 'problem'; the row has text; set data.prompt_key",
        ),
        ({"prompt": "x", "b": 1}, {"prompt_key": "c"}, "no column 'c'; the row has prompt, b; set data.prompt_key"),
        ({"prompt": "x"}, {"answer_key": "gold"}, "no column 'gold'; the row has prompt; set data.answer_key"),
        ({"prompt": 3}, {}, "column 'prompt' must be text or a list of messages, got int 3"),
        ({"prompt": "  "}, {}, "column 'prompt' is empty"),
        ({"prompt": []}, {}, "prompt has no messages"),
        ({"prompt": ["x"]}, {}, r"prompt\[0\] must be an object with role and content, got str 'x'"),
        ({"prompt": [{"role": "user"}]}, {}, r"prompt\[0\] \(user\) has no content"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}]},
            {"apply_chat_template": False},
            "a dialogue needs a chat template",
        ),
    ],
)
def test_bad_rows_are_one_line_with_the_place(row, options, message, write, tokenizer):
    with pytest.raises(DataError, match=message) as error:
        load(write(row), tokenizer, **options)
    assert "train.jsonl:1" in str(error.value)
    assert "\n" not in str(error.value)


def sft(files, tokenizer, **options):
    return load_sft_dataset(files, DataConfig(**options), MODEL, tokenizer)


def trained(tokenizer, row):
    ids, mask = row
    return tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if flag])


@pytest.mark.parametrize(
    ("row", "options", "prompt", "answer"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, {}, "q", "a"),
        ({"prompt": "q", "response": "a", "answer": "not this"}, {}, "q", "a"),
        ({"question": "q", "answer": "why\n#### 2"}, {"instruction": "Think."}, "q Think.", "why\n#### 2"),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}, {}, "q", "a"),
        ({"prompt": "q", "reply": "a", "answer": "b"}, {"answer_key": "reply"}, "q", "a"),
        ({"chat": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, {"prompt_key": "chat"}, "q", "a"),
    ],
)
def test_sft_rows_of_every_layout(row, options, prompt, answer, write, tokenizer):
    (encoded,) = sft(write(row), tokenizer, **options)
    assert trained(tokenizer, encoded) == answer + "<|im_end|>"
    expected = encode_prompt(tokenizer, prompt, data=DataConfig(), model=MODEL)
    assert tuple(encoded[0][: len(expected)]) == expected
    assert encoded[1].index(True) == len(expected)


def test_sft_reads_the_worked_solution_of_upstream_rows(write, tokenizer):
    (row,) = sft(write(UPSTREAM), tokenizer)
    assert trained(tokenizer, row) == "1 + 1 = 2\n#### 2<|im_end|>"


def test_sft_of_a_base_model_is_prompt_then_response_then_eos(write, tokenizer):
    (row,) = sft(write({"prompt": "Q:", "response": " A"}), tokenizer, apply_chat_template=False)
    assert tokenizer.decode(row[0]) == "Q: A<|im_end|>"
    assert trained(tokenizer, row) == " A<|im_end|>"


def test_sft_batches_are_token_batches(write, tokenizer):
    dataset = sft(write(*({"prompt": "x" * n, "response": "y" * n} for n in (1, 9, 4))), tokenizer)
    batch = dataset.batch([2, 0])
    assert batch.column_names == ("input_ids", "loss_mask")
    assert batch.lengths.tolist() == [dataset.lengths[2], dataset.lengths[0]]
    assert batch.input_ids.tolist() == dataset[2][0] + dataset[0][0]
    assert batch.loss_mask.tolist() == dataset[2][1] + dataset[0][1]


@pytest.mark.parametrize("as_text", [False, True])
def test_sft_shows_the_tools_of_a_row(as_text, write):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (encoded,) = sft(write({**row, "tools": json.dumps(tools) if as_text else tools}), tokenizer)
    assert tokenizer.decode(encoded[0]).startswith("[calculator]")
    with pytest.raises(DataError, match="column 'tools' must be a list of schemas"):
        sft(write({**row, "tools": {"name": "x"}}), tokenizer)


def test_sft_drops_overlong_rows_and_says_so(write, tokenizer, caplog):
    with caplog.at_level(logging.WARNING, logger="verl.data"):
        dataset = sft(
            write({"prompt": "x", "response": "y" * 200}, {"prompt": "x", "response": "y"}),
            tokenizer,
            max_prompt_length=40,
            max_response_length=40,
        )
    assert (len(dataset), dataset.num_dropped) == (1, 1)
    assert "1 of 2 rows are over data.max_prompt_length+data.max_response_length=80 tokens" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q"}, "no column 'response' or 'completion' or .*'answer' or 'solution'; the row has prompt"),
        ({"prompt": "q", "response": ""}, "column 'response' must be the text of the response, got ''"),
        ({"prompt": "q", "response": 5}, "column 'response' must be the text of the response, got 5"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no column 'prompt'"),
    ],
)
def test_bad_sft_rows(row, message, write, tokenizer):
    with pytest.raises(DataError, match=message):
        sft(write(row), tokenizer)


@pytest.mark.skipif("VERL_TEST_DATA" not in os.environ, reason="needs the real GSM8K")
def test_gsm8k_loads_and_filters_in_a_few_cpu_seconds(tokenizer):
    start = time.process_time()
    data = DataConfig(max_prompt_length=300, instruction="Think.")
    dataset = load_prompt_dataset([os.environ["VERL_TEST_DATA"] + "/gsm8k"], data, MODEL, tokenizer, "train")
    assert time.process_time() - start < 6
    assert len(dataset) + dataset.num_dropped == 7473
    assert all(prompt.ground_truth.lstrip("-").replace(".", "").isdigit() for prompt in dataset.prompts)
