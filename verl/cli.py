"""`verl train|sft|eval|generate|convert|export|plan|config|doctor|report`: a thin front to the entry points."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

import verl
from verl.trainer.entry import parse_arguments, run_main

_ENTRY_POINTS = {
    "train": ("verl.trainer.main_ppo", "train with reinforcement learning"),
    "sft": ("verl.trainer.main_sft", "supervised fine-tuning"),
    "eval": ("verl.trainer.main_eval", "evaluate models side by side"),
    "generate": ("verl.trainer.main_generation", "answer every prompt of a data set"),
}


def _config(argv: Sequence[str]) -> None:
    """Print the keys with default and meaning, or the resolved configuration of --config and overrides."""
    parser = argparse.ArgumentParser(prog="verl config", description=_config.__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="show only keys that hold one of these words (a section, say)")
    args, overrides = parse_arguments(parser, argv)
    from verl.config import ANY, config_to_yaml, describe_config, load_config

    if args.config is None and not overrides:
        print(describe_config(args.words))
    else:
        print(config_to_yaml(load_config(args.config, overrides, purpose=ANY, printer=lambda line: print(line, file=sys.stderr))))


def _convert(argv: Sequence[str]) -> None:
    """Convert a GGUF file, or one carried by an installed package, to a Hugging Face model folder."""
    parser = argparse.ArgumentParser(prog="verl convert", description=_convert.__doc__)
    parser.add_argument("source", help="a .gguf file, or the name of an importable package that carries one")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)
    from verl.models.gguf import convert_gguf
    from verl.observe.console import quiet_third_party

    quiet_third_party()
    print(f"written: {convert_gguf(args.source, args.output, dtype=args.dtype)}")


def _report(argv: Sequence[str]) -> None:
    """Summarise runs in the terminal and as one HTML page."""
    from verl.observe.report import main

    main(argv)


def _doctor(argv: Sequence[str]) -> None:
    from verl.observe.doctor import main

    main(argv)


def _export(argv: Sequence[str]) -> None:
    from verl.checkpoint.export import main

    main(argv)


def _plan(argv: Sequence[str]) -> None:
    from verl.planning.command import main

    main(argv)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "convert": (_convert, "GGUF to a Hugging Face model folder"),
    "config": (_config, "list the configuration keys, or resolve a configuration"),
    "export": (_export, "a checkpoint's weights as a Hugging Face model folder"),
    "plan": (_plan, "GPU memory a model needs, and a layout that fits"),
    "doctor": (_doctor, "versions, devices, engines, and what is missing"),
    "report": (_report, "tables, plots and an HTML page of runs"),
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    helps = {name: text for name, (_, text) in [*_ENTRY_POINTS.items(), *_COMMANDS.items()]}
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: verl COMMAND ...\n\n" + "\n".join(f"  {name:<10} {text}" for name, text in helps.items()))
        return
    command, *rest = argv
    if command in ("--version", "version"):
        print(verl.__version__)
    elif command in _ENTRY_POINTS:
        run_main(importlib.import_module(_ENTRY_POINTS[command][0]).main, rest)
    elif command in _COMMANDS:
        run_main(_COMMANDS[command][0], rest)
    else:
        print(f"error: unknown command {command!r}; use one of {', '.join(helps)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
