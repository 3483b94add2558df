"""`python -m verl.trainer.main_sft [--config FILE] [section.key=value ...]`: supervised fine-tuning on worked answers."""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.entry import config_parser, run_main, split_overrides


def main(argv: Sequence[str]) -> None:
    """Fine-tune; every output goes to the run's folder."""
    parser = config_parser("verl sft", "Fine-tune a language model on prompts with answers.")
    options, overrides = split_overrides(argv)
    args = parser.parse_args(options)
    from verl.config import load_config
    from verl.observe.console import quiet_third_party

    quiet_third_party()
    config = load_config(args.config, overrides)
    from verl.trainer.sft import SFTTrainer

    result = SFTTrainer(config).fit()
    print(f"run: {result.run_dir}")
    if result.checkpoint is not None:
        print(f"checkpoint: {result.checkpoint}")


if __name__ == "__main__":
    run_main(main)
