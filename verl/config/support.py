"""What is understood but not offered by this version. A later version lifts a feature by deleting its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NotYet:
    """A key of which some values ask for what this version cannot do."""

    refuses: Callable[[Any], bool]
    instead: str
    """The fix, for the message."""


def _over_one(value: Any) -> bool:
    return isinstance(value, int | float) and value > 1


def _is_one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value.lower() in names


def _is_not(*names: Any) -> Callable[[Any], bool]:
    return lambda value: value not in names


_ONE_RANK = "set it to 1; tensor, pipeline and sequence parallel sizes of the section parallel split the model"
_WHOLE = "set it to 1: the native engine holds the model whole on each device"
_NO_OFFLOAD = (
    "set it to false; smaller actor.max_tokens_per_micro_batch and memory_optimization.gradient_checkpointing save memory"
)
_NO_TURNS = "leave it out: episodes have one turn"
_NO_LORA = "leave it out: all weights are trained"
_NO_MEGATRON = "leave it out: there is no Megatron engine"

NOT_YET: dict[str, NotYet] = {
    # canonical keys
    "algorithm.adv_estimator": NotYet(
        refuses=_is_one_of(
            "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "grpo_passk", "gdpo"
        ),
        instead="use grpo or gae",
    ),
    "rollout.engine": NotYet(refuses=_is_one_of("sglang", "tgi"), instead="use native or vllm"),
    "reward.type": NotYet(refuses=_is_one_of("multi_step", "toxicity"), instead="use accuracy, or custom with reward.function"),
    "training.max_policy_lag": NotYet(refuses=bool, instead="set it to 0: rollouts are synchronous"),
    "tools.names": NotYet(refuses=bool, instead="leave it empty"),
    "multi_turn.enable": NotYet(refuses=bool, instead=_NO_TURNS),
    # keys of others for which there is no field
    "reward.steps_weight": NotYet(refuses=bool, instead="leave it out: use reward.type=custom for step-wise scores"),
    "reward.calculator": NotYet(refuses=bool, instead="set it to false"),
    "data.image_key": NotYet(refuses=bool, instead="leave it out: prompts are text"),
    "data.truncation": NotYet(refuses=_is_not("error"), instead="leave it out: data.filter_overlong_prompts drops long prompts"),
    "data.custom_cls.path": NotYet(refuses=bool, instead="write the rows to parquet or JSONL"),
    "actor_rollout_ref.model.lora_rank": NotYet(refuses=bool, instead=_NO_LORA),
    "actor_rollout_ref.model.lora_alpha": NotYet(refuses=bool, instead=_NO_LORA),
    "actor_rollout_ref.model.target_modules": NotYet(refuses=bool, instead=_NO_LORA),
    "actor_rollout_ref.model.enable_activation_offload": NotYet(refuses=bool, instead=_NO_OFFLOAD),
    "actor_rollout_ref.actor.policy_loss.loss_mode": NotYet(refuses=_is_not("vanilla"), instead="use vanilla"),
    "actor_rollout_ref.actor.strategy": NotYet(refuses=_is_not("fsdp", "fsdp2"), instead=_NO_MEGATRON),
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": NotYet(refuses=_over_one, instead=_ONE_RANK),
    "actor_rollout_ref.actor.megatron.context_parallel_size": NotYet(refuses=_over_one, instead=_ONE_RANK),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": NotYet(refuses=_over_one, instead=_WHOLE),
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": NotYet(refuses=bool, instead=_NO_TURNS),
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": NotYet(refuses=bool, instead=_NO_TURNS),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": NotYet(refuses=bool, instead=_NO_TURNS),
    "algorithm.filter_groups.enable": NotYet(refuses=bool, instead="set it to false"),
    "algorithm.use_pf_ppo": NotYet(refuses=bool, instead="set it to false"),
    "critic.strategy": NotYet(refuses=_is_not("fsdp", "fsdp2"), instead=_NO_MEGATRON),
    "critic.model.lora_rank": NotYet(refuses=bool, instead=_NO_LORA),
    "reward_model.enable": NotYet(refuses=bool, instead="use a reward function: reward.type=custom"),
    "reward_model.reward_manager": NotYet(refuses=_is_not("naive"), instead="use naive, or reward.type=custom"),
    "reward.reward_manager.name": NotYet(refuses=_is_not("naive"), instead="use naive, or reward.type=custom"),
    "trainer.rollout_data_dir": NotYet(refuses=bool, instead="leave it out: tracking.log_samples writes samples.jsonl"),
    "trainer.validation_data_dir": NotYet(refuses=bool, instead="leave it out"),
    "trainer.val_only": NotYet(refuses=bool, instead="use verl eval"),
    "trainer.default_hdfs_dir": NotYet(refuses=bool, instead="leave it out: checkpoints are local files"),
}  # fmt: skip
"""Key, canonical or foreign -> the values refused. Other values of a foreign key ask for what happens anyway."""


def refuse_unsupported(key: str, value: Any, written: str = "") -> None:
    """Raise ConfigError when `key=value` asks for something this version does not have.

    Args:
        written: `name=value` as the user wrote it, where that differs, for the message.
    """
    row = NOT_YET.get(key)
    if row is not None and row.refuses(value):
        raise ConfigError(f"{written or f'{key}={value}'} is understood but not supported in this version; {row.instead}")
