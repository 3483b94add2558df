"""The commands as a user meets them: what they refuse, what they take from a run, what they leave behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from verl.config import EVAL, GENERATE, SFT, TRAIN, load_config
from verl.config.fields import FIELDS
from verl.errors import ConfigError, UserError
from verl.quickstart.model import build_model
from verl.quickstart.problems import generate_problems, write_jsonl
from verl.trainer import main_eval, main_generation, main_ppo, main_sft
from verl.trainer.grpo import GRPOTrainer
from verl.trainer.inputs import resolve_model
from verl.trainer.run_settings import run_of, trained_settings
from verl.trainer.session import run_directory
from verl.trainer.sft import SFTTrainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    problems = generate_problems(40, 0)
    build_model(folder / "model", [p.question + p.answer for p in problems], seed=0, hidden_size=32, num_layers=2)
    write_jsonl(problems[:30], folder / "train.jsonl")
    write_jsonl(problems[30:], folder / "test.jsonl")
    return {"model": str(folder / "model"), "train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}


def sft_keys(inputs, out, **changes):
    keys = {
        "data.train_files": [inputs["train"]],
        "data.train_batch_size": 8,
        "data.max_prompt_length": 96,
        "data.max_response_length": 64,
        "actor.lr": 1e-3,
        "training.total_steps": 3,
        "training.output_dir": str(out),
        "training.last_link": None,
        "tracking.plots": False,
    }
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


def as_overrides(keys) -> list[str]:
    return [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in keys.items()]


def rl_keys(inputs, out, **changes):
    reward = {"reward.function": f"{Path(__file__).resolve()}:digits", "data.max_response_length": 8, "rollout.n": 4}
    return sft_keys(inputs, out) | reward | {key.replace("__", "."): value for key, value in changes.items()}


def digits(data_source, solution_str, ground_truth, extra_info):
    """A reward that an untrained model gets some of."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def good_until_marked(data_source, solution_str, ground_truth, extra_info, marker):
    if Path(marker).exists():
        raise RuntimeError("the judge is down")
    return digits(data_source, solution_str, ground_truth, extra_info)


# --- what a command has no use for


@pytest.mark.parametrize(
    ("purpose", "override", "named"),
    [
        (EVAL, "rollout.n=4", "rollout.val_n"),
        (EVAL, "rollout.temperature=0.5", "rollout.val_temperature"),
        (EVAL, "data.val_files=[x]", "--eval_dataset"),
        (EVAL, "actor.lr=1", "leave it out"),
        (GENERATE, "rollout.n=4", "rollout.val_n"),
        (GENERATE, "rollout.temperature=0.5", "rollout.val_temperature"),
        (GENERATE, "reward.scale=2", "leave it out"),
        (GENERATE, "training.output_dir=x", "--output"),
        (SFT, "rollout.n=4", "leave it out"),
        (SFT, "reward.type=accuracy", "leave it out"),
        (SFT, "algorithm.adv_estimator=gae", "leave it out"),
        (SFT, "actor.mini_batch_size=4", "data.train_batch_size"),
    ],
)
def test_overrides_without_effect_are_refused(purpose, override, named):
    base = ["model.path=m", "data.train_files=[t]"] if purpose is SFT else []
    with pytest.raises(ConfigError, match="has no effect in `verl") as error:
        load_config(None, [*base, override], purpose=purpose)
    assert named in str(error.value) and override.split("=")[0] in str(error.value)


