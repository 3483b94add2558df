"""What goes wrong around a run: damaged checkpoints and notes, two runs in one folder, odd texts and columns."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.checkpoint.manager import MANIFEST
from verl.data.rows import digest_of, load_rows
from verl.errors import ConfigError, DataError, UserError
from verl.observe.records import append_line, read_jsonl, to_json_line
from verl.quickstart.model import build_model
from verl.quickstart.problems import generate_problems, write_jsonl
from verl.rewards.outcome import ScoreOutcome
from verl.rewards.pool import ScoringPool
from verl.trainer import main_eval, main_generation
from verl.trainer.grpo import GRPOTrainer
from verl.trainer.run_settings import trained_settings
from verl.trainer.sft import SFTTrainer

SURROGATE = "\\ud800"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    problems = generate_problems(40, 0)
    build_model(folder / "model", [p.question + p.answer for p in problems], seed=0, hidden_size=32, num_layers=2)
    write_jsonl(problems[:30], folder / "train.jsonl")
    write_jsonl(problems[30:], folder / "test.jsonl")
    return {"model": str(folder / "model"), "train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}


def keys(inputs, out, **changes):
    base = {
        "data.train_files": [inputs["train"]],
        "data.train_batch_size": 8,
        "data.max_prompt_length": 96,
        "data.max_response_length": 64,
        "actor.lr": 1e-3,
        "training.total_steps": 4,
        "training.save_interval": 2,
        "training.output_dir": str(out),
        "training.last_link": None,
        "tracking.plots": False,
    }
    return base | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    SFTTrainer(inputs["model"], config=keys(inputs, out)).fit()
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def resume(inputs, run):
    return SFTTrainer(inputs["model"], config=keys(inputs, run, training__total_steps=6)).fit()


def overwrite(file: Path, start: int = 0):
    """Other bytes, the same size."""
    data = bytearray(file.read_bytes())
    data[start : start + 50] = bytes(byte ^ 0x55 for byte in data[start : start + 50])
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "actor/__0_0.distcp", "actor/engine.json", "trainer.json"])
def test_a_checkpoint_whose_bytes_changed_is_not_resumed(name, inputs, run):
    overwrite(run / "checkpoints" / "step_000004" / name, 10)
    with pytest.raises(UserError, match=f"step_000004 is damaged: {name} differs from its checksum"):
        resume(inputs, run)


def test_an_incomplete_newest_checkpoint_is_named(inputs, run, capsys):
    (run / "checkpoints" / "step_000004" / "model.safetensors").unlink()
    assert resume(inputs, run).step == 6
    out = capsys.readouterr().out
    assert "step_000004 is damaged: model.safetensors is missing; going on from" in out and "after step 2" in out


@pytest.mark.parametrize("damage", ["no manifest", "null files"])
def test_a_run_does_not_start_anew_over_damaged_checkpoints(damage, inputs, run):
    for manifest in (run / "checkpoints").glob(f"step_*/{MANIFEST}"):
        manifest.write_text(
            '{"checkpoint": {"step": 1, "serial": 1, "files": null}}'
        ) if damage == "null files" else manifest.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is complete. Set training.resume=never"):
        resume(inputs, run)
    assert len(list((run / "checkpoints").glob("step_*"))) == 2


def test_nothing_is_generated_from_weights_that_changed_on_disk(inputs, run, tmp_path):
    weights = run / "checkpoints" / "step_000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-400:] = b"?" * 400
    weights.write_bytes(content)
    named = ["--model_path", str(run), "--input", inputs["test"], "--output", str(tmp_path / "out.jsonl")]
    with pytest.raises(UserError, match=r"model\.safetensors differs from its checksum"):
        main_generation.main(named)


def test_devices_that_only_generate_mean_nothing_where_all_do(inputs, run, tmp_path):
    named = ["--model_path", str(run), "--input", inputs["test"], "--output", str(tmp_path / "out.jsonl")]
    with pytest.raises(ConfigError, match=r"parallel\.rollout_devices=5 has no effect .* use parallel\.data_parallel_size"):
        main_generation.main([*named, "parallel.rollout_devices=5"])


@pytest.mark.parametrize("text", ['{"a":', "{}", "\x00\x01"])
def test_damaged_notes_do_not_stop_a_run(text, inputs, run):
    (run / "run.json").write_text(text)
    (run / "config.yaml").write_bytes(b"\xff\xfe" + os.urandom(50))
    assert resume(inputs, run).step == 6
    assert len(json.loads((run / "run.json").read_text())) == 1
    assert (run / "run.1.json").exists() and (run / "config.1.yaml").exists()


def test_a_foreign_line_of_the_metrics_is_named(inputs, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[1]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:\d+ is no JSON object"):
        resume(inputs, run)


def test_two_runs_do_not_share_a_folder(inputs, tmp_path):
    first = SFTTrainer(inputs["model"], config=keys(inputs, tmp_path))
    first.prepare()
    with pytest.raises(UserError, match="another run is writing there"):
        SFTTrainer(inputs["model"], config=keys(inputs, tmp_path)).fit()
    first.fit()
    assert SFTTrainer(inputs["model"], config=keys(inputs, tmp_path, training__total_steps=5)).fit().step == 5


def test_other_rows_under_the_same_name_are_noticed(inputs, run, tmp_path, capsys):
    train = Path(inputs["train"])
    before = train.read_text()
    try:
        train.write_text(before.replace("3", "5"))
        assert resume(inputs, run).step == 6
        assert "hold other rows than when the checkpoint was saved" in capsys.readouterr().out
    finally:
        train.write_text(before)
    assert digest_of([str(train)]) != digest_of([inputs["test"]])


def test_the_chat_template_in_use_is_exported(inputs, tmp_path):
    template = tmp_path / "special.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {{ m['content'] }}{% else %}SPECIAL {{ m['content'] }} "
        "{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = keys(inputs, tmp_path / "run", data__train_files=[str(tmp_path / "rows.jsonl")], model__chat_template=str(template))
    result = SFTTrainer(inputs["model"], config=config | {"training.total_steps": 1}).fit()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("SPECIAL x")


# --- texts


def test_lines_end_at_newlines_alone(tmp_path):
    for text in ("a\u2028b", "a\x85b", "\ud800 alone"):
        append_line(tmp_path / "s.jsonl", to_json_line({"text": text}))
    assert [row["text"] for row in read_jsonl(tmp_path / "s.jsonl")] == ["a\u2028b", "a\x85b", "\ud800 alone"]


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    whole = json.dumps({"question": "smile \U0001f600?", "answer": "1"})  # both halves: a character
    (tmp_path / "good.jsonl").write_text(whole + "\n")
    assert len(load_rows([str(tmp_path / "good.jsonl")])) == 1
    for name in ("bad.jsonl", "bad.json"):
        line = '{"question": "q", "answer": "' + SURROGATE + '"}'
        (tmp_path / name).write_text(f"[{line}]" if name.endswith(".json") else f"{whole}\n{line}\n")
        with pytest.raises(DataError, match="half of a surrogate pair"):
            load_rows([str(tmp_path / name)])


def test_columns_of_one_name(tmp_path):
    (tmp_path / "d.csv").write_text("question,answer,answer\nq?,1,2\n")
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["answer", "answer"]), tmp_path / "d.parquet")
    for name in ("d.csv", "d.parquet"):
        with pytest.raises(DataError, match="there are 2 columns named 'answer'"):
            load_rows([str(tmp_path / name)])


def test_generated_rows_keep_all_columns_of_all_kinds(inputs, tmp_path):
    rows = [
        {"question": "1 + 1?", "answer": "2", "mixed": 1, "empty": {}, "huge": 10**30},
        {"question": "1 + 2?", "answer": 3, "mixed": "x", "late": "only here", "uid": "mine", "responses": "theirs"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model_path", inputs["model"], "--input", str(tmp_path / "in.jsonl"), "--output"]
    main_generation.main([*arguments, str(tmp_path / "out.parquet"), "data.max_response_length=2"])
    first, second = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (first["late"], second["late"]) == (None, "only here") and (first["mixed"], second["mixed"]) == ("1", '"x"')
    assert first["huge"] == str(10**30) and first["empty"] == "{}" and second["empty"] is None
    assert first["input_uid"] is None and second["input_uid"] == "mine" and second["input_responses"] == "theirs"
    assert (first["uid"], second["uid"]) == ("in:0", "in:1") and len(first["responses"]) == 1


# --- settings


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"training.seed": -1}, "training.seed=-1: must be at least 0"),
        ({"data.seed": -1}, "data.seed=-1"),
        ({"rollout.seed": -5}, "rollout.seed=-5"),
        ({"rollout.stop": [""]}, "rollout.stop holds an empty string"),
        ({"rollout.stop_token_ids": [-1]}, "token ids are at least 0"),
        ({"rollout.stop_token_ids": [99999]}, r"rollout.stop_token_ids=\[99999\]: the tokenizer has the ids 0 to"),
    ],
)
def test_numbers_that_cannot_work(override, named, inputs, tmp_path):
    with pytest.raises(ConfigError, match=named):
        GRPOTrainer(inputs["model"], config=keys(inputs, tmp_path / "run") | override).check()
    assert not (tmp_path / "run").exists()


def test_home_is_expanded(inputs, tmp_path, monkeypatch):
    from verl.config import load_config

    monkeypatch.setenv("HOME", str(tmp_path))
    base = ["model.path=~/m", "data.train_files=[~/t.jsonl]", "training.output_dir='~/out'"]
    config = load_config(None, base[:1] + base[2:] + ["data.train_files=['~/t.jsonl']"])
    assert config.model.path == f"{tmp_path}/m" and config.training.output_dir == f"{tmp_path}/out"
    assert config.data.train_files == [f"{tmp_path}/t.jsonl"]
    assert (
        load_config(None, [*base[:1], "data.train_files=[t]", "training.output_dir=~/out"]).training.output_dir
        == f"{tmp_path}/out"
    )


REWARD = "def score(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str) % 3)\n"


def test_a_run_is_evaluated_from_anywhere(inputs, tmp_path, monkeypatch, capsys):
    from verl.config import EVAL

    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("rw.py").write_text(REWARD)
    config = keys(inputs, "run", data__max_response_length=4, reward__function="rw.py:score", training__total_steps=1)
    GRPOTrainer(inputs["model"], config=config | {"rollout.n": 2}).fit()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("rw.py").write_text("raise RuntimeError('the wrong file')")
    main_eval.main(["--model_path", "../work/run", "--eval_dataset", inputs["test"]])
    (tmp_path / "work" / "run" / "config.yaml").write_text("")
    with pytest.raises(UserError, match=r"config\.yaml is empty, so the run's settings are not known"):
        trained_settings(["../work/run"], EVAL)


# --- rewards


NASTY = """
import os
class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "fork":
        if os.fork():
            os.wait()
        return 1.0
    if solution_str == "interrupt":
        raise KeyboardInterrupt("mine")
    if solution_str == "exit":
        raise GeneratorExit("mine")
    if solution_str == "unprintable":
        raise Unprintable
    return float(len(solution_str))
"""


def test_rewards_that_fork_or_raise_what_nobody_raises(tmp_path):
    from verl.rewards.functions import RewardRequest

    (tmp_path / "nasty.py").write_text(NASTY)
    texts = ["fork", "abc", "interrupt", "exit", "unprintable", "fork", "ab"]
    with ScoringPool(f"{tmp_path / 'nasty.py'}:score", num_workers=1, timeout_s=20) as pool:
        requests = [RewardRequest(data_source="", solution_str=text, ground_truth="") for text in texts]
        outcomes = pool.score(requests)
        pids = pool.pids
    assert all(isinstance(outcome, ScoreOutcome) for outcome in outcomes)
    assert [outcome.score for outcome in outcomes] == [1.0, 3.0, None, None, None, 1.0, 2.0]
    reasons = [outcome.failure for outcome in outcomes[2:5]]
    assert reasons == ["KeyboardInterrupt: mine", "GeneratorExit: mine", "Unprintable: (its text cannot be had)"]
    assert len(pids) == 1
