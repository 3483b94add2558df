"""Whole runs on a tiny model: PPO, GRPO and SFT, resumed runs, what a run leaves, inputs that cannot work."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl.checkpoint.manager import read_manifest
from verl.checkpoint.tensors import read_tensors
from verl.config import config_from_dict, load_config
from verl.config.checks import validation_metrics
from verl.errors import UserError
from verl.observe.metrics import unknown_metrics
from verl.quickstart.model import build_model
from verl.quickstart.problems import generate_problems, write_jsonl
from verl.trainer import main_generation
from verl.trainer.grpo import GRPOTrainer
from verl.trainer.ppo import PPOTrainer, RLTrainer
from verl.trainer.sft import SFTTrainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    problems = generate_problems(40, 0)
    build_model(folder / "model", [p.question + p.answer for p in problems], seed=0, hidden_size=32, num_layers=2)
    write_jsonl(problems[:30], folder / "train.jsonl")
    write_jsonl(problems[30:], folder / "test.jsonl")
    return {"model": str(folder / "model"), "train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}


def config(inputs, out, **changes):
    keys = {
        "data.train_files": [inputs["train"]],
        "data.train_batch_size": 8,
        "data.max_prompt_length": 96,
        "data.max_response_length": 8,
        "rollout.n": 4,
        "actor.lr": 1e-3,
        "reward.type": "custom",
        "reward.function": f"{Path(__file__).resolve()}:digits",
        "training.total_steps": 3,
        "training.output_dir": str(out),
        "training.last_link": None,
        "tracking.plots": False,
    }
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


def digits(data_source, solution_str, ground_truth, extra_info):
    """A reward that an untrained model gets some of."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, role: str = "actor") -> dict[str, torch.Tensor]:
    last = run / "checkpoints" / "last" / role
    return read_tensors(last)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def comparable(rows: list[dict]) -> list[dict]:
    """Metrics without what depends on the clock."""
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(("timing_s/", "perf/tokens"))} for row in rows]


def test_grpo_run(inputs, tmp_path):
    given = config(inputs, tmp_path, data__val_files=[inputs["test"]], algorithm__kl_loss_coef=0.1, training__save_interval=1)
    result = GRPOTrainer(inputs["model"], config=given).fit()
    rows = rows_of(tmp_path)
    steps = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in steps] == [1, 2, 3] and result.step == 3
    for row in rows:
        names = [name for name in row if name not in ("step", "kind", "time")]
        assert unknown_metrics(names) == []
        assert all(math.isfinite(row[name]) for name in names)
    assert steps[0]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert all(row["actor/ratio_min"] == row["actor/ratio_max"] == 1 for row in steps)
    assert [row["step"] for row in rows if row["kind"] == "val"] == [0, 3]
    kept = sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == ["step_000002", "step_000003"]
    assert result.checkpoint is not None and result.checkpoint.resolve().name == "step_000003"


