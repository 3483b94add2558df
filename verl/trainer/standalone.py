"""A trained model on its own, outside training: evaluation and generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl.config.schema import Config
from verl.controller import Runtime, WorkerGroup, WorkerSpec
from verl.data.datasets import PromptDataset, load_prompt_dataset
from verl.data.tokenizer import load_tokenizer
from verl.data.types import Trajectory
from verl.errors import DataError
from verl.observe.evaluation import EvalSummary
from verl.rewards.score import RewardScorer, build_reward
from verl.trainer.inputs import check_context_length, check_stop_tokens, resolve_model
from verl.trainer.roles import closing_runtime, resource_pool, start_runtime
from verl.trainer.validation import evaluate_prompts

_DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def resolve_dataset(path: str) -> str:
    """The file or folder at `path`, or the file that it names without its suffix."""
    if path.startswith("hf:") or Path(path).exists():
        return path
    for suffix in _DATA_SUFFIXES:
        if Path(path + suffix).is_file():
            return path + suffix
    raise DataError(f"{path}: no such file or folder (nor with {', '.join(_DATA_SUFFIXES)}); give an existing data set")


def load_for_inference(
    config: Config, model_path: str, dataset: str, reward: RewardScorer | None = None
) -> tuple[Runtime, WorkerGroup, PromptDataset, Config]:
    """A rollout group over one model, the runtime that carries it, and the data set as that model's tokenizer sees it.
    Data and reward are checked first."""
    # Here all devices generate.
    parallel = replace(config.parallel, rollout_devices=None)
    config = replace(config, parallel=parallel, model=replace(config.model, path=resolve_model(model_path)))
    tokenizer = load_tokenizer(config.model)
    check_stop_tokens(config, tokenizer)
    prompts = load_prompt_dataset([resolve_dataset(dataset)], config.data, config.model, tokenizer, "test")
    check_context_length(config, prompts)
    if reward is not None:
        reward.check(prompts.prompts)
    from verl.workers.rollout import RolloutWorker

    spec = WorkerSpec(RolloutWorker, {"config": config})
    runtime = start_runtime(config)
    rollout = runtime.spawn(resource_pool(config), {"rollout": spec})["rollout"]
    return runtime, rollout, prompts, config


def evaluate_model(config: Config, model_path: str, dataset: str, name: str) -> tuple[EvalSummary, list[Trajectory]]:
    """Answer the data set with the model and measure the answers."""
    with build_reward(config.reward) as reward:
        runtime, rollout, prompts, config = load_for_inference(config, model_path, dataset, reward)
        with closing_runtime(runtime):
            return evaluate_prompts(rollout, prompts, reward, config, name)


def model_names(paths: Sequence[str]) -> list[str]:
    """Short names that tell the models apart: as many trailing path components as that takes."""
    parts = [Path(p).absolute().parts for p in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
