"""Everything a run reads, found and checked before a model is loaded or a device is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.checkpoint.manager import MANIFEST, check_integrity, resolve_checkpoint
from verl.config.schema import Config
from verl.data.datasets import PromptDataset, load_prompt_dataset
from verl.data.tokenizer import load_tokenizer
from verl.engines.train.loading import check_model_folder, context_length
from verl.errors import ConfigError
from verl.rewards.score import RewardScorer, build_reward


@dataclass(frozen=True, kw_only=True)
class RLInputs:
    """Tokenizer, data and reward of an RL run, all usable."""

    tokenizer: Any
    train: PromptDataset
    validation: PromptDataset | None
    reward: RewardScorer


def resolve_model(path: str) -> str:
    """A model folder or hub id as it is; for a run or checkpoint folder, the model of its newest checkpoint.

    Raises UserError when it can be none of these.
    """
    folder = Path(path).expanduser()
    is_run = (folder / "checkpoints").is_dir() or any(folder.glob("step_*"))
    if (folder / MANIFEST).exists() or (is_run and not (folder / "config.json").is_file()):
        checkpoint = resolve_checkpoint(folder)
        check_integrity(checkpoint, "*.safetensors")
        return str(checkpoint)
    check_model_folder(path)
    return path


def resolve_models(config: Config) -> Config:
    """`config` with the model itself at every place where a run or checkpoint folder stands for one."""
    config = replace(config, model=replace(config.model, path=resolve_model(config.model.path)))
    if config.critic.path and config.algorithm.adv_estimator == "gae":
        config = replace(config, critic=replace(config.critic, path=resolve_model(config.critic.path)))
    return config


def check_stop_tokens(config: Config, tokenizer: Any) -> None:
    """Raises ConfigError for an id that the tokenizer does not have."""
    unknown = [token for token in config.rollout.stop_token_ids if token >= len(tokenizer)]
    if unknown:
        raise ConfigError(f"rollout.stop_token_ids={unknown}: the tokenizer has the ids 0 to {len(tokenizer) - 1}")


def check_context_length(config: Config, dataset: PromptDataset) -> None:
    """Raises ConfigError when the longest prompt with a response may take more positions than the model has."""
    limit, lengths = context_length(config.model.path), dataset.lengths
    if limit is None or lengths is None:
        return
    prompt, response = int(lengths.max()), config.data.max_response_length
    if prompt + response > limit:
        raise ConfigError(
            f"data.max_response_length={response} after the longest prompt of {prompt} tokens makes {prompt + response}, over "
            f"the {limit} positions of {config.model.path}; lower it or data.max_prompt_length, or scale the model's rope"
        )


def load_rl_inputs(config: Config) -> RLInputs:
    """Raises UserError, one line, for the first thing that cannot work."""
    reward = build_reward(config.reward)
    tokenizer = load_tokenizer(config.model)
    train = load_prompt_dataset(config.data.train_files, config.data, config.model, tokenizer, "train")
    validation = None
    if config.data.val_files:
        validation = load_prompt_dataset(config.data.val_files, config.data, config.model, tokenizer, "test")
    check_stop_tokens(config, tokenizer)
    for dataset in (train, validation):
        if dataset is not None:
            check_context_length(config, dataset)
            reward.check(dataset.prompts)
    return RLInputs(tokenizer=tokenizer, train=train, validation=validation, reward=reward)


def planned_steps(config: Config, num_rows: int) -> int:
    """Training steps of the run: total_steps, or what max_epochs over the data give."""
    if config.data.train_batch_size > num_rows:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {num_rows} usable training rows; "
            f"set it to at most {num_rows}"
        )
    epochs = config.training.max_epochs * num_rows // config.data.train_batch_size
    return config.training.total_steps or epochs
