"""A configuration as a dict or YAML, and the schema as the table of `verl config`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from verl.config import schema
from verl.config.fields import FIELDS, Field
from verl.config.purpose import TRAIN
from verl.config.schema import Config
from verl.errors import ConfigError


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> key -> value. `config_from_dict` is the inverse."""
    return dataclasses.asdict(config)


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def field_docs() -> dict[str, str]:
    """Canonical key -> the string under its field in the schema, on one line."""
    by_class: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            by_class[node.name] = _docs_of_class(node)
    docs = {}
    for section in dataclasses.fields(Config):
        section_type = section.default_factory
        for base in reversed(inspect.getmro(section_type)):  # type: ignore[arg-type]
            docs.update({f"{section.name}.{name}": text for name, text in by_class.get(base.__name__, {}).items()})
    return docs


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def describe_config(words: Sequence[str] = ()) -> str:
    """The table of `verl config`: each key (that holds one of `words`, if any) with its default and what it means.

    Raises ConfigError when no key holds any of them.
    """
    docs = field_docs()
    blocks = []
    for section in dataclasses.fields(Config):
        lines = [f"[{section.name}]"]
        for key, field in FIELDS.items():
            if key.startswith(section.name + ".") and (not words or any(word in key for word in words)):
                lines.append(f"{key} = {default_text(field)}")
                lines += textwrap.wrap(docs[key], width=110, initial_indent="    ", subsequent_indent="    ")
        if len(lines) > 1:
            blocks.append("\n".join(lines) + "\n")
    if not blocks:
        raise ConfigError(f"no key holds {' or '.join(words)}; `verl config` lists all of them")
    return "\n".join(blocks)


def default_text(field: Field) -> str:
    """The default as YAML writes it."""
    if field.key in TRAIN.required:
        return "(required)"
    return yaml.safe_dump(field.default, default_flow_style=True, width=200).removesuffix("...\n").strip()
