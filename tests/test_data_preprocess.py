"""The converters: raw files in, upstream's columns out, and solutions that lead to the answer."""

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from models import tiny_tokenizer

from verl.config.schema import DataConfig, ModelConfig
from verl.data.datasets import load_prompt_dataset
from verl.data.preprocess import arithmetic, gsm8k
from verl.data.preprocess.arithmetic import plain_number, worked_solution
from verl.data.preprocess.layout import INSTRUCTION, hold_out
from verl.data.sft import load_sft_dataset

ROOT = Path(__file__).parent.parent


def raw_rows(count, start=0):
    return [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(start, start + count)
    ]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return pq.read_table(path).to_pylist()


def questions(path):
    return [row["extra_info"]["question"] for row in read(path)]


def test_a_raw_json_list_becomes_train_and_test_in_a_folder(tmp_path):
    """The script itself, with a relative path, as a user calls it."""
    (tmp_path / "gsm8k_raw.json").write_text(json.dumps(raw_rows(20)))
    command = [sys.executable, str(ROOT / "examples/data_preprocess/gsm8k.py")]
    arguments = ["--input_path", "./gsm8k_raw.json", "--output_path", "./gsm8k_processed"]
    result = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "train: 18 rows written to gsm8k_processed/train.parquet",
        "test: 2 rows written to gsm8k_processed/test.parquet",
    ]
    train, test = (read(tmp_path / "gsm8k_processed" / f"{name}.parquet") for name in ("train", "test"))
    assert sorted(r["extra_info"]["question"] for r in train + test) == sorted(r["question"] for r in raw_rows(20))
    row = train[0]
    question, answer = row["extra_info"]["question"], row["extra_info"]["answer"]
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rsplit(" ", 1)[1]},
        "extra_info": {"split": "train", "index": 0, "question": question, "answer": answer},
    }
    assert os.listdir(tmp_path / "gsm8k_processed") in (["train.parquet", "test.parquet"], ["test.parquet", "train.parquet"])


def test_what_is_written_loads_for_rl_and_for_sft(tmp_path):
    write_jsonl(tmp_path / "raw.jsonl", raw_rows(30))
    assert gsm8k.main(["--input_path", str(tmp_path / "raw.jsonl"), "--output_path", str(tmp_path / "out")]) == 0
    tokenizer, data, model = tiny_tokenizer(), DataConfig(), ModelConfig()
    train = load_prompt_dataset([str(tmp_path / "out")], data, model, tokenizer, "train")
    test = load_prompt_dataset([str(tmp_path / "out")], data, model, tokenizer, "test")
    assert (len(train), len(test)) == (27, 3)
    first = train[0].prompt
    assert first.extra["extra_info"]["answer"].endswith(f"#### {first.ground_truth}")
    ids, mask = load_sft_dataset([str(tmp_path / "out")], data, model, tokenizer)[0]
    assert tuple(ids[: mask.index(True)]) == train[0].token_ids


def test_a_path_that_ends_in_parquet_is_that_file(tmp_path, capsys):
    write_jsonl(tmp_path / "raw" / "train.jsonl", raw_rows(5))
    write_jsonl(tmp_path / "raw" / "test_part.jsonl", raw_rows(3, start=50))
    source = ["--input_path", str(tmp_path / "raw")]
    for name, options, count in (
        ("gsm8k_train.parquet", [], 5),
        ("gsm8k_test.parquet", [], 3),
        ("any.parquet", [], 5),
        ("all.parquet", ["--split", "all", "--instruction", ""], 8),
    ):
        assert gsm8k.main([*source, "--output_path", str(tmp_path / "new" / name), *options]) == 0
        assert len(read(tmp_path / "new" / name)) == count
    assert read(tmp_path / "new" / "all.parquet")[0]["prompt"][0]["content"] == "What is 0 + 1?"


def test_rows_with_a_split_field_are_split_by_it(tmp_path):
    rows = [{**row, "split": "test" if i % 4 == 0 else "train"} for i, row in enumerate(raw_rows(8))]
    write_jsonl(tmp_path / "raw.jsonl", rows)
    gsm8k.main(["--input_path", str(tmp_path / "raw.jsonl"), "--output_path", str(tmp_path / "out")])
    assert questions(tmp_path / "out" / "test.parquet") == ["What is 0 + 1?", "What is 4 + 1?"]
    assert len(questions(tmp_path / "out" / "train.parquet")) == 6