def test_the_checkpoint_is_a_hugging_face_model(inputs, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = GRPOTrainer(inputs["model"], config=config(inputs, tmp_path, training__total_steps=1))
    trainer.fit()
    last = tmp_path / "checkpoints" / "last"
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(last), AutoTokenizer.from_pretrained(last)
    ids = tokenizer("Ada has 3 apples.", return_tensors="pt")["input_ids"]
    master = {n.removeprefix("weights."): t for n, t in read_tensors(last / "actor").items() if n.startswith("weights.")}
    assert all(torch.equal(p, master[n]) for n, p in loaded.named_parameters())
    assert torch.isfinite(loaded(ids).logits).all()


def test_ppo_run_with_mini_batches_and_adaptive_kl(inputs, tmp_path):
    given = config(
        inputs,
        tmp_path,
        actor__mini_batch_size=4,
        actor__ppo_epochs=2,
        critic__warmup_steps=1,
        algorithm__kl_in_reward=True,
        algorithm__kl_controller="adaptive",
    )
    PPOTrainer(inputs["model"], config=given).fit()
    rows = rows_of(tmp_path)
    assert "actor/pg_loss" not in rows[0] and rows[0]["critic/vf_loss"] > 0
    assert rows[1]["actor/approx_kl"] > 0 and rows[1]["actor/ratio_max"] > 1
    assert rows[0]["reward/kl_per_sequence"] == pytest.approx(0, abs=1e-5)
    assert rows[2]["reward/kl_coef"] != rows[0]["reward/kl_coef"]
    assert all(unknown_metrics([n for n in row if n not in ("step", "kind", "time")]) == [] for row in rows)


def test_generator_and_trainer_agree(inputs, tmp_path):
    trainer = GRPOTrainer(inputs["model"], config=config(inputs, tmp_path))
    trainer.prepare()
    from verl.data.batch import TokenBatch

    batch = TokenBatch.from_trajectories(trainer.generate(next(iter(trainer.loader))))
    difference = (trainer.actor.compute_log_probs(batch) - batch.generator_logprobs)[batch.loss_mask]
    assert difference.abs().max() < 1e-4
    trainer.loader.close()
    trainer.inputs.reward.close()


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(kind, stop, inputs, tmp_path, capsys):
    """Thirty rows in batches of eight: step 4 crosses the end of the first epoch."""
    trainer = {"grpo": GRPOTrainer, "ppo": PPOTrainer, "sft": SFTTrainer}[kind]
    common = {"training__total_steps": 6, "actor__lr_schedule": "cosine", "training__save_interval": 1, "training__keep_last": 0}
    if kind == "sft":
        common |= {"data__max_response_length": 64, "reward__type": "accuracy", "reward__function": None}
    trainer(inputs["model"], config=config(inputs, tmp_path / "whole", **common)).fit()
    # The same run, as it was when it was killed after step `stop`.
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut, symlinks=True)
    for step in range(stop + 1, 7):
        shutil.rmtree(cut / "checkpoints" / f"step_{step:06d}")
    assert "resuming" not in capsys.readouterr().out
    trainer(inputs["model"], config=config(inputs, cut, **common)).fit()
    assert f"resuming after step {stop} from" in capsys.readouterr().out
    for role in ("actor", "critic") if kind == "ppo" else ("actor",):
        assert_same(weights(tmp_path / "whole", role), weights(cut, role))
    assert comparable(rows_of(cut)) == comparable(rows_of(tmp_path / "whole"))


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_the_best_checkpoint_stays_under_a_link_of_its_own(kind, inputs, tmp_path):
    trainer = {"grpo": GRPOTrainer, "sft": SFTTrainer}[kind]
    common = {"training__save_interval": 1, "training__eval_interval": 1, "training__keep_last": 1, "training__keep_best": 1}
    if kind == "grpo":
        common |= {"rollout__val_n": 3, "rollout__val_temperature": 1.0}
    else:
        # So large a rate that the first step is the best.
        common |= {"data__max_response_length": 64, "reward__type": "accuracy", "reward__function": None, "actor__lr": 0.5}
    for total in (2, 4):  # the second goes on from the first, with scores from its manifests
        given = config(inputs, tmp_path, data__val_files=[inputs["test"]], training__total_steps=total, **common)
        trainer(inputs["model"], config=given).fit()
    metric = "val/reward" if kind == "grpo" else "val/loss"
    logged = [row for row in rows_of(tmp_path) if row["kind"] == "val"]
    assert set(logged[0]) - {"step", "kind", "time"} == set(
        validation_metrics(config_from_dict(given | {"model.path": "m"}, printer=[].append), sft=kind == "sft")
    )
    scores = {row["step"]: row[metric] for row in logged if row["step"] > 0}
    best = (min if kind == "sft" else max)(scores, key=lambda step: scores[step])
    root = tmp_path / "checkpoints"
    assert (root / "best").resolve() == root / f"step_{best:06d}" and (root / "last").resolve() == root / "step_000004"
    assert read_manifest((root / "best").resolve()).validation[metric] == scores[best]
    assert {p.name for p in root.glob("step_*")} >= {f"step_{best:06d}", "step_000004"}


def test_resume_refuses_what_it_cannot_continue(inputs, tmp_path):
    GRPOTrainer(inputs["model"], config=config(inputs, tmp_path, training__total_steps=1)).fit()
    with pytest.raises(UserError, match=r"nothing to train: .* is at step 1 of 1; raise training.total_steps"):
        GRPOTrainer(inputs["model"], config=config(inputs, tmp_path, training__total_steps=1)).fit()
    with pytest.raises(UserError, match=r"belongs to another run \(data.train_batch_size was 8, is 10\)"):
        GRPOTrainer(inputs["model"], config=config(inputs, tmp_path, data__train_batch_size=10)).fit()
    result = GRPOTrainer(inputs["model"], config=config(inputs, tmp_path, training__resume="never")).fit()
    assert result.step == 3


def test_micro_batches_cannot_change_the_result(inputs, tmp_path):
    for name, tokens in (("one", 100_000), ("many", 128)):
        given = config(inputs, tmp_path / name, actor__max_tokens_per_micro_batch=tokens, training__total_steps=2)
        GRPOTrainer(inputs["model"], config=given).fit()
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    for name in one:
        if name.startswith("weights/"):
            assert torch.allclose(one[name], many[name], atol=2e-5), name


