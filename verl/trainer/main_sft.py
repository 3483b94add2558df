"""`python -m verl.trainer.main_sft [--config FILE] [section.key=value ...]`: supervised fine-tuning on worked answers."""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.entry import run_main, run_training


def main(argv: Sequence[str]) -> None:
    """Fine-tune; every output goes to the run's folder."""
    from verl.config import SFT

    run_training(argv, description="Fine-tune a language model on prompts with answers.", purpose=SFT, make=_trainer)


def _trainer(config):
    from verl.trainer.sft import SFTTrainer  # heavy, and not needed to find a mistake in the configuration

    return SFTTrainer(config)


if __name__ == "__main__":
    run_main(main)
