"""The schema as one flat table: key, type, default. Values are brought to their field's type here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from verl.config.schema import Config
from verl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Field:
    """One configuration key."""

    key: str
    """section.name"""
    type: Any
    """The annotation without its `| None`."""
    optional: bool
    default: Any


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return members[0], True
    return annotation, False


def _fields() -> Iterator[Field]:
    for section, section_type in get_type_hints(Config).items():
        hints = get_type_hints(section_type)
        defaults = section_type()
        for field in dataclasses.fields(section_type):
            kind, optional = _split_optional(hints[field.name])
            yield Field(key=f"{section}.{field.name}", type=kind, optional=optional, default=getattr(defaults, field.name))


FIELDS: dict[str, Field] = {field.key: field for field in _fields()}
"""Every canonical key, in the schema's order."""


def flat_values(config: Config) -> dict[str, Any]:
    """`section.name` -> value, for every key."""
    return {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in FIELDS}


def build_config(values: Mapping[str, Any]) -> Config:
    """Config from canonical flat values of the right types; keys left out take their defaults."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    types_of = get_type_hints(Config)
    return Config(**{section: types_of[section](**values) for section, values in sections.items()})


# Spellings of a choice that people write; compared in lower case.
_CHOICE_SPELLINGS: dict[str, dict[str, str]] = {
    "algorithm.adv_estimator": {"ppo": "gae"},
    "algorithm.kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "model.dtype": {"bf16": "bfloat16", "fp32": "float32", "float": "float32"},
    "rollout.engine": {"hf": "native", "huggingface": "native"},
}


def plain_choice(key: str, value: Any) -> Any:
    """A choice in the schema's own spelling (PPO -> gae, BF16 -> bfloat16); any other value as it is."""
    if key == "training.resume" and isinstance(value, bool):
        return "auto" if value else "never"
    if not isinstance(value, str) or key not in FIELDS or get_origin(FIELDS[key].type) is not Literal:
        return value
    lowered = value.lower()
    return _CHOICE_SPELLINGS.get(key, {}).get(lowered, lowered)


def coerce(key: str, value: Any, name: str = "") -> Any:
    """`value` as the type of field `key`.

    Lossless conversions only: an int for a float, a number or boolean written as text (YAML 1.1 reads some floats, and
    environment variables everything, as text), a whole float such as 1e4 for an int, one element for a list.

    Args:
        name: what the user wrote instead of `key`, for the message.
    Raises:
        ConfigError: the value is of another type or not among the choices.
    """
    field = FIELDS[key]
    if value is None:
        if field.optional:
            return None
        raise ConfigError(f"{name or key}=null: expected {_expected(field.type)}; leave the key out for {field.default!r}")
    try:
        return _convert(field.type, value)
    except (ValueError, TypeError):
        label = f"{name} ({key})" if name and name != key else key
        raise ConfigError(f"{label}={value!r}: expected {_expected(field.type)}; {_fix(field, value)}") from None


def _convert(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ValueError
        return value
    if origin is list:
        (element,) = get_args(kind)
        return [_convert(element, item) for item in (value if isinstance(value, list | tuple) else [value])]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError
        return dict(value)
    return _SCALARS[kind](value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError
    return value


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        return int(value)
    number = _to_float(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _to_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


_SCALARS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def _expected(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(get_args(kind))
    if origin is list:
        return "a list, each " + _expected(get_args(kind)[0])
    if origin is dict:
        return "a mapping"
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}[kind]


def _fix(field: Field, value: Any) -> str:
    kind = get_args(field.type)[0] if get_origin(field.type) is list else field.type
    if get_origin(kind) is Literal:
        wrong = [item for item in (value if isinstance(value, list) else [value]) if item not in get_args(kind)]
        close = difflib.get_close_matches(str(wrong[0]).lower(), get_args(kind), n=1) if wrong else []
        return f"write {field.key}={close[0] if close else get_args(kind)[0]}"
    if kind is str:
        return f"quote it: {field.key}='{value}'" if isinstance(value, bool | int | float) else f"write {field.key}='...'"
    if get_origin(kind) is dict:
        return f"write {field.key}={{name: value}}"
    example = field.default if isinstance(field.default, bool | int | float) else {bool: True, int: 8, float: 0.5}[kind]
    return f"write for example {field.key}={str(example).lower()}"
