"""What every entry point shares: the command line, and errors that are the user's to mend."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from verl.errors import UserError, WorkerError

if TYPE_CHECKING:
    from verl.config import Config, Purpose
    from verl.trainer.session import RunResult

_OVERRIDE = re.compile(r"^(\+{0,2}[A-Za-z_][\w.@/]*=|~[A-Za-z_])", re.DOTALL)


def run_main(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Call `main` with the arguments; a UserError becomes one line on stderr and exit code 2."""
    try:
        main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except WorkerError as error:  # it holds the rank's own traceback; the driver's would say nothing
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left (`verl config | head`); what Python still holds back has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options, overrides): `section.key=value`, `+section.key=value` and `~section.key` may stand anywhere."""
    overrides = [a for a in argv if _OVERRIDE.match(a)]
    return [a for a in argv if not _OVERRIDE.match(a)], overrides


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, overrides). `parser` gets `--config FILE`, and a usage line that shows the overrides."""
    parser.add_argument("--config", metavar="FILE", help="YAML file, or a preset (cpu, grpo, ppo)")
    parser.epilog = "section.key=value overrides the file; `verl config` lists the keys."
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%") + " [section.key=value ...]"
    options, overrides = split_overrides(argv)
    return parser.parse_args(options), overrides


class Trainer(Protocol):
    """What the training commands need of a trainer."""

    def dry_run(self) -> str: ...

    def fit(self) -> RunResult: ...


def run_training(argv: Sequence[str], *, description: str, purpose: Purpose, make: Callable[[Config], Trainer]) -> None:
    """A training command: read the configuration, then train or, with `--check`, say what would be done."""
    parser = argparse.ArgumentParser(prog=purpose.command, description=description)
    parser.add_argument("--check", action="store_true", help="check config, data, reward, model and output folder, then stop")
    args, overrides = parse_arguments(parser, argv)
    from verl.config import load_config
    from verl.observe.console import quiet_third_party

    quiet_third_party()
    trainer = make(load_config(args.config, overrides, purpose=purpose))
    if args.check:
        print(trainer.dry_run())
        print("check passed; nothing was trained or written")
        return
    result = trainer.fit()
    print(f"run: {result.run_dir}")
    if result.checkpoint is not None:
        print(f"checkpoint: {result.checkpoint}")