def test_a_failing_reward_costs_its_own_samples(inputs, tmp_path):
    function = tmp_path / "reward.py"
    function.write_text(
        "import time\ncalls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    global calls\n    calls += 1\n"
        "    if calls == 3: raise ValueError('no')\n"
        "    if calls == 5: time.sleep(60)\n"
        "    return float(calls % 2)\n"
    )
    given = config(
        inputs, tmp_path / "run", reward__function=f"{function}:compute_score", reward__timeout_s=1.0, reward__workers=1
    )
    GRPOTrainer(inputs["model"], config=given | {"training.total_steps": 1}).fit()
    row = rows_of(tmp_path / "run")[0]
    # Call 5 hangs; the worker that replaces the killed one counts from 1 and fails its own calls 3 and 5.
    assert row["reward/failures"] >= 2 and row["reward/timeouts"] >= 1
    assert row["reward/failures"] < 32


def test_groups_without_variance_do_not_stop_a_run(inputs, tmp_path):
    function = tmp_path / "reward.py"
    function.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    given = config(inputs, tmp_path / "run", reward__function=f"{function}:compute_score", actor__weight_decay=0.0)
    GRPOTrainer(inputs["model"], config=given).fit()
    rows = rows_of(tmp_path / "run")
    assert all(row["reward/zero_std_groups"] == 1 and row["actor/grad_norm"] == 0 for row in rows)
    base, last = load_file(Path(inputs["model"]) / "model.safetensors"), weights(tmp_path / "run")
    assert all(torch.equal(base[name], last[f"weights/{name}"]) for name in base if f"weights/{name}" in last)


def test_interrupting_a_run_keeps_its_work(inputs, tmp_path):
    class Interrupted(GRPOTrainer):
        def step(self, prompts):
            if self.global_step == 1:
                signal.raise_signal(signal.SIGINT)
            return super().step(prompts)

    with pytest.raises(KeyboardInterrupt):
        Interrupted(inputs["model"], config=config(inputs, tmp_path, training__total_steps=5)).fit()
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step_000002"
    assert GRPOTrainer(inputs["model"], config=config(inputs, tmp_path, training__total_steps=5)).fit().step == 5


BAD = {
    "missing file": (["data.train_files=[nowhere.parquet]"], "nowhere.parquet"),
    "empty data set": (["data.train_files=[{empty}]"], "empty.jsonl"),
    "missing column": (["data.prompt_key=absent"], "absent"),
    "prompt longer than the limit": (["data.max_prompt_length=4", "data.filter_overlong_prompts=false"], "max_prompt_length"),
    "all prompts too long": (["data.max_prompt_length=4"], "max_prompt_length"),
    "unknown key": (["data.train_batchsize=4"], "data.train_batch_size"),
    "wrong type": (["data.train_batch_size=many"], "data.train_batch_size"),
    "more prompts than rows": (["data.train_batch_size=64"], "64"),
    "mini-batch over the batch": (["actor.mini_batch_size=16"], "mini_batch_size"),
    "reward that cannot be imported": (["reward.type=custom", "reward.function=no_such_module:f"], "no_such_module"),
    "folder without weights": (["model.path={noweights}"], "noweights"),
    "missing model folder": (["model.path=./nothing"], "nothing"),
    "missing config file": (["--config", "none.yaml"], "none.yaml"),
    "broken checkpoint": (["training.resume={empty}"], "empty"),
    "missing validation file": (["data.val_files=[gone.jsonl]"], "gone.jsonl"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_a_model_is_loaded(case, inputs, tmp_path, capsys, monkeypatch):
    from verl.engines.train import loading
    from verl.trainer.entry import run_main
    from verl.trainer.main_ppo import main

    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "_from_pretrained", no_model)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "noweights").mkdir()
    shutil.copy(Path(inputs["model"]) / "config.json", tmp_path / "noweights")
    given, named = BAD[case]
    given = [g.format(empty=tmp_path / "empty.jsonl", noweights=tmp_path / "noweights") for g in given]
    base = [
        f"model.path={inputs['model']}",
        f"data.train_files=[{inputs['train']}]",
        "data.train_batch_size=8",
        "data.max_response_length=8",
    ]
    with pytest.raises(SystemExit) as exit_:
        run_main(main, [*base, "training.output_dir=run", *given])
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and named in lines[0], lines
    assert not (tmp_path / "run").exists()


def test_rows_of_the_guides(inputs, tmp_path, monkeypatch):
    """The guide's classes take a model config and say why AutoTrainer chose; nothing is loaded before fit()."""
    from verl.trainer.auto import AutoTrainer, auto_select_trainer

    model_config = {"path": inputs["model"]}
    assert auto_select_trainer("math_reasoning", model_config).algorithm.name == "grpo"
    assert auto_select_trainer("dialogue", model_config).algorithm.name == "ppo"
    assert GRPOTrainer(model_config, grpo_beta=0.1).config.algorithm.kl_loss_coef == 0.1
    ppo = PPOTrainer(model_config, clip_epsilon=0.3)
    assert (ppo.config.actor.clip_low, ppo.config.actor.clip_high, ppo.algorithm.name) == (0.3, 0.3, "ppo")
    auto = AutoTrainer(model_config, task_analysis=True)
    assert auto.choice.reasons and isinstance(auto, RLTrainer)


