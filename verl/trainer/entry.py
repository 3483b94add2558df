"""What every entry point shares: the command line, and errors that are the user's to mend."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from verl.errors import UserError

_OVERRIDE = re.compile(r"^(\+{0,2}[A-Za-z_][\w.@/]*=|~[A-Za-z_])", re.DOTALL)


def run_main(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> None:
    """Call `main` with the arguments; a UserError becomes one line on stderr and exit code 2."""
    try:
        main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
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


def config_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser for `--config FILE`, to be used on what `split_overrides` leaves."""
    parser = argparse.ArgumentParser(prog=prog, description=description, usage=f"{prog} [--config FILE] [section.key=value ...]")
    parser.add_argument("--config", metavar="FILE", help="YAML file; `verl config` lists the keys")
    return parser
