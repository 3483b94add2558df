"""From what a Python caller gives a trainer to a `Config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from verl.config import TRAINER, Config, Purpose, config_from_dict, config_to_dict
from verl.config.read import flatten, read_file
from verl.errors import ConfigError
from verl.rewards.functions import refuse_training_while_importing

_SECTIONS = frozenset(f.name for f in fields(Config))


def configure(
    model_config: Config | str | Path | Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    purpose: Purpose = TRAINER,
    config: Mapping[str, Any] | str | Path | None = None,
    train_files: str | Sequence[str] | None = None,
    val_files: str | Sequence[str] | None = None,
    reward_function: str | Callable[..., Any] | None = None,
    **unknown: Any,
) -> Config:
    """The configuration a trainer class works with; `given` (what the class itself sets) wins.

    Args:
        model_config: a Config; a model folder or hub id; a `model` section; or a dict of sections (any spelling).
        config: further keys, nested or dotted, in any spelling; or a YAML file of them.
        train_files, val_files: shorthands for the keys of section `data`.
        reward_function: `package.module:name`, `file.py:name`, or a function defined at a module's top level.
    Raises:
        ConfigError: in one line, as `load_config` does.
    """
    refuse_training_while_importing()
    if unknown:
        raise ConfigError(
            f"{next(iter(unknown))} is no option of a trainer; give config={{'section.key': value}} (`verl config` lists the "
            "keys), train_files, val_files or reward_function"
        )
    shorthands = _shorthands(train_files, val_files, reward_function)
    return config_from_dict(_sections_of(model_config), _keys_of(config), shorthands, given, purpose=purpose)


def _keys_of(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        return read_file(config)
    if config is None or isinstance(config, Mapping):
        return config or {}
    if isinstance(config, Config):
        return config_to_dict(config)
    raise ConfigError(f"config is a {type(config).__name__}; give a dict of keys, a YAML file or a Config")


def _sections_of(model_config: Config | str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(model_config, Config):
        return flatten(config_to_dict(model_config))
    if isinstance(model_config, str | Path):
        return {"model.path": str(model_config)}
    if isinstance(model_config, Mapping):
        whole = any(str(key).split(".")[0] in _SECTIONS for key in model_config)
        return flatten(model_config if whole else {"model": model_config})
    raise ConfigError(f"model_config is a {type(model_config).__name__}; give a model folder, a hub id, a dict or a Config")


def _shorthands(train_files: Any, val_files: Any, reward_function: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, files in (("data.train_files", train_files), ("data.val_files", val_files)):
        if files is not None:
            keys[key] = [files] if isinstance(files, str) else list(files)
    if reward_function is not None:
        keys |= {"reward.type": "custom", "reward.function": _import_path(reward_function)}
    return keys


def _import_path(function: str | Callable[..., Any]) -> str:
    """Scoring processes import the function, so it needs a name they can find."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"reward_function={name or function!r} cannot be imported by scoring processes; define it at a module's top level"
        )
    if function.__module__ == "__main__":
        file = getattr(function, "__globals__", {}).get("__file__")
        if file is None:
            raise ConfigError(
                f"reward_function={name} lives in an interactive session; put it in a file and give 'file.py:{name}'"
            )
        return f"{file}:{name}"
    return f"{function.__module__}:{name}"
