"""What each command reads of the configuration.

A file may serve several commands, so what one of them has no use for may stand in it. Written as an override of that
command it is a mistake, and refused: it would change nothing, in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from verl.config.schema import OptimizerConfig
from verl.errors import ConfigError

SFT_LR = 1e-5
"""Fine-tuning's default learning rate: at RL's 1e-6 a pretrained model hardly moves in an epoch."""


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """A command as the configuration sees it."""

    command: str
    required: tuple[str, ...] = ()
    """Keys that must be set."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Where they differ from the schema's."""
    reads: tuple[str, ...] = ("*",)
    """Patterns of the keys that have an effect."""
    trains_by_rl: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)
    """Key without effect -> what does here what it seems to ask for."""

    def reads_key(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.reads)

    def refuse_idle(self, key: str, written: str) -> None:
        """Raise ConfigError when `key`, written as an override `written` of this command, would do nothing."""
        if self.reads_key(key):
            return
        instead = f"use {self.instead[key]}" if key in self.instead else "leave it out"
        raise ConfigError(f"{written} has no effect in `{self.command}`; {instead}")


TRAIN = Purpose(command="verl train", required=("model.path", "data.train_files"), trains_by_rl=True)
TRAINER = dataclasses.replace(TRAIN, command="a trainer", required=("model.path",))
"""A trainer made in Python, which may be given its prompts step by step."""
ANY = Purpose(command="verl config", trains_by_rl=True)

_OPTIMIZER = tuple(f"actor.{f.name}" for f in dataclasses.fields(OptimizerConfig))

SFT = Purpose(
    command="verl sft",
    required=("model.path", "data.train_files"),
    defaults={"actor.lr": SFT_LR},
    reads=("model.*", "data.*", *_OPTIMIZER, "training.*", "parallel.*", "memory_optimization.*", "tracking.*"),
    instead={"actor.mini_batch_size": "data.train_batch_size, the rows of an optimizer step"},
)

_INFERENCE = (
    *("model.*", "parallel.nnodes", "parallel.n_gpus_per_node", "parallel.data_parallel_size"),
    *("training.seed", "training.device", "training.runtime", "training.worker_timeout_s"),
    *("data.prompt_key", "data.answer_key", "data.system_prompt", "data.instruction", "data.apply_chat_template"),
    *("data.max_prompt_length", "data.max_response_length", "data.filter_overlong_prompts", "data.max_val_rows"),
    *("rollout.engine", "rollout.max_num_seqs", "rollout.max_model_len", "rollout.kv_cache_*", "rollout.gpu_memory_utilization"),
    "rollout.enforce_eager",
    *("rollout.stop", "rollout.stop_token_ids", "rollout.seed", "rollout.val_*"),
)
_HELD_OUT = {
    "rollout.n": "rollout.val_n",
    "rollout.temperature": "rollout.val_temperature (0: greedy)",
    "rollout.top_p": "rollout.val_top_p",
    "data.max_train_rows": "data.max_val_rows",
    "parallel.rollout_devices": "parallel.data_parallel_size: here all devices generate",
}
EVAL = Purpose(
    command="verl eval",
    reads=(*_INFERENCE, "reward.*"),
    instead={**_HELD_OUT, "data.val_files": "--eval_dataset", "data.train_files": "--eval_dataset"},
)
GENERATE = Purpose(
    command="verl generate",
    reads=_INFERENCE,
    instead={**_HELD_OUT, "data.val_files": "--input", "data.train_files": "--input", "training.output_dir": "--output"},
)