def test_second_guides_configuration_trains(inputs, tmp_path, monkeypatch):
    """Section 4.2 of the second guide, with a local model and three steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guide.yaml").write_text(f"""
data:
  train_path: "{inputs["train"]}"
  batch_size: 8
  seq_len: 128
actor_rollout_ref:
  model_name_or_path: "{inputs["model"]}"
  actor_lr: 1e-6
  rollout_batch_size: 64
  num_rollout_per_prompt: 2
reward_model:
  type: "accuracy"
  reward_scale: 1.0
critic:
  critic_lr: 5e-6
  value_loss_coef: 0.1
trainer:
  algorithm: "PPO"
  total_steps: 2
  save_interval: 1
""")
    result = RLTrainer(load_config("guide.yaml")).fit()
    assert result.step == 2 and Path("checkpoints/last/config.json").is_file()
    command = [sys.executable, "-m", "verl.trainer.main_eval", "--model_path", "./checkpoints/last", "--eval_dataset"]
    command += [inputs["test"].removesuffix(".jsonl"), "data.max_response_length=8"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert all(word in shown.stdout for word in ("accuracy", "steps", "complete", "95 % interval"))


def test_a_reader_that_leaves_early_causes_no_traceback():
    command = f"{sys.executable} -m verl.cli config | head -1"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert len(shown.stdout.splitlines()) == 1 and shown.stderr == ""


def test_generation_writes_responses(inputs, tmp_path):
    import pandas as pd

    from verl.trainer.main_generation import main

    arguments = ["--model_path", inputs["model"], "--input", inputs["test"], "--output", str(tmp_path / "out.parquet")]
    main([*arguments, "rollout.val_n=2", "rollout.val_temperature=1", "data.max_response_length=4"])
    table = pd.read_parquet(tmp_path / "out.parquet")
    assert len(table) == 10 and all(len(responses) == 2 for responses in table["responses"])


def test_first_guides_script_trains_and_logs(inputs, tmp_path):
    """The first guide's preprocessing and training commands as written; a small local model stands in by override."""
    import pandas as pd

    root = Path(__file__).resolve().parent.parent
    raw = [{"question": p.question, "answer": p.answer} for p in generate_problems(24, 5)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k_raw.json").write_text(json.dumps(raw))
    preprocess = [sys.executable, str(root / "examples/data_preprocess/gsm8k.py"), "--input_path", "./data/gsm8k_raw.json"]
    subprocess.run([*preprocess, "--output_path", "./data/gsm8k_processed"], check=True, cwd=tmp_path, capture_output=True)
    overrides = {
        "actor.model.path": inputs["model"],
        "data.dataset_path": tmp_path / "data" / "gsm8k_processed",
        "data.train_batch_size": 8,
        "data.max_response_length": 8,
        "rollout.n": 2,
        "actor.model.dtype": "float32",
        "training.total_steps": 2,
        "training.output_dir": tmp_path / "run",
        "training.last_link": "null",
    }
    script = ["bash", "run_qwen2-7b_math.sh", "--config", "../../config/math_train.yaml"]
    shown = subprocess.run(
        [*script, *(f"{key}={value}" for key, value in overrides.items())],
        cwd=root / "examples/grpo_trainer",
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "algorithm.grpo_beta -> algorithm.kl_loss_coef" in shown.stdout
    assert re.search(r"^\[Step 1\] Reward: [\d.]+ \| Policy KL: [\d.e-]+ \| Length: \d+", shown.stdout, re.MULTILINE)
    assert re.search(r"^\[Step 2\] Final Reward: [\d.]+$", shown.stdout, re.MULTILINE)
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert {"episode_reward", "kl_divergence", "response_length"} <= set(table.columns) and len(table) == 2
    assert (tmp_path / "run" / "curves.png").is_file()


def test_an_output_folder_that_cannot_be_made_is_one_line(inputs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; name a folder"):
        GRPOTrainer(inputs["model"], config=config(inputs, tmp_path / "file")).fit()


def test_generation_does_not_overwrite_its_input(inputs, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1"}\n')
    with pytest.raises(UserError, match="is the input"):
        main_generation.main(["--model_path", str(inputs["model"]), "--input", str(rows), "--output", str(rows)])
    assert rows.read_text() == '{"prompt": "1 + 1"}\n'
