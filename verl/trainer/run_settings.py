"""The settings a model was trained with, for what is done with it later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verl.config import config_to_dict, load_config
from verl.config.fields import FIELDS
from verl.config.purpose import Purpose
from verl.config.read import flatten
from verl.errors import UserError
from verl.observe.records import CONFIG_FILE, INFO_FILE

_OF_THE_MACHINE = ("model.path", "model.tokenizer_path", "model.dtype", "training.*", "parallel.*", "data.max_val_rows")


def run_of(model_path: str) -> Path | None:
    """The run folder that a run, `checkpoints` or step folder (or a link to one) belongs to; None for any other model."""
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        return None
    for run in (folder, *folder.resolve().parents[:2]):
        if (run / CONFIG_FILE).is_file() and (run / "checkpoints").is_dir():
            return run
    return None


def trained_settings(model_paths: Sequence[str], purpose: Purpose) -> dict[str, Any]:
    """What the first run among the models was trained with, of the keys that `purpose` reads; canonical key -> value,
    where it is not the default. Prompts and rewards must be in training's form for a fair look at the model.

    Says what was taken, and where another run among the models differs.
    """
    runs = [run for path in model_paths if (run := run_of(path)) is not None]
    if not runs:
        return {}
    first, *others = [_settings(run, purpose) for run in runs]
    if first:
        print(f"settings of {runs[0] / CONFIG_FILE}: {', '.join(f'{key}={value}' for key, value in first.items())}")
    for run, other in zip(runs[1:], others, strict=True):
        differing = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if differing:
            print(f"warning: {run} was trained with another {', '.join(differing)}; all are run with that of {runs[0]}")
    return first


def _settings(run: Path, purpose: Purpose) -> dict[str, Any]:
    if not (run / CONFIG_FILE).read_bytes().strip():
        raise UserError(f"{run / CONFIG_FILE} is empty, so the run's settings are not known; give --config FILE")
    config = load_config(run / CONFIG_FILE, purpose=purpose, printer=lambda line: None)
    home = _started_in(run)
    return {
        key: _from(home, value) if key in ("reward.function", "model.chat_template") else value
        for key, value in flatten(config_to_dict(config)).items()
        if value != FIELDS[key].default and purpose.reads_key(key) and not any(fnmatchcase(key, p) for p in _OF_THE_MACHINE)
    }


def _started_in(run: Path) -> Path | None:
    """The working directory of the run's last start."""
    try:
        return Path(json.loads((run / INFO_FILE).read_bytes())[-1]["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _from(home: Path | None, value: str) -> str:
    """A path that the run took from its working directory, as seen from anywhere: `file.py:name`, or a file."""
    file, colon, name = value.partition(":")
    if home is None or not (home / file).is_file():
        return value
    return f"{home / file}{colon}{name}"
