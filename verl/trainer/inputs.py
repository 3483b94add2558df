"""Everything a run reads, found and checked before a model is loaded or a device is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.schema import Config
from verl.data.datasets import PromptDataset, load_prompt_dataset
from verl.data.tokenizer import load_tokenizer
from verl.engines.train.loading import check_model_folder
from verl.errors import ConfigError
from verl.rewards.score import RewardScorer, build_reward


@dataclass(frozen=True, kw_only=True)
class RLInputs:
    """Tokenizer, data and reward of an RL run, all usable."""

    tokenizer: Any
    train: PromptDataset
    validation: PromptDataset | None
    reward: RewardScorer


def load_rl_inputs(config: Config) -> RLInputs:
    """Raises UserError, one line, for the first thing that cannot work."""
    reward = build_reward(config.reward)
    check_model_folder(config.model.path)
    if config.critic.path and config.algorithm.adv_estimator == "gae":
        check_model_folder(config.critic.path)
    tokenizer = load_tokenizer(config.model)
    train = load_prompt_dataset(config.data.train_files, config.data, config.model, tokenizer, "train")
    validation = None
    if config.data.val_files:
        validation = load_prompt_dataset(config.data.val_files, config.data, config.model, tokenizer, "test")
    for dataset in (train, validation):
        if dataset is not None:
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
