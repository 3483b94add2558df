"""`python -m verl.trainer.main_ppo [--config FILE] [section.key=value ...]`: train with PPO, GRPO or what the config says."""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.entry import run_main, run_training


def main(argv: Sequence[str]) -> None:
    """Train; every output goes to the run's folder."""
    from verl.config import TRAIN

    run_training(argv, description="Train a language model with reinforcement learning.", purpose=TRAIN, make=_trainer)


def _trainer(config):
    from verl.trainer.ppo import RLTrainer  # heavy, and not needed to find a mistake in the configuration

    return RLTrainer(config)


if __name__ == "__main__":
    run_main(main)
