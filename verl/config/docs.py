"""The tables of docs/examples/config.md, made from the code so that they cannot drift.

`python -m verl.config.docs docs/examples/config.md` rewrites them in place.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from verl.config.describe import default_text, field_docs
from verl.config.fields import FIELDS, Field
from verl.config.schema import Config
from verl.config.spellings import TUTORIAL_SPELLINGS, UPSTREAM_SPELLINGS, Spelling
from verl.config.support import NOT_YET


def _type_name(field: Field) -> str:
    kind, wrap = field.type, "{}"
    if get_origin(kind) is list:
        (kind,), wrap = get_args(kind), "list of {}"
    if get_origin(kind) is Literal:
        return wrap.format(", ".join(get_args(kind)))
    name = "mapping" if get_origin(kind) is dict else kind.__name__
    return wrap.format(name) + (" or null" if field.optional else "")


def keys_markdown() -> str:
    """Every key, a table a section, for the documentation."""
    docs = field_docs()
    lines: list[str] = []
    for section in dataclasses.fields(Config):
        lines += [f"### {section.name}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in FIELDS.items():
            if key.startswith(section.name + "."):
                lines.append(f"| `{key}` | {_type_name(field)} | `{default_text(field)}` | {_cell(docs[key])} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def spellings_markdown() -> str:
    """The table of translated spellings, for the documentation."""
    parts = []
    for title, table in (("Keys of tutorials", TUTORIAL_SPELLINGS), ("Keys of upstream scripts", UPSTREAM_SPELLINGS)):
        parts += [f"### {title}", "", "| you may write | it becomes | how |", "|---|---|---|"]
        parts += [_spelling_row(key, spelling) for key, spelling in table.items()]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _spelling_row(key: str, spelling: Spelling) -> str:
    targets = ", ".join(f"`{target}`" for target in spelling.targets) or "–"
    return f"| `{key}` | {targets} | {_cell(spelling.how)} |"


def unsupported_markdown() -> str:
    """What this version understands and refuses, for the documentation."""
    lines = ["| key | what to do |", "|---|---|"]
    lines += [f"| `{key}` | {_cell(row.instead)} |" for key, row in NOT_YET.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_GENERATED = {"keys": keys_markdown, "spellings": spellings_markdown, "unsupported": unsupported_markdown}


def refresh_markdown(text: str) -> str:
    """`text` with what stands between `<!-- generated: NAME -->` and `<!-- end -->` made anew from the code."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n\n{_GENERATED[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(refresh_markdown(page.read_text(encoding="utf-8")), encoding="utf-8")
