"""verl: reinforcement learning for post-training large language models.

`import verl` is cheap on purpose (no torch): the trainers load when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.config import Config, load_config
    from verl.trainer.auto import AutoTrainer, auto_select_trainer
    from verl.trainer.grpo import GRPOTrainer
    from verl.trainer.ppo import PPOTrainer, RLTrainer
    from verl.trainer.sft import SFTTrainer

__version__ = "0.1.0"

_HOMES = {
    "AutoTrainer": "verl.trainer.auto",
    "Config": "verl.config",
    "GRPOTrainer": "verl.trainer.grpo",
    "PPOTrainer": "verl.trainer.ppo",
    "RLTrainer": "verl.trainer.ppo",
    "SFTTrainer": "verl.trainer.sft",
    "auto_select_trainer": "verl.trainer.auto",
    "load_config": "verl.config",
}

__all__ = [
    "AutoTrainer",
    "Config",
    "GRPOTrainer",
    "PPOTrainer",
    "RLTrainer",
    "SFTTrainer",
    "__version__",
    "auto_select_trainer",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
