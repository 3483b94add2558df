"""`python -m verl.trainer.main_ppo [--config FILE] [section.key=value ...]`: train with PPO, GRPO or what the config says."""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.entry import config_parser, run_main, split_overrides


def main(argv: Sequence[str]) -> None:
    """Train; every output goes to the run's folder."""
    parser = config_parser("verl train", "Train a language model with reinforcement learning.")
    parser.add_argument("--check", action="store_true", help="check config, data, reward and model folder, then stop")
    options, overrides = split_overrides(argv)
    args = parser.parse_args(options)
    from verl.config import load_config
    from verl.observe.console import quiet_third_party

    quiet_third_party()
    config = load_config(args.config, overrides)
    from verl.trainer.ppo import RLTrainer

    trainer = RLTrainer(config)
    if args.check:
        print(trainer.check())
        return
    result = trainer.fit()
    print(f"run: {result.run_dir}")
    if result.checkpoint is not None:
        print(f"checkpoint: {result.checkpoint}")


if __name__ == "__main__":
    run_main(main)