def test_a_file_may_serve_several_commands(tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text("model: {path: m}\ndata: {train_files: [t]}\nrollout: {n: 4}\nactor: {lr: 1e-6}\nreward: {scale: 2.0}\n")
    for purpose in (TRAIN, SFT, EVAL, GENERATE):
        assert load_config(file, purpose=purpose, printer=[].append).rollout.n == 4


def test_patterns_of_purposes_name_keys():
    from fnmatch import fnmatchcase

    for purpose in (SFT, EVAL, GENERATE):
        for pattern in purpose.reads:
            assert any(fnmatchcase(key, pattern) for key in FIELDS), pattern
        assert set(purpose.instead) <= set(FIELDS)
        assert not any(purpose.reads_key(key) for key in purpose.instead)


def test_fine_tuning_has_a_learning_rate_of_its_own(tmp_path):
    base = ["model.path=m", "data.train_files=[t]"]
    assert load_config(None, base, purpose=SFT).actor.lr == 1e-5 and load_config(None, base).actor.lr == 1e-6
    assert load_config(None, [*base, "~actor.lr"], purpose=SFT).actor.lr == 1e-5
    lines: list[str] = []
    assert load_config(None, [*base, "actor.lr=1e-6"], purpose=SFT, printer=lines.append).actor.lr == 1e-6
    assert len(lines) == 1 and "changes next to nothing" in lines[0]


# --- fine-tuning


def test_fine_tuning_measures_held_out_loss(inputs, tmp_path, capsys):
    keys = sft_keys(inputs, tmp_path / "run", data__val_files=[inputs["test"]], training__eval_interval=2)
    main_sft.main([f"model.path={inputs['model']}", *as_overrides(keys)])
    out = capsys.readouterr().out
    assert "sft on" in out and "30 training rows, 10 held-out rows, 3 steps of 8 rows, learning rate 0.001" in out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val/loss"] for row in rows if row["kind"] == "val"}
    assert list(losses) == [0, 2, 3] and losses[3] < losses[0]
    assert "Validation Loss" in out


def test_held_out_loss_is_the_mean_over_answer_tokens(inputs, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    keys = sft_keys(inputs, tmp_path / "run", data__val_files=[inputs["test"]], rollout__temperature=0.5)
    trainer = SFTTrainer(inputs["model"], config=keys)
    trainer.prepare()
    measured = trainer.validate()["val/loss"]
    model = AutoModelForCausalLM.from_pretrained(inputs["model"], dtype=torch.float32)
    total, count = 0.0, 0
    for ids, mask in trainer.validation:
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        picked = [float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids)) if mask[i]]
        total, count = total - sum(picked), count + len(picked)
    assert measured == pytest.approx(total / count, abs=1e-4)


# --- --check


def test_check_runs_the_reward_and_writes_nothing(inputs, tmp_path, capsys):
    keys = as_overrides(rl_keys(inputs, tmp_path / "run"))
    main_ppo.main([f"model.path={inputs['model']}", "--check", *keys])
    out = capsys.readouterr().out
    assert "GRPO" in out.upper() and "reward of the answer" in out and "1 update a step" in out
    assert out.endswith("check passed; nothing was trained or written\n")
    sft = as_overrides(sft_keys(inputs, tmp_path / "run"))
    main_sft.main([f"model.path={inputs['model']}", "--check", *sft])
    assert capsys.readouterr().out.endswith("check passed; nothing was trained or written\n")
    assert not (tmp_path / "run").exists()


CHECKED = {
    "reward raises": ({"reward.function": f"{Path(__file__).resolve()}:not_yet"}, "no judge here"),
    "output is a file": ({"training.output_dir": "{file}"}, "is a file"),
    "output below a file": ({"training.output_dir": "{file}/run"}, "no folder"),
    "critic warm-up over all steps": ({"algorithm.adv_estimator": "gae", "critic.warmup_steps": 3}, "never be trained"),
    "tensor ranks over the heads": (
        {"parallel.tensor_model_parallel_size": 3},
        "does not divide the model's num_attention_heads",
    ),
    "stages over the layers": ({"parallel.pipeline_model_parallel_size": 5}, "the model has only 2 layers"),
    "sequence ranks over the heads": ({"parallel.sequence_parallel_size": 8}, "does not fit 4 query and 2 key-value heads"),
    "slices over the ranks": ({"parallel.data_parallel_size": 2, "parallel.fsdp_size": 3}, "does not divide the 2 ranks"),
    "machines of CPUs": ({"parallel.nnodes": 2}, "parallel.nnodes=2, but this runs on CPUs"),
    "response over the positions": ({"data.max_response_length": 510}, "over the 512 positions"),
}


