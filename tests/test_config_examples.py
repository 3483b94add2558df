"""Shipped configurations, presets and scripts compose; so do the snippets that tutorials show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import load_config
from verl.errors import ConfigError

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "config").glob("*.yaml"))
PRESETS = sorted((ROOT / "verl/config/presets").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_configurations_compose_without_warnings(file: Path):
    lines: list[str] = []
    config = load_config(file, printer=lines.append)
    assert config.model.path
    assert [line for line in lines if "warning" in line] == []


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.name)
def test_presets_compose(file: Path, tmp_path: Path):
    user = tmp_path / "user.yaml"
    user.write_text(f"defaults: [{file.stem}]\nmodel: {{path: m}}\ndata: {{train_files: d}}\n")
    lines: list[str] = []
    load_config(user, printer=lines.append)
    assert lines == []  # presets are written in canonical keys


def test_math_configuration():
    lines: list[str] = []
    config = load_config(ROOT / "config/math_train.yaml", printer=lines.append)
    assert (config.algorithm.adv_estimator, config.algorithm.kl_loss_coef) == ("grpo", 0.1)
    assert (config.model.path, config.model.dtype) == ("Qwen/Qwen2-7B-Instruct", "bfloat16")
    assert (config.data.train_batch_size, config.data.train_files) == (1024, ["./data/gsm8k_processed"])
    assert (config.training.max_epochs, config.actor.lr) == (10, 2e-5)
    assert lines == [
        "config: algorithm.grpo_beta -> algorithm.kl_loss_coef",
        "config: actor.model.path -> model.path",
        "config: actor.model.dtype -> model.dtype",
        "config: data.dataset_path -> data.train_files",
        "config: training.learning_rate -> actor.lr",
    ]


def test_ppo_snippet_of_the_tutorial(tmp_path: Path):
    file = tmp_path / "ppo.yaml"
    file.write_text(
        """
data: {train_path: "./data/gsm8k_train.parquet", batch_size: 256, seq_len: 512}
actor_rollout_ref: {model_name_or_path: "Qwen/Qwen-0.6B", actor_lr: 1e-6, rollout_batch_size: 64, num_rollout_per_prompt: 2}
reward_model: {type: "accuracy", reward_scale: 1.0}
critic: {critic_lr: 5e-6, value_loss_coef: 0.1}
trainer: {algorithm: "PPO", total_steps: 1000, save_interval: 100}
"""
    )
    lines: list[str] = []
    config = load_config(file, printer=lines.append)
    assert (config.data.train_files, config.data.train_batch_size) == (["./data/gsm8k_train.parquet"], 256)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (256, 256)
    assert (config.model.path, config.actor.lr) == ("Qwen/Qwen-0.6B", 1e-6)
    assert (config.rollout.max_num_seqs, config.rollout.n) == (64, 2)
    assert (config.reward.type, config.reward.scale) == ("accuracy", 1.0)
    assert (config.critic.lr, config.critic.loss_coef) == (5e-6, 0.1)
    assert config.algorithm.adv_estimator == "gae"
    assert (config.training.total_steps, config.training.save_interval) == (1000, 100)
    assert len(lines) == len(set(lines)) == 14


def test_sections_of_the_tutorial_for_later_versions_are_refused_by_name():
    for override in (
        "reward.type=multi_step",
        "reward.steps_weight=[0.3,0.3,0.4]",
        "reward.calculator=true",
        'tools=["calculator"]',
        "max_turns=8",
        "context_window_size=4096",
        "state_tracking=true",
    ):
        key = override.split("=")[0]
        with pytest.raises(ConfigError, match=rf"^{key}=.* is understood but not supported in this version"):
            load_config(ROOT / "config/math_train.yaml", [override], printer=[].append)


def test_parallel_section_of_the_tutorial_for_several_gpus():
    overrides = [f"parallel.{key}" for key in ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2")]
    config = load_config(ROOT / "config/math_train.yaml", [*overrides, "parallel.n_gpus_per_node=4"], printer=[].append)
    assert (config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size) == (2, 2)


def test_memory_section_of_the_tutorial():
    overrides = [
        "memory_optimization.activation_checkpointing=true",
        "memory_optimization.gradient_checkpointing=true",
        "memory_optimization.dtype=bfloat16",
        "parallel.pipeline_model_parallel_size=1",
        "gradient_clip=1.0",
        "algorithm.value_clip=0.4",
    ]
    config = load_config(ROOT / "config/math_train.yaml", overrides, printer=[].append)
    assert config.memory_optimization.activation_checkpointing
    assert config.memory_optimization.gradient_checkpointing
    assert (config.model.dtype, config.critic.value_clip) == ("bfloat16", 0.4)


def run_script(script: str, *arguments: str, cwd: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """Working folder and arguments with which a script starts Python; this interpreter notes them down instead."""
    recorder = tmp_path / "python"
    recorder.write_text(f"#!{sys.executable}\nimport os, sys\nprint(os.getcwd(), *sys.argv[1:], sep='\\n')\n")
    recorder.chmod(0o755)
    result = subprocess.run(
        ["bash", script, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHON": str(recorder)},
        capture_output=True,
        text=True,
        check=True,
    )
    folder, *arguments_seen = result.stdout.splitlines()
    return folder, arguments_seen


def test_math_script_from_its_own_folder(tmp_path: Path):
    folder, arguments = run_script(
        "run_qwen2-7b_math.sh",
        "--config",
        "../../config/math_train.yaml",
        "actor.lr=1e-6",
        "data.instruction='Think, then answer.'",
        cwd=ROOT / "examples/grpo_trainer",
        tmp_path=tmp_path,
    )
    assert Path(folder) == ROOT
    assert arguments[:3] == ["-m", "verl.trainer.main_ppo", "--config"]
    config = load_config(arguments[3], arguments[4:], printer=[].append)
    assert (config.actor.lr, config.data.instruction) == (1e-6, "Think, then answer.")
    assert config.data.train_files == ["./data/gsm8k_processed"]


@pytest.mark.parametrize("form", ["--config=mine.yaml", "--config mine.yaml"])
def test_math_script_takes_configuration_relative_to_the_caller(form: str, tmp_path: Path):
    script = str(ROOT / "examples/grpo_trainer/run_qwen2-7b_math.sh")
    folder, arguments = run_script(script, *form.split(), cwd=tmp_path, tmp_path=tmp_path)
    assert Path(folder) == ROOT
    assert arguments[2:] == ["--config", f"{tmp_path}/mine.yaml"]


def test_math_script_without_arguments(tmp_path: Path):
    _, arguments = run_script("run_qwen2-7b_math.sh", cwd=ROOT / "examples/grpo_trainer", tmp_path=tmp_path)
    assert Path(arguments[3]).samefile(ROOT / "config/math_train.yaml")
    assert len(arguments) == 4


@pytest.mark.parametrize("script", sorted((ROOT / "examples/ppo_trainer").glob("*.sh")), ids=lambda script: script.name)
def test_ppo_scripts(script: Path, tmp_path: Path):
    folder, arguments = run_script(str(script), "training.total_steps=3", cwd=tmp_path, tmp_path=tmp_path)
    assert Path(folder) == ROOT
    config = load_config(ROOT / arguments[3], arguments[4:], printer=[].append)
    assert config.algorithm.adv_estimator == "gae"
    assert config.training.total_steps == 3