def test_a_json_object_with_two_lists_is_split_by_them(tmp_path):
    (tmp_path / "raw.json").write_text(json.dumps({"train": raw_rows(4), "test": raw_rows(2, start=9)}))
    gsm8k.main(["--input_path", str(tmp_path / "raw.json"), "--output_path", str(tmp_path / "out")])
    assert len(questions(tmp_path / "out" / "train.parquet")) == 4
    assert questions(tmp_path / "out" / "test.parquet") == ["What is 9 + 1?", "What is 10 + 1?"]


def test_an_answer_may_be_the_number_alone(tmp_path):
    write_jsonl(tmp_path / "raw.jsonl", [{"question": "a", "answer": 7}, {"question": "b", "answer": "1,000"}])
    gsm8k.main(["--input_path", str(tmp_path / "raw.jsonl"), "--output_path", str(tmp_path / "o.parquet"), "--split", "all"])
    assert sorted(row["reward_model"]["ground_truth"] for row in read(tmp_path / "o.parquet")) == ["1000", "7"]


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([{"question": "a", "answer": "no number"}], [], "raw.jsonl:1: the answer must end in '#### N', or be a number"),
        ([{"question": "a"}], [], "raw.jsonl:1: no field 'answer'; the row has question"),
        (raw_rows(3), ["--test_size", "1.5"], "--test_size=1.5 must be between 0 and 1"),
        (None, [], "raw.jsonl: no such file or folder"),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(rows, arguments, message, tmp_path, capsys):
    if rows is not None:
        write_jsonl(tmp_path / "raw.jsonl", rows)
    source = ["--input_path", str(tmp_path / "raw.jsonl"), "--output_path", str(tmp_path / "out")]
    assert gsm8k.main([*source, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_no_input_and_no_hub_says_how_to_give_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gsm8k, "hub_reachable", lambda: False)
    assert gsm8k.main(["--output_path", str(tmp_path / "gsm8k_train.parquet")]) == 2
    error = capsys.readouterr().err
    assert "give a local copy: --input_path FILE" in error
    assert error.count("\n") == 1


def test_hold_out_is_seeded_exact_and_keeps_groups_together():
    groups = ["a", "b", "a", "c", "d", "e", "f", "g", "h", "b"]
    held = hold_out(groups, 0.3, seed=1)
    assert held[0] == held[2]
    assert held[1] == held[9]
    assert 3 <= held.sum() <= 4
    assert (held == hold_out(groups, 0.3, seed=1)).all()
    assert any((held != hold_out(groups, 0.3, seed=s)).any() for s in range(2, 6))
    assert hold_out(range(100), 0.1, seed=0).sum() == 10


@pytest.mark.parametrize(
    ("equation", "answer", "solution"),
    [
        ("X = 70 - 27", "43", "70 - 27 = 43\n#### 43"),
        ("( 76.0 - 25.0 )", "51", "76 - 25 = 51\n#### 51"),
        ("X=(4.0*(2.0+5.0))", "28", "2 + 5 = 7\n4 * 7 = 28\n#### 28"),
        ("14*(0.25+0.5+0.1)=x", "11.9", "0.25 + 0.5 = 0.75\n0.75 + 0.1 = 0.85\n14 * 0.85 = 11.9\n#### 11.9"),
        ("70-x=27", "43", "70 - 27 = 43\n#### 43"),
        ("28+x=54", "26", "54 - 28 = 26\n#### 26"),
        ("x-3=4", "7", "4 + 3 = 7\n#### 7"),
        ("1110=30*x", "37", "1110 / 30 = 37\n#### 37"),
        ("x/4=5", "20", "5 * 4 = 20\n#### 20"),
        ("20/x=5", "4", "20 / 5 = 4\n#### 4"),
        ("(7.19+6.83)+x=20", "5.98", "7.19 + 6.83 = 14.02\n20 - 14.02 = 5.98\n#### 5.98"),
        ("3*(x+2)=21", "5", "21 / 3 = 7\n7 - 2 = 5\n#### 5"),
        ("40/7=x", "5", None),
        ("x+x=4", "2", None),
        ("x=x", "2", None),
        ("1/0=x", "2", None),
        ("__import__('os')", "2", None),
        ("2 ** 3 = x", "8", None),
        ("", "2", None),
        ("1 = 2 = x", "2", None),
    ],
)
def test_worked_solutions_by_hand(equation, answer, solution):
    assert worked_solution(equation, answer) == solution


def test_plain_numbers():
    assert [plain_number(Fraction(n)) for n in ("43", "-3", "11.9", "0.05", "1/3", "100")] == [
        "43",
        "-3",
        "11.9",
        "0.05",
        "0.333333",
        "100",
    ]


def test_word_problems_in_upstreams_columns(tmp_path, capsys):
    rows = [
        {
            "id": f"easy-{i}",
            "question": f"Tom has {i} pens and gets 2. How many now?",
            "answer": str(i + 2),
            "equation": f"X={i}+2",
            "steps": 1,
        }
        for i in range(10)
    ]
    wrong = {"id": "w", "question": "Odd?", "answer": "5", "equation": "40/7=x", "steps": 1}
    write_jsonl(tmp_path / "in" / "easy.jsonl", [*rows, wrong])
    source = ["--input_path", str(tmp_path / "in")]
    written = {}
    for seed in range(6):
        out = tmp_path / f"out{seed}"
        assert arithmetic.main([*source, "--output_path", str(out), "--seed", str(seed)]) == 0
        train, test = read(out / "train.parquet"), read(out / "test.parquet")
        left_out = "1 training rows left out" in capsys.readouterr().out
        assert len(train) + len(test) == 11 - left_out
        written[left_out] = train, test
    # The row with an equation that leads elsewhere is never imitated, but its answer may be asked for.
    train, test = written[False]
    assert [row["extra_info"]["answer"] for row in test if row["extra_info"]["id"] == "w"] == ["#### 5"]
    train, test = written[True]
    assert "w" not in {row["extra_info"]["id"] for row in train + test}
    row = train[0]
    assert row["data_source"] == "arithmetic/easy"
    assert row["extra_info"]["answer"].endswith(
        f" = {row['reward_model']['ground_truth']}\n#### {row['reward_model']['ground_truth']}"
    )
    assert row["extra_info"]["steps"] == 1


def test_missing_word_problems_name_the_option(tmp_path, capsys):
    from verl.data.preprocess.arithmetic import main

    assert main(["--input_path", "nowhere.jsonl", "--output_path", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --input_path=nowhere.jsonl: no such file or folder\n"


def test_rewordings_of_a_problem_stay_on_one_side():
    pair = [
        {"question": "Joan found 70 shells . She has 27 left . How many did she give ?", "answer": "43"},
        {"question": "Joan found 70 seashells and has 27 left. How many did she give to Sam?", "answer": "43.0"},
    ]
    assert arithmetic.problem_key(pair[0], "a") == arithmetic.problem_key(pair[1], "b")
    assert arithmetic.problem_key(pair[0], "a") != arithmetic.problem_key({**pair[0], "answer": "44"}, "c")


@pytest.mark.skipif("VERL_TEST_DATA" not in os.environ, reason="needs the real easy word problems")
def test_real_word_problems_have_solutions(tmp_path):
    out = str(tmp_path / "out")
    assert arithmetic.main(["--input_path", os.environ["VERL_TEST_DATA"] + "/easy", "--output_path", out]) == 0
    train, test = read(tmp_path / "out" / "train.parquet"), read(tmp_path / "out" / "test.parquet")
    assert len(train) + len(test) >= 2344 - 12
    assert 400 <= len(test) <= 500
    for row in train:
        *steps, last = row["extra_info"]["answer"].split("\n")
        assert steps
        assert last == f"#### {row['reward_model']['ground_truth']}"
    assert not {row["extra_info"]["question"] for row in train} & {row["extra_info"]["question"] for row in test}


@pytest.mark.parametrize("name", ["gsm8k", "arithmetic"])
def test_the_modules_are_commands_too(name):
    command = [sys.executable, "-m", f"verl.data.preprocess.{name}", "--help"]
    assert "--input_path" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