def not_yet(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("no judge here")


@pytest.mark.parametrize("case", CHECKED)
def test_check_finds(case, inputs, tmp_path):
    changes, named = CHECKED[case]
    (tmp_path / "file").write_text("")
    keys = rl_keys(inputs, tmp_path / "run") | changes
    keys = {k: v.format(file=tmp_path / "file") if isinstance(v, str) else v for k, v in keys.items()}
    with pytest.raises(UserError, match=named):
        GRPOTrainer(inputs["model"], config={k: v for k, v in keys.items() if k != "algorithm.adv_estimator"}).dry_run() if (
            "algorithm.adv_estimator" not in changes
        ) else main_ppo.main([f"model.path={inputs['model']}", "--check", *as_overrides(keys)])


def test_check_finds_a_finished_run_and_an_absent_tracker(inputs, tmp_path, monkeypatch):
    keys = sft_keys(inputs, tmp_path / "run")
    SFTTrainer(inputs["model"], config=keys).fit()
    with pytest.raises(UserError, match="nothing to train"):
        SFTTrainer(inputs["model"], config=keys).dry_run()
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None)
    keys = sft_keys(inputs, tmp_path / "new", tracking__backends=["console", "wandb"])
    with pytest.raises(UserError, match=r"wandb is not installed; run: pip install -e '.*\[tracking\]'"):
        SFTTrainer(inputs["model"], config=keys).dry_run()
    assert not (tmp_path / "new").exists()


# --- runs and what follows them


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory) -> Path:
    """A GRPO run whose prompts have an instruction."""
    out = tmp_path_factory.mktemp("runs") / "grpo"
    GRPOTrainer(inputs["model"], config=rl_keys(inputs, out, data__instruction="Think.", training__total_steps=1)).fit()
    return out


