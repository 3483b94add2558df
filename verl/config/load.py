"""From what the user wrote to a `Config`: read, flatten, translate, check keys, check types, check the whole.

Three sources set keys, each stronger than the one before: files named in a `defaults:` list, the file itself, the
overrides. Within one source two spellings of one key must agree; between sources the stronger one wins.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from verl.config.checks import check_config
from verl.config.fields import FIELDS, build_config, coerce, plain_choice
from verl.config.purpose import TRAIN, Purpose
from verl.config.read import DEFAULTS, FILE, OVERRIDES, Written, flatten, read_sources
from verl.config.schema import Config
from verl.config.spellings import SPELLINGS, UPSTREAM_DEFAULTS, UPSTREAM_SPELLINGS, Outcome
from verl.config.support import NOT_YET, refuse_unsupported
from verl.errors import ConfigError

Printer = Callable[[str], object]


def load_config(
    config_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    purpose: Purpose = TRAIN,
    base: Mapping[str, Any] | None = None,
    printer: Printer = print,
) -> Config:
    """Read a YAML file and overrides of Hydra's grammar into a checked configuration.

    The file may hold `${...}` interpolations and a `defaults:` list of presets (`grpo`, `ppo`, `cpu`) and of files
    beside it. Every translated spelling, switch without effect and warning is one line given to `printer`.

    Args:
        config_file: YAML file, relative to the working directory; None takes the defaults.
        overrides: `a.b=c`, also with a leading `+` or `++`; `~a.b` resets a key to its default.
        purpose: what the configuration is for: which keys must be set, and which override would do nothing.
        base: canonical keys that stand in for the schema's defaults.
        printer: takes one line at a time.
    Raises:
        ConfigError: in one line, what is wrong and how to mend it.
    """
    written, resets = read_sources(config_file, overrides)
    weakest = {key: Written(value=value, source=DEFAULTS) for key, value in (base or {}).items()}
    return _resolve({**weakest, **written}, resets, purpose=purpose, printer=printer, overrides_from=OVERRIDES)


def config_from_dict(
    values: Mapping[str, Any],
    *stronger: Mapping[str, Any],
    purpose: Purpose = TRAIN,
    printer: Printer = print,
) -> Config:
    """A checked configuration from nested or dotted keys, in any spelling: what `config_to_dict` gives, for one.

    Args:
        stronger: further keys, of which the later mapping wins over the earlier, and all over `values`, whichever
            spelling either uses.
    Raises:
        ConfigError: as `load_config`.
    """
    written: dict[str, Written] = {}
    for source, keys in enumerate((values, *stronger), start=FILE):
        written |= {key: Written(value=value, source=source) for key, value in flatten(keys).items()}
    return _resolve(written, set(), purpose=purpose, printer=printer)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    value: Any
    name: str
    """The spelling that set it."""
    source: int
    weak: bool

    @property
    def rank(self) -> tuple[int, bool]:
        return self.source, not self.weak


class _Settings:
    """Canonical keys set so far; the stronger setting stays."""

    def __init__(self) -> None:
        self.by_key: dict[str, _Setting] = {}

    def set(self, key: str, new: _Setting) -> None:
        old = self.by_key.get(key)
        if old is not None and old.rank == new.rank and not _equal(key, old.value, new.value):
            raise ConfigError(f"{old.name}={old.value} and {new.name}={new.value} both set {key}; keep one of them")
        if old is None or new.rank > old.rank:
            self.by_key[key] = new


def _equal(key: str, a: Any, b: Any) -> bool:
    if a == b and type(a) is type(b):
        return True
    try:
        return coerce(key, a) == coerce(key, b)
    except ConfigError:  # a value of a wrong type equals nothing; its own message comes with the type check
        return False


@dataclass(frozen=True, kw_only=True)
class _View:
    """`spellings.Context` for a row of one source."""

    settings: _Settings
    written: Mapping[str, Written]
    source: int

    def given(self, key: str) -> bool:
        setting = self.settings.by_key.get(key)
        return setting is not None and setting.source >= self.source

    def outranked(self, key: str) -> bool:
        setting = self.settings.by_key.get(key)
        return setting is not None and setting.source > self.source

    def value(self, key: str) -> Any:
        setting = self.settings.by_key.get(key)
        return FIELDS[key].default if setting is None else coerce(key, setting.value, setting.name)

    def raw(self, key: str) -> Any:
        return self.written[key].value if key in self.written else None


def _resolve(
    written: Mapping[str, Written], resets: set[str], *, purpose: Purpose, printer: Printer, overrides_from: float = math.inf
) -> Config:
    """`overrides_from`: the weakest source whose keys were written for `purpose` alone."""
    _refuse_unknown([*written, *resets])
    settings, outcomes = _translate({key: entry for key, entry in written.items() if key not in resets or key not in SPELLINGS})
    for key in resets:
        if key in settings.by_key and settings.by_key[key].source < OVERRIDES:
            del settings.by_key[key]
    values = {}
    for key, setting in settings.by_key.items():
        as_written = f"{setting.name}={written[setting.name].value}"
        if setting.source >= overrides_from:
            purpose.refuse_idle(key, as_written)
        if get_origin(FIELDS[key].type) is Literal:  # some choices are only known as not supported yet
            refuse_unsupported(key, setting.value, as_written)
        values[key] = coerce(key, setting.value, setting.name)
        refuse_unsupported(key, values[key], as_written)
    if values.get("reward.function") is not None:
        values.setdefault("reward.type", "custom")
    values = {key: _expand_home(value) if key in _PATHS else value for key, value in {**purpose.defaults, **values}.items()}
    for line in _report(written, settings, outcomes):
        printer(f"config: {line}")
    config = build_config(values)
    check_config(config, purpose=purpose, printer=printer)
    return config


_PATHS = frozenset(
    (
        *("model.path", "model.tokenizer_path", "model.chat_template", "critic.path", "data.train_files", "data.val_files"),
        *("reward.function", "training.output_dir", "training.resume", "training.last_link"),
    )
)


def _expand_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


def _translate(written: Mapping[str, Written]) -> tuple[_Settings, dict[str, Outcome]]:
    """Apply the table: canonical keys and plain rows first, then the rows that look at others, in the table's order."""
    settings = _Settings()
    outcomes: dict[str, Outcome] = {}
    for key, entry in written.items():
        if key in FIELDS and key not in SPELLINGS:
            value = plain_choice(key, entry.value)
            settings.set(key, _Setting(value=value, name=key, source=entry.source, weak=False))
        elif key not in FIELDS:
            refuse_unsupported(key, entry.value)
    for late in (False, True):
        for key, spelling in SPELLINGS.items():
            if key not in written or spelling.late is not late:
                continue
            entry = written[key]
            outcome = spelling.rule(key, entry.value, _View(settings=settings, written=written, source=entry.source))
            values = {target: plain_choice(target, value) for target, value in outcome.values.items()}
            outcomes[key] = Outcome(values=values, note=outcome.note)
            for target, value in values.items():
                settings.set(target, _Setting(value=value, name=key, source=entry.source, weak=spelling.weak))
    return settings, outcomes


