"""Reads what the user wrote, through Hydra and OmegaConf, as flat keys. Knows nothing of what the keys mean, except
which of them hold mappings."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.fields import FIELDS
from verl.config.spellings import SPELLINGS
from verl.config.support import NOT_YET
from verl.errors import ConfigError

DEFAULTS, FILE, OVERRIDES = 0, 1, 2
"""Sources of a key, weakest first."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A value as the user wrote it."""

    value: Any
    source: int


def read_sources(config_file: str | Path | None, overrides: Sequence[str]) -> tuple[dict[str, Written], set[str]]:
    """All keys that were written, and those to reset (`~key`).

    Raises:
        ConfigError: the file is missing or no YAML, an override is not of Hydra's grammar, an interpolation fails.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree, own_keys = (OmegaConf.create({}), set()) if config_file is None else _read_file(Path(config_file))
    override_keys: set[str] = set()
    resets: set[str] = set()
    for text in overrides:
        key, value, delete = _parse_override(text)
        if delete:
            inside = [known for known in FIELDS if known.startswith(key + ".")]
            resets.update(inside or [key])
            override_keys = {old for old in override_keys if old != key and not old.startswith(key + ".")}
            continue
        override_keys.update(flatten({key: value}))
        resets.discard(key)
        try:
            OmegaConf.update(tree, key, value, force_add=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            raise ConfigError(f"override {text!r} does not fit what is set before it: {_first_line(error)}") from None
    try:
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}; set it, or write the value itself") from None
    assert isinstance(values, dict)
    written = {}
    for key, value in flatten(values).items():
        source = OVERRIDES if key in override_keys else FILE if key in own_keys else DEFAULTS
        written[key] = Written(value=value, source=source)
    return written, resets


def read_file(config_file: str | Path) -> dict[str, Any]:
    """Flat keys of a YAML file and of what its `defaults:` list names."""
    return {key: written.value for key, written in read_sources(config_file, ())[0].items()}


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys. A mapping that is itself a value (reward.function_kwargs) stays one.

    Raises:
        ConfigError: one key stands there twice, nested and dotted, with different values.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if (value is None or value == {}) and _is_section(key):
            continue
        inside = {key: value}
        if isinstance(value, Mapping) and (_is_section(key) or (value and key not in _known_keys())):
            inside = flatten(value, f"{key}.")
        for leaf, leaf_value in inside.items():
            if leaf in flat and flat[leaf] != leaf_value:
                raise ConfigError(f"{leaf}={flat[leaf]} and {leaf}={leaf_value}: the key stands there twice; keep one of them")
            flat[leaf] = leaf_value
    return flat


@functools.cache
def _known_keys() -> frozenset[str]:
    return frozenset((*FIELDS, *SPELLINGS, *NOT_YET))


@functools.cache
def _sections() -> frozenset[str]:
    parents: set[str] = set()
    for key in _known_keys():
        parts = key.split(".")
        parents.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return frozenset(parents)


def _is_section(key: str) -> bool:
    return key in _sections()


def _read_file(path: Path) -> tuple[Any, Iterable[str]]:
    """The file's tree, composed with its `defaults:`, and the keys the file itself sets."""
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    presets = _presets()
    if str(path) in presets:
        return OmegaConf.load(presets[str(path)]), ()
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.y*ml"))
        raise ConfigError(
            f"config file {str(path)!r} is a folder; give a YAML file{' in it: ' + ', '.join(inside[:5]) if inside else ''}"
        )
    if not path.is_file():
        raise ConfigError(
            f"config file {str(path)!r} does not exist (from {os.getcwd()}); give the path of a YAML file, or a preset: "
            f"{', '.join(presets)}"
        )
    try:
        tree = OmegaConf.load(path)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"config file {str(path)!r} holds a list; write sections such as `actor:` with keys below them")
    own = OmegaConf.to_container(tree)
    assert isinstance(own, dict)
    if "defaults" not in own:
        return tree, set(flatten(own))
    own.pop("defaults")
    return _compose(path), set(flatten(own))


def _presets() -> dict[str, Path]:
    return {file.stem: file for file in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}


def _compose(path: Path) -> Any:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if path.suffix != ".yaml":
        raise ConfigError(f"config file {str(path)!r} has a defaults list, so its name must end in .yaml; rename it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra wants `_self_` spelled out; last, its default, is what is meant
        try:
            with initialize_config_dir(config_dir=str(path.parent.resolve()), version_base="1.3", job_name="verl"):
                return compose(path.stem, overrides=["hydra.searchpath=[pkg://verl.config.presets]"])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(
                f"config file {str(path)!r}: {_first_line(error)} Its defaults list may name files beside it and the "
                f"presets {', '.join(_presets())}"
            ) from None


@functools.cache
def _override_parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _parse_override(text: str) -> tuple[str, Any, bool]:
    """key, value and whether it is a deletion."""
    from hydra.errors import HydraException

    malformed = ConfigError(
        f"override {text!r} is not key=value; quote values that hold spaces or special characters: \"key='a value'\""
    )
    name, _, given = text.partition("=")
    if given.startswith("~/"):  # the shell does this for a word of its own, not behind an equals sign
        text = f"{name}={os.path.expanduser(given)}"
    try:
        override = _override_parser().parse_override(text)
    except HydraException:
        raise malformed from None
    if not override.key_or_group:
        raise malformed
    if override.is_sweep_override():
        raise ConfigError(f"override {text!r} lists several runs; write a list as [a,b], or quote text that holds a comma")
    key = override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"
    return key, None if override.is_delete() else override.value(), override.is_delete()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