def test_a_run_stands_for_its_model(run, inputs, tmp_path):
    step = run / "checkpoints" / "step_000001"
    for path in (run, run / "checkpoints", run / "checkpoints" / "last", step):
        assert resolve_model(str(path)) == str(step.resolve())
        assert run_of(str(path)).samefile(run)
    assert run_of(inputs["model"]) is None and run_of("owner/name") is None
    trainer = SFTTrainer(str(run), config=sft_keys(inputs, tmp_path / "next", training__output_dir=None))
    assert trainer.config.model.path == str(step.resolve())
    assert run_directory(trainer.config, "sft") == Path("runs/sft-grpo")
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_evaluation_takes_the_settings_of_the_run(run, inputs, tmp_path, capsys):
    arguments = ["--eval_dataset", inputs["test"], "--output", str(tmp_path / "eval")]
    main_eval.main(["--model_path", str(run), *arguments])
    out = capsys.readouterr().out
    assert "settings of" in out and "data.instruction=Think." in out and "reward.function=" in out
    answers = [json.loads(line) for line in (tmp_path / "eval" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 10 and all("Think." in json.dumps(a["prompt"]) for a in answers)
    main_eval.main(["--model_path", str(run), inputs["model"], *arguments, "data.instruction=Other.", "reward.scale=2"])
    assert "Other." in (tmp_path / "eval" / "answers.jsonl").read_text()
    (tmp_path / "plain.yaml").write_text("data: {max_response_length: 4}\n")
    capsys.readouterr()
    main_eval.main(["--model_path", str(run), *arguments, "--config", str(tmp_path / "plain.yaml")])
    assert "settings of" not in capsys.readouterr().out
    assert "Think." not in (tmp_path / "eval" / "answers.jsonl").read_text()


def test_another_run_that_differs_is_named(run, inputs, tmp_path, capsys):
    other = tmp_path / "other"
    GRPOTrainer(inputs["model"], config=rl_keys(inputs, other, training__total_steps=1)).fit()
    capsys.readouterr()
    settings = trained_settings([inputs["model"], str(run), str(other)], EVAL)
    assert settings["data.instruction"] == "Think." and "training.output_dir" not in settings and "actor.lr" not in settings
    assert "warning: " in (out := capsys.readouterr().out) and "data.instruction" in out


OUTPUTS = {
    "eval": (main_eval.main, ["--model_path", "{model}", "--eval_dataset", "{test}", "--output", "{file}"], "is a file"),
    "generate": (main_generation.main, ["--model_path", "{model}", "--input", "{test}", "--output", "{folder}"], "is a folder"),
    "generate below a file": (
        *(main_generation.main, ["--model_path", "{model}", "--input", "{test}", "--output", "{file}/o.jsonl"]),
        "is no folder",
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_are_tested_first(case, inputs, tmp_path, monkeypatch):
    from verl.engines.train import loading

    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "_from_pretrained", no_model)
    main, arguments, named = OUTPUTS[case]
    (tmp_path / "file").write_text("")
    (tmp_path / "o.jsonl").mkdir()
    places = {"file": tmp_path / "file", "folder": tmp_path / "o.jsonl", **inputs}
    with pytest.raises(UserError, match=named):
        main([a.format(**places) for a in arguments])


def test_a_report_that_cannot_be_written(run, tmp_path):
    from verl.observe.report import main

    with pytest.raises(UserError, match="is a folder"):
        main([str(run), "--output", str(tmp_path)])


# --- resuming


def test_resuming_with_other_settings_says_so_and_keeps_the_old_ones(inputs, tmp_path, capsys):
    keys = sft_keys(inputs, tmp_path)
    SFTTrainer(inputs["model"], config=keys).fit()
    capsys.readouterr()
    SFTTrainer(inputs["model"], config=keys | {"training.total_steps": 4}).fit()
    assert "resuming with changed settings: training.total_steps 3 -> 4\n" in capsys.readouterr().out
    SFTTrainer(inputs["model"], config=keys | {"training.total_steps": 5, "actor.lr": 5e-4}).fit()
    assert "changed settings: actor.lr 0.001 -> 0.0005, training.total_steps 4 -> 5\n" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["actor"]["lr"] == 5e-4
    kept = [yaml.safe_load((tmp_path / f"config.{n}.yaml").read_text())["training"]["total_steps"] for n in (1, 2)]
    assert kept == [3, 4] and not (tmp_path / "config.3.yaml").exists()


def test_a_reward_that_breaks_down_ends_the_run_and_keeps_its_work(inputs, tmp_path):
    keys = rl_keys(inputs, tmp_path / "run", reward__function=f"{Path(__file__).resolve()}:good_until_marked")
    keys |= {"reward.function_kwargs": {"marker": str(tmp_path / "down")}}
    trainer = GRPOTrainer(inputs["model"], config=keys)
    step = trainer.step
    taken = []

    def counted(prompts):
        if trainer.global_step == 2:
            (tmp_path / "down").write_text("")
        taken.append([p.prompt.uid for p in prompts])
        return step(prompts)

    trainer.step = counted
    with pytest.raises(UserError, match=r"failed for all 32 samples of this step .*the judge is down"):
        trainer.fit()
    assert (tmp_path / "run" / "checkpoints" / "last").resolve().name == "step_000002"
    (tmp_path / "down").unlink()
    resumed = GRPOTrainer(inputs["model"], config=keys)
    again, step = [], resumed.step
    resumed.step = lambda prompts: (again.append([p.prompt.uid for p in prompts]), step(prompts))[1]
    assert resumed.fit().step == 3
    assert again == [taken[2]]  # the batch that was not learnt from comes again
    # ... and the run is the one that never broke down.
    whole = GRPOTrainer(inputs["model"], config=keys | {"training.output_dir": str(tmp_path / "whole")}).fit()
    one = load_file(str(tmp_path / "run" / "checkpoints" / "last" / "model.safetensors"))
    other = load_file(str(whole.checkpoint / "model.safetensors"))
    assert all((one[name] == other[name]).all() for name in one)


def test_checkpoints_can_be_read_by_who_can_read_the_rest(run):
    files = list((run / "checkpoints").rglob("*.safetensors"))
    assert files and {f.stat().st_mode for f in files} == {(run / "checkpoints/last/trainer.json").stat().st_mode}


def test_the_line_of_a_critic_that_warms_up(inputs, tmp_path, capsys):
    from verl.trainer.ppo import PPOTrainer

    PPOTrainer(inputs["model"], config=rl_keys(inputs, tmp_path, critic__warmup_steps=1, training__total_steps=2)).fit()
    out = capsys.readouterr().out
    first, second = (next(line for line in out.splitlines() if line.startswith(f"[Step {n}]")) for n in (1, 2))
    assert "critic only" in first and "critic only" not in second
    assert "the first 1 step for the critic alone" in out


# --- the Python side


def test_names_of_the_package():
    import verl

    assert verl.GRPOTrainer is GRPOTrainer and verl.SFTTrainer is SFTTrainer and verl.load_config is load_config
    assert {"AutoTrainer", "PPOTrainer"} <= set(dir(verl))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = verl.Nonsense
    shown = subprocess.run([sys.executable, "-m", "verl", "version"], capture_output=True, text=True)
    assert shown.stdout.strip() == verl.__version__


def test_a_yaml_file_configures_a_trainer(inputs, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"data: {{train_files: [{inputs['train']}], train_batch_size: 8}}\n")
    assert GRPOTrainer(inputs["model"], config=str(file)).config.data.train_batch_size == 8
    assert GRPOTrainer(inputs["model"], config=file, train_files="x.jsonl").config.data.train_files == ["x.jsonl"]
    with pytest.raises(ConfigError, match="learning_rate is no option of a trainer; give config="):
        GRPOTrainer(inputs["model"], learning_rate=1e-5)
    with pytest.raises(ConfigError, match="config is a int"):
        GRPOTrainer(inputs["model"], config=3)


def test_a_script_without_a_main_guard_gets_one_line(inputs, tmp_path):
    (tmp_path / "script.py").write_text(
        "from verl import GRPOTrainer\n"
        "def reward(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
        f"GRPOTrainer({inputs['model']!r}, train_files={inputs['train']!r}, reward_function=reward,\n"
        "    config={'data.train_batch_size': 8, 'data.max_response_length': 8, 'training.output_dir': 'run'}).fit()\n"
    )
    shown = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 1 and "if __name__ == '__main__'" in shown.stderr.splitlines()[-1]


def test_presets_need_no_file(tmp_path, monkeypatch):
    base = ["model.path=m", "data.train_files=[t]"]
    assert load_config("ppo", base).algorithm.adv_estimator == "gae"
    (tmp_path / "a.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"is a folder; give a YAML file in it: a\.yaml"):
        load_config(tmp_path, base)
    with pytest.raises(ConfigError, match="or a preset: cpu, grpo, ppo"):
        load_config("nothing", base)


def test_keys_can_be_looked_up(capsys):
    from verl.cli import main

    main(["config", "temperature"])
    out = capsys.readouterr().out
    assert "rollout.val_temperature = 0.0" in out and "actor.lr" not in out
    with pytest.raises(SystemExit):
        main(["config", "nonsense"])
    assert "no key holds nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "meant"), [("true", "auto"), ("false", "never")])
def test_resume_as_a_switch(value, meant):
    lines: list[str] = []
    base = ["model.path=m", "data.train_files=[t]"]
    assert load_config(None, [*base, f"training.resume={value}"], printer=lines.append).training.resume == meant
    assert lines == [f"config: training.resume={value.capitalize()} -> {meant}"]


def test_help_shows_the_overrides(capsys):
    for main in (main_ppo.main, main_sft.main, main_eval.main, main_generation.main):
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "[section.key=value ...]" in capsys.readouterr().out


def test_missing_answers_are_named(inputs, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1"}) + "\n" for i in range(8)))
    GRPOTrainer(inputs["model"], config=rl_keys(inputs, tmp_path / "run", data__train_files=[str(tmp_path / "q.jsonl")])).check()
    assert "ground_truth=None (set data.answer_key)" in capsys.readouterr().out


def test_doctor_names_what_is_missing(capsys, monkeypatch):
    import importlib.util

    from verl.cli import main

    main(["doctor"])
    out = capsys.readouterr().out
    assert "ok  torch" in out and "all that verl needs is here" in out and "cores" in out
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name in ("ray", "wandb") else found(name, *a))
    with pytest.raises(SystemExit):
        main(["doctor"])
    out = capsys.readouterr().out
    assert "!!  ray" in out and "to mend: ray" in out and "pip install -e '" in out and "[tracking]'" in out


def test_export_writes_the_master_weights(run, tmp_path, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.cli import main

    for dtype in ("float32", "bfloat16"):
        main(["export", str(run), str(tmp_path / dtype), "--dtype", dtype])
        model = AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert model.dtype == getattr(torch, dtype)
        AutoTokenizer.from_pretrained(tmp_path / dtype)
        expected = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "last")
        for (name, mine), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other.to(mine.dtype)), name
    main(["export", str(run), str(tmp_path / "default")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "default").dtype == torch.float32
    with pytest.raises(SystemExit):
        main(["export", str(run), str(tmp_path / "default")])
    assert "exists and is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(run), str(run / "config.yaml" / "x")])
    assert "config.yaml is no folder; name another" in capsys.readouterr().err
