"""Reading configuration: files, defaults lists, overrides, types, unknown keys, round trips, the described schema."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import ANY, TRAINER, Config, config_from_dict, config_to_dict, config_to_yaml, describe_config, load_config
from verl.config.describe import field_docs
from verl.config.docs import refresh_markdown
from verl.config.fields import FIELDS, build_config, flat_values
from verl.errors import ConfigError, UserError

ROOT = Path(__file__).parent.parent
NEEDED = ["model.path=m", "data.train_files=d.parquet"]


def load(*overrides: str, file: Path | None = None, lines: list[str] | None = None) -> Config:
    return load_config(file, [*NEEDED, *overrides], printer=[].append if lines is None else lines.append)


def error_of(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, file=file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_schema_and_print_nothing():
    lines: list[str] = []
    config = load(lines=lines)
    assert lines == []
    expected = dataclasses.replace(
        Config(),
        model=dataclasses.replace(Config().model, path="m"),
        data=dataclasses.replace(Config().data, train_files=["d.parquet"]),
    )
    assert config == expected


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().actor.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("actor.lr=1e-5", "actor.lr", 1e-5),
        ("+actor.lr=1e-5", "actor.lr", 1e-5),
        ("++actor.lr=1e-5", "actor.lr", 1e-5),
        ("actor.lr='1e-5'", "actor.lr", 1e-5),
        ("actor.gradient_clip=1", "actor.gradient_clip", 1.0),
        ("rollout.n='8'", "rollout.n", 8),
        ("training.total_steps=1e3", "training.total_steps", 1000),
        ("training.total_steps=null", "training.total_steps", None),
        ("data.shuffle=false", "data.shuffle", False),
        ("data.shuffle='False'", "data.shuffle", False),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files=hf:openai/gsm8k:train", "data.train_files", ["hf:openai/gsm8k:train"]),
        ("rollout.stop_token_ids=2", "rollout.stop_token_ids", [2]),
        ("data.instruction='Think, then answer.'", "data.instruction", "Think, then answer."),
        ("algorithm.adv_estimator=GRPO", "algorithm.adv_estimator", "grpo"),
        ("model.dtype=BF16", "model.dtype", "bfloat16"),
        ("tracking.backends=[console,tensorboard]", "tracking.backends", ["console", "tensorboard"]),
    ],
)
def test_override_values(override: str, key: str, expected: object):
    value = flat_values(load(override))[key]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.lr=fast", ["actor.lr='fast'", "a finite number", "actor.lr=1e-06"]),
        ("actor.lr=true", ["actor.lr=True", "a finite number"]),
        ("actor.lr=inf", ["actor.lr=inf", "a finite number"]),
        ("actor.lr=null", ["actor.lr=null", "leave the key out for 1e-06"]),
        ("rollout.n=true", ["rollout.n=True", "a whole number"]),
        ("rollout.n=2.5", ["rollout.n=2.5", "a whole number", "rollout.n=8"]),
        ("data.shuffle=1", ["data.shuffle=1", "true or false"]),
        ("tracking.experiment=7", ["tracking.experiment=7", "text", "tracking.experiment='7'"]),
        ("algorithm.adv_estimator=gpro", ["'gpro'", "one of grpo, gae", "write algorithm.adv_estimator=grpo"]),
        ("tracking.backends=[console,tensorbord]", ["tensorbord", "write tracking.backends=tensorboard"]),
        ("reward.function_kwargs=3", ["reward.function_kwargs=3", "a mapping"]),
        ("rollout.stop_token_ids=[a]", ["rollout.stop_token_ids", "a list, each a whole number"]),
        ("training.learning_rate=fast", ["training.learning_rate (actor.lr)='fast'"]),
    ],
)
def test_wrong_types_name_key_value_type_and_fix(override: str, parts: list[str]):
    message = error_of(override)
    assert [part for part in parts if part not in message] == []


def test_unknown_key_names_nearest_keys_and_spellings():
    message = error_of("data.train_fils=x")
    assert message.startswith("unknown key data.train_fils; nearest keys: data.train_files,")
    assert "nearest known spellings: data.train_path" in message
    assert "actor_rollout_ref.rollout.n" in error_of("actor_rollout_ref.rolout.n=4").split("spellings:")[1]


def test_all_unknown_keys_are_named_at_once():
    message = error_of("actor.learn_rate=1", "rollout.temprature=1")
    assert "actor.learn_rate" in message
    assert "rollout.temperature" in message


def test_section_given_a_value():
    assert "actor is a section, not a key; set actor.{lr, " in error_of("actor=3")


@pytest.mark.parametrize("override", ["actor.lr", "--actor.lr=1", "actor.lr=a b=c", "=3"])
def test_malformed_override(override: str):
    assert repr(override) in error_of(override)


def test_sweep_is_refused():
    assert "write a list as [a,b]" in error_of("data.val_files=a,b")


def test_last_override_of_a_key_wins():
    assert load("actor.lr=1e-5", "actor.lr=2e-5").actor.lr == 2e-5


def test_tilde_resets_to_the_default(tmp_path: Path):
    file = write(tmp_path, "c.yaml", "actor: {lr: 1e-5}\ncritic: {lr: 2e-5, loss_coef: 0.5}\nrollout: {n: 4}\n")
    config = load("~actor.lr", "~critic", file=file)
    assert (config.actor.lr, config.critic, config.rollout.n) == (1e-6, Config().critic, 4)


def test_tilde_resets_whatever_spelling_set_the_key(tmp_path: Path):
    file = write(tmp_path, "c.yaml", "training: {learning_rate: 1e-5}\n")
    assert load("~actor.lr", file=file).actor.lr == 1e-6
    assert load("~training.learning_rate", file=file).actor.lr == 1e-6
    assert load("~actor.lr", "actor.lr=3e-6", file=file).actor.lr == 3e-6
    assert "unknown key actor.l" in error_of("~actor.l", file=file)


def test_override_beats_the_file_in_any_spelling(tmp_path: Path):
    file = write(tmp_path, "c.yaml", "training: {learning_rate: 2e-5}\n")
    lines: list[str] = []
    assert load("actor.lr=1e-6", file=file, lines=lines).actor.lr == 1e-6
    assert lines == ["config: training.learning_rate=2e-05: actor.lr decides"]


def test_interpolation_sees_overrides(tmp_path: Path):
    file = write(tmp_path, "c.yaml", "training: {seed: 7}\nrollout: {seed: '${training.seed}'}\n")
    assert load("training.seed=9", file=file).rollout.seed == 9
    assert "data.seed: Interpolation key 'training.sead' not found" in error_of("data.seed=${training.sead}", file=file)


def test_interpolated_environment_becomes_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_TEST_STEPS", "12")
    file = write(tmp_path, "c.yaml", "training: {total_steps: '${oc.env:VERL_TEST_STEPS}'}\n")
    assert load(file=file).training.total_steps == 12


def test_defaults_list_takes_presets_and_files_beside(tmp_path: Path):
    write(tmp_path, "base.yaml", "actor: {lr: 3e-6}\nrollout: {n: 2, top_k: 50}\n")
    file = write(tmp_path, "c.yaml", "defaults: [ppo, base]\nrollout: {n: 4}\n")
    config = load(file=file)
    assert config.algorithm.adv_estimator == "gae"
    assert (config.actor.lr, config.rollout.n, config.rollout.top_k) == (3e-6, 4, 50)


def test_files_own_spelling_beats_a_preset(tmp_path: Path):
    file = write(tmp_path, "c.yaml", "defaults: [grpo]\nalgorithm: {grpo_beta: 0.1}\n")
    assert load(file=file).algorithm.kl_loss_coef == 0.1


def test_defaults_list_composes_without_warnings(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    load(file=write(tmp_path, "c.yaml", "defaults: [grpo, cpu]\nactor: {lr: 1e-6}\n"))
    assert list(recwarn) == []


def test_missing_preset_names_those_there_are(tmp_path: Path):
    message = error_of(file=write(tmp_path, "c.yaml", "defaults: [gpro]\n"))
    assert "Could not load 'gpro'" in message
    assert "cpu, grpo, ppo" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("actor: [1\n", "is not valid YAML"),
        ("actor: {lr: 1e-6, lr: 1e-5}\n", "duplicate key lr"),
        ("- actor\n", "holds a list"),
        ("5\n", "is not valid YAML"),
        ("actor:\n  lr: ???\n", "actor.lr: Missing mandatory value"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, part: str):
    assert part in error_of(file=write(tmp_path, "c.yaml", text))


def test_missing_file_is_one_line():
    assert "config file 'nowhere.yaml' does not exist" in error_of(file=Path("nowhere.yaml"))


def test_empty_file_and_empty_sections(tmp_path: Path):
    assert load(file=write(tmp_path, "a.yaml", "")) == load()
    assert load(file=write(tmp_path, "b.yaml", "tools:\nactor: {}\nreward_model:\n")) == load()


def test_mapping_values_stay_mappings(tmp_path: Path):
    text = "reward: {type: custom, function: 'r.py:f', function_kwargs: {weights: {a: 1}, k: [1, 2]}}\n"
    config = load(file=write(tmp_path, "c.yaml", text))
    assert config.reward.function_kwargs == {"weights": {"a": 1}, "k": [1, 2]}


def test_required_keys():
    with pytest.raises(ConfigError, match=r"model.path is required; set model.path=..."):
        load_config(overrides=["data.train_files=d"])
    with pytest.raises(ConfigError, match=r"data.train_files is required"):
        load_config(overrides=["model.path=m"])
    assert load_config(overrides=["model.path=m"], purpose=TRAINER).data.train_files == []


def test_yaml_round_trip_of_every_key(tmp_path: Path):
    changed = {
        "model.path": "m",
        "data.train_files": ["a", "b"],
        "actor.lr": 3.3e-7,
        "actor.dual_clip": None,
        "reward.type": "custom",
        "reward.function": "r.py:f",
        "reward.function_kwargs": {"a": {"b": 1}},
        "data.instruction": "Réponds: 1, 2 #3",
        "tracking.experiment": "007",
    }
    config = build_config(changed)
    lines: list[str] = []
    assert load_config(write(tmp_path, "c.yaml", config_to_yaml(config)), printer=lines.append) == config
    assert config_from_dict(config_to_dict(config), printer=lines.append) == config
    assert lines == []


def test_config_from_dict_later_mappings_win():
    base = config_to_dict(load())
    config = config_from_dict(
        base, {"training.learning_rate": 2e-6}, {"actor": {"lr": 3e-6}, "grpo_beta": 0.1}, printer=[].append
    )
    assert (config.actor.lr, config.algorithm.kl_loss_coef) == (3e-6, 0.1)


def test_key_written_nested_and_dotted():
    with pytest.raises(ConfigError, match=r"actor.lr=1 and actor.lr=2: the key stands there twice"):
        config_from_dict({"actor": {"lr": 1}, "actor.lr": 2})


def test_every_field_is_documented_and_described():
    assert set(field_docs()) == set(FIELDS)
    text = describe_config()
    assert "actor.lr = 1.0e-06\n    AdamW's peak learning rate. `verl sft` takes 1e-5 unless this is set.\n" in text
    assert "model.path = (required)\n" in text
    assert "critic.lr = 1.0e-05\n    Larger than the actor's" in text  # the subclass's own string, not the base's
    assert [line for line in text.splitlines() if line.startswith("[")] == [f"[{f.name}]" for f in dataclasses.fields(Config)]


def test_documentation_tables_are_current():
    page = (ROOT / "docs/examples/config.md").read_text(encoding="utf-8")
    assert page.count("<!-- generated: ") == 3
    assert page == refresh_markdown(page), "run: python -m verl.config.docs docs/examples/config.md"


def test_reading_configuration_needs_no_torch():
    program = (
        "import sys; from verl.config import load_config; load_config(None, ['model.path=m', 'data.train_files=d']); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_config_error_is_a_user_error():
    assert issubclass(ConfigError, UserError)


def test_a_reward_function_alone_means_a_custom_reward():
    assert config_from_dict({"reward.function": "r.py:f"}, purpose=ANY).reward.type == "custom"
    with pytest.raises(ConfigError, match="would not run"):
        config_from_dict({"reward.function": "r.py:f", "reward.type": "accuracy"}, purpose=ANY)
