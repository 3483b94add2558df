"""Cross-field checks: each error with its arithmetic and fix, each warning, and that sound settings pass in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.config import ANY, Config, check_config, config_from_dict
from verl.config.checks import _RANGES
from verl.config.fields import FIELDS
from verl.config.schema import AlgorithmConfig, RolloutConfig
from verl.errors import ConfigError


def lines_of(**keys: Any) -> list[str]:
    """Lines printed for keys whose dots are written as double underscores."""
    lines: list[str] = []
    given = {"model.path": "m", "data.train_files": ["d"]} | {key.replace("__", "."): value for key, value in keys.items()}
    config_from_dict(given, printer=lines.append)
    return lines


def error_of(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        lines_of(**keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mini_batch_divides_the_batch():
    message = error_of(data__train_batch_size=128, actor__mini_batch_size=48)
    assert message == (
        "actor.mini_batch_size=48 does not divide data.train_batch_size=128 (128 = 2 x 48 + 32); set it to 32 or 64"
    )
    assert "is over data.train_batch_size=128" in error_of(data__train_batch_size=128, actor__mini_batch_size=256)
    assert lines_of(data__train_batch_size=128, actor__mini_batch_size=64) == []


def test_critic_mini_batch_is_checked_where_there_is_a_critic():
    keys = {"data__train_batch_size": 100, "critic__mini_batch_size": 30}
    assert "critic.mini_batch_size=30 does not divide" in error_of(algorithm__adv_estimator="gae", **keys)
    assert lines_of(algorithm__adv_estimator="grpo", **keys) == []


def test_keep_best_needs_scores():
    held_out = {"training__keep_best": 1, "data__val_files": ["v"], "training__save_interval": 2, "training__eval_interval": 2}
    assert lines_of(**held_out) == []
    assert "training.keep_best=1 has no scores to go by; set data.val_files" in error_of(training__keep_best=1)
    assert "training.save_interval=0 is never; set" in error_of(**held_out | {"training__save_interval": 0})
    assert "training.eval_interval=0 is never; set" in error_of(**held_out | {"training__eval_interval": 0})
    assert "training.keep_best=-1: must be at least 0" in error_of(training__keep_best=-1)
    assert "best_metric=val/reward has no effect with training.keep_best=0" in error_of(training__best_metric="val/reward")
    message = error_of(**held_out, training__best_metric="val/pass@4")
    assert "training.best_metric=val/pass@4 is not measured by this run's validation; use one of val/accuracy, val/rew" in message
    assert lines_of(**held_out, training__best_metric="val/pass@4", rollout__val_n=6) == []
    assert "val/maj@6" in error_of(**held_out, training__best_metric="val/pass@3", rollout__val_n=6)


def test_too_few_rows_for_a_batch():
    assert "raise it to 256" in error_of(data__max_train_rows=100)


def test_lengths_against_the_model_and_the_cache():
    lengths = {"data__max_prompt_length": 300, "data__max_response_length": 500}
    message = error_of(rollout__max_model_len=700, **lengths)
    assert "300 + 500 = 800 is over rollout.max_model_len=700; raise it to 800" in message
    assert "does not fit rollout.kv_cache_tokens=799" in error_of(rollout__kv_cache_tokens=799, **lengths)
    assert lines_of(rollout__max_model_len=800, rollout__kv_cache_tokens=800, **lengths) == []
    assert "over data.max_response_length=500" in error_of(rollout__min_tokens=501, **lengths)


def test_grpo_needs_a_group():
    assert "a group of one has no baseline" in error_of(rollout__n=1)
    assert lines_of(rollout__n=1, algorithm__adv_estimator="gae") == []


@pytest.mark.parametrize("kind", ["k1", "abs"])
def test_kl_estimators_without_a_useful_gradient(kind: str):
    assert "algorithm.kl_estimator=k3" in error_of(algorithm__kl_loss_coef=0.1, algorithm__kl_estimator=kind)
    assert lines_of(algorithm__kl_in_reward=True, algorithm__kl_estimator=kind) == []


def test_adaptive_controller_needs_something_to_control():
    assert "algorithm.kl_in_reward=false" in error_of(algorithm__kl_controller="adaptive")
    assert "stays 0" in error_of(algorithm__kl_controller="adaptive", algorithm__kl_in_reward=True, algorithm__kl_coef=0)
    assert lines_of(algorithm__kl_controller="adaptive", algorithm__kl_in_reward=True) == []


def test_custom_reward_runs_or_is_an_error():
    assert "set reward.function=" in error_of(reward__type="custom")
    assert "would not run" in error_of(reward__function="r.py:f", reward__type="accuracy")
    assert "no effect" in error_of(reward__function_kwargs={"a": 1})
    assert lines_of(reward__type="custom", reward__function="r.py:f", reward__function_kwargs={"a": 1}) == []


def test_validation_needs_rows():
    assert "set data.val_files" in error_of(training__eval_interval=5)
    assert lines_of(training__eval_interval=5, data__val_files=["v"]) == []
    assert lines_of(training__eval_interval=0) == []


def test_resume_is_a_mode_or_a_folder(tmp_path: Path):
    assert "no such folder" in error_of(training__resume="atuo")
    assert lines_of(training__resume=str(tmp_path)) == []


def test_dialogue_settings_without_dialogue():
    assert "multi_turn.enable=false" in error_of(multi_turn__state_tracking=True)


def test_every_number_has_a_range_or_needs_none():
    free = {"rollout.top_k", "actor.entropy_coef", "reward.scale"}
    free |= {"reward.format_score", "reward.failure_reward"}
    numbers = {key for key, field in FIELDS.items() if field.type in (int, float)}
    assert set(_RANGES) == numbers - free


@pytest.mark.parametrize("key", _RANGES)
def test_ranges(key: str):
    limits = _RANGES[key]
    low = int(limits.low)
    outside = [low if limits.open_low else low - 1] + ([int(limits.high) + 1] if limits.high < 1e9 else [])
    for value in outside:
        message = error_of(**{key.replace(".", "__"): value})
        assert message.startswith(f"{key}={value}: must be ") or "not supported in this version" in message


def test_range_message():
    assert error_of(rollout__top_p=0) == "rollout.top_p=0: must be above 0 and at most 1"
    assert error_of(rollout__n=0) == "rollout.n=0: must be at least 1"
    assert "or -1 for off" in error_of(rollout__top_k=0)


def test_learning_rate_advice():
    assert lines_of(actor__lr=2e-5) == []  # the rate tutorials give for mathematical tasks
    (line,) = lines_of(actor__lr=5e-5)
    assert line.startswith("config: warning: actor.lr=5e-05 is above 2e-05")
    (line,) = lines_of(critic__lr=1e-3, algorithm__adv_estimator="gae")
    assert line.startswith("config: warning: critic.lr=0.001 is above 0.0001")


def test_small_models_stand_large_learning_rates(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hidden_size": 64}))
    assert lines_of(actor__lr=1e-3, model__path=str(tmp_path)) == []
    file.write_text(json.dumps({"hidden_size": 896}))
    assert len(lines_of(actor__lr=1e-3, model__path=str(tmp_path))) == 1


def test_clipping_switched_off_warns():
    (line,) = lines_of(actor__gradient_clip=0)
    assert line.startswith("config: warning: actor.gradient_clip=0 switches clipping off")
    assert len([line for line in lines_of(gradient_clip=0, algorithm__adv_estimator="gae") if "warning" in line]) == 2


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)])
def test_truncated_sampling_biases_generator_ratios(key: str, value: float):
    keys = {f"rollout__{key}": value}
    (line,) = lines_of(algorithm__old_logprobs="generator", **keys)
    assert f"rollout.{key}={value} with algorithm.old_logprobs=generator" in line
    assert lines_of(algorithm__old_logprobs="trainer", **keys) == []


def test_critic_settings_under_grpo_warn():
    lines = lines_of(algorithm__value_clip=0.4)
    assert lines[1] == ("config: warning: critic.value_clip: no effect with algorithm.adv_estimator=grpo, which trains no critic")
    assert len(lines_of(algorithm__value_clip=0.4, algorithm__adv_estimator="gae")) == 1


def test_bfloat16_on_a_cpu_warns():
    assert "several times slower" in lines_of(training__device="cpu", model__dtype="bfloat16")[0]


def test_built_configurations_are_checked_too():
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator='grop': expected one of grpo, gae"):
        check_config(Config(algorithm=AlgorithmConfig(adv_estimator="grop")), purpose=ANY)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout.engine=sglang is understood but not supported"):
        check_config(Config(rollout=RolloutConfig(engine="sglang")), purpose=ANY)
    check_config(Config(), purpose=ANY)