def _report(written: Mapping[str, Written], settings: _Settings, outcomes: Mapping[str, Outcome]) -> list[str]:
    """One line for each translated or idle key."""
    lines = []
    for key, entry in written.items():
        outcome = outcomes.get(key)
        if outcome is None:
            if key in NOT_YET and key not in FIELDS:
                lines.append(f"{key}={entry.value}: as always in this version")
            elif key in FIELDS and (choice := plain_choice(key, entry.value)) != entry.value:
                lines.append(f"{key}={entry.value} -> {choice}")
            continue
        if not outcome.values:
            lines.append(f"{key}={entry.value}: {outcome.note}")
            continue
        kept = {t: v for t, v in outcome.values.items() if t in settings.by_key and settings.by_key[t].name == key}
        if not kept:
            others = {settings.by_key[t].name if t in settings.by_key else f"~{t}" for t in outcome.values}
            lines.append(f"{key}={entry.value}: {', '.join(sorted(others))} decides")
            continue
        note = f" ({outcome.note})" if outcome.note else ""
        if all(value == entry.value for value in kept.values()):
            lines.append(f"{key} -> {', '.join(kept)}{note}")
        else:
            lines.append(f"{key}={entry.value} -> {', '.join(f'{t}={v}' for t, v in kept.items())}{note}")
    if any(key in UPSTREAM_SPELLINGS for key in written):
        unset = [key for key in UPSTREAM_DEFAULTS if key not in settings.by_key]
        differing = ", ".join(f"{key}={FIELDS[key].default} (upstream {UPSTREAM_DEFAULTS[key]})" for key in unset)
        lines += [f"not set, and different upstream: {differing}"] if differing else []
    return lines


def _refuse_unknown(keys: Sequence[str]) -> None:
    foreign = [key for key in (*SPELLINGS, *NOT_YET) if key not in FIELDS]
    sections = {key.split(".")[0] for key in FIELDS}
    complaints = []
    for key in keys:
        if key in FIELDS or key in SPELLINGS or key in NOT_YET:
            continue
        if key in sections:
            complaints.append(f"{key} is a section, not a key; set {key}.{_section_keys(key)}")
            continue
        complaints.append(
            f"unknown key {key}; nearest keys: {', '.join(_nearest(key, FIELDS))}; "
            f"nearest known spellings: {', '.join(_nearest(key, foreign))}"
        )
    if complaints:
        raise ConfigError("; ".join(complaints))


def _section_keys(section: str) -> str:
    return "{" + ", ".join(key.split(".")[1] for key in FIELDS if key.startswith(section + ".")) + "}"


def _nearest(key: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` known keys most like `key`, as a whole or in the last part."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.5 * (whole + last))

    return sorted(known, key=likeness, reverse=True)[:count]
