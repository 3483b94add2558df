"""Errors that are the user's to mend. Entry points print them as one line and exit with code 2."""

from __future__ import annotations

from pathlib import Path


class UserError(ValueError):
    """Bad input: the message names the field or file, the value, and the fix, in one line."""


class ConfigError(UserError):
    """A configuration key or value that cannot work."""


class DataError(UserError):
    """A data file, column or row that cannot be used."""


class WorkerError(RuntimeError):
    """A rank failed: the message names the stage, the rank, and holds the rank's own traceback."""


class WorkerLost(WorkerError):
    """A rank's process died, or gave no answer within the limit. Starting again from a checkpoint may help."""


class ConnectionLost(WorkerLost):
    """A rank lost its connection to another: most likely the other is the one to blame."""


class MissingExtraError(UserError):
    """An optional dependency is not installed; the message holds the install line."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: {install_line(extra)}")
        self._package, self._extra = package, extra

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self._package, self._extra)


def install_line(extra: str) -> str:
    """The command that adds `extra` to this very verl: from the source tree it runs from, where there is one."""
    root = Path(__file__).resolve().parent.parent
    return f"pip install -e '{root}[{extra}]'" if (root / "pyproject.toml").is_file() else f"pip install 'verl[{extra}]'"
