"""Checkpoint folders: written whole or not at all, checked before they are used, kept up to a number.

`<root>/step_000123/` holds what the trainer saved and `manifest.json` (step, order of saving, size and SHA-256 of
every file). It is written under a temporary name and renamed when all of it is on disk, so a folder under its final
name is complete. `<root>/last`, and one more link where asked for, point at the newest; `<root>/best` at the one with
the best score in validation, where such are kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import verl
from verl.errors import UserError

MANIFEST = "manifest.json"
LAST, BEST = "last", "best"
_WRITING, _REMOVING = ".writing-", ".removing-"


class CheckpointError(UserError):
    """A checkpoint that is absent, incomplete or damaged, or that could not be written."""


class DiskFull(CheckpointError):
    """Raised where files are written, in whatever process that is."""


@contextmanager
def noticing_full_disk(folder: Path) -> Iterator[None]:
    """Turn a write into `folder` that fails for want of space into DiskFull, which reaches the driver from any process.

    The libraries that write say it in their own ways: an OSError, one rank's inside another exception, a text.
    """
    try:
        yield
    except BaseException as error:  # that of torch.distributed.checkpoint is no Exception
        if _is_full_disk(error):
            raise DiskFull(f"the disk of {folder} is full") from error
        raise


def _is_full_disk(error: BaseException) -> bool:
    codes = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in codes):
        return True
    if any(f"os error {code}" in str(error) for code in codes):  # safetensors
        return True
    failures = getattr(error, "failures", {}).values()  # torch.distributed.checkpoint: (exception, trace) by rank
    behind = [error.__cause__ or error.__context__, *(failure[0] for failure in failures)]
    return any(cause is not None and _is_full_disk(cause) for cause in behind)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    serial: int
    """Order of saving. A run resumed from an older step saves smaller steps later: the serial, not the step, tells
    which checkpoint is the newest."""
    files: dict[str, dict[str, Any]]
    """Relative path -> {"bytes": size, "sha256": hex digest}."""
    validation: dict[str, float] = field(default_factory=dict)
    """What validation measured at this step; empty when there was none."""


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Which checkpoints stay, besides the newest, for their score in validation."""

    number: int
    metric: str
    smaller_is_better: bool = False

    def ranked(self, checkpoints: list[tuple[Path, Manifest]]) -> list[Path]:
        """Those with a score, the best first; of equals, the one that was saved first."""
        sign = 1 if self.smaller_is_better else -1
        scored = [(folder, manifest) for folder, manifest in checkpoints if self.metric in manifest.validation]
        scored.sort(key=lambda pair: (sign * pair[1].validation[self.metric], pair[1].serial))
        return [folder for folder, _ in scored[: self.number]]


class CheckpointManager:
    """Saves checkpoints of one run under `root`. One writer a root; readers need no manager (`resolve_checkpoint`)."""

    def __init__(self, root: Path, *, keep_last: int, last_link: Path | None = None, keep_best: KeepBest | None = None) -> None:
        """Clear what a killed run left behind.

        root: folder of this run's checkpoints, made when first needed.
        keep_last: checkpoints kept; 0 keeps all.
        last_link: a link outside `root` that follows the newest checkpoint, such as `checkpoints/last`.
        keep_best: what else is kept, with the link `best` on the best of all; None: nothing, and no link.
        Raises CheckpointError when something that is no link stands at a link's place.
        """
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._links = [self.root / LAST, *([Path(last_link)] if last_link is not None else [])]
        self._in_use: Path | None = None
        for link in self._links:
            if link.exists() and not link.is_symlink():
                raise CheckpointError(f"training.last_link: {link} exists and is no link; move it away or name another path")
        best = self.root / BEST
        if best.exists() and not best.is_symlink():
            raise CheckpointError(f"training.keep_best: {best} exists and is no link; move it away")
        for place in (*self.root.glob("step_*"), *self.root.glob(f"{_WRITING}*"), *self.root.glob(f"{_REMOVING}*")):
            if not place.is_dir():
                raise CheckpointError(f"{place} is a file where a checkpoint would be; move it away")
        self._recover()

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    @contextmanager
    def saving(self, step: int, validation: Mapping[str, float] | None = None) -> Iterator[Path]:
        """Yield a temporary folder; when the block ends it becomes `step_<step>`, and the links move to it.

        An exception in the block (or a full disk, or a kill) leaves the earlier checkpoints and links as they were.
        A step that was saved before is replaced. `validation`: what was measured at this step.
        Raises CheckpointError when the disk is full.
        """
        target = self.folder(step)
        partial = self.root / f"{_WRITING}{target.name}"
        serial = 1 + max((manifest.serial for _, manifest in self._complete()), default=0)
        try:
            partial.mkdir(parents=True)
            yield partial
            _write_manifest(partial, step=step, serial=serial, validation=validation or {})
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if _is_full_disk(error):
                raise CheckpointError(
                    f"checkpoint of step {step}: the disk of {self.root} is full (earlier checkpoints are intact); "
                    "free space, or lower training.keep_last"
                ) from error
            raise
        if target.exists():
            self._remove(target)
        partial.rename(target)
        _sync(self.root)
        for link in self._links:
            _point(link, target)
        self._point_at_best()
        self._prune(target)

    def latest(self) -> Path | None:
        """The complete checkpoint saved last; None when there is none."""
        return newest_checkpoint(self.root)

    def use(self, folder: Path) -> None:
        """Never prune this checkpoint: the run was resumed from it, or something reads it."""
        self._in_use = Path(folder).resolve()

    def _complete(self) -> list[tuple[Path, Manifest]]:
        return _complete_checkpoints(self.root)

    def _recover(self) -> None:
        for leftover in self.root.glob(f"{_WRITING}*"):
            target = self.root / leftover.name.removeprefix(_WRITING)
            # Killed between the manifest and the rename: the checkpoint is whole and may have replaced one just removed.
            if not target.exists() and _defect(leftover, checksums=True) is None:
                leftover.rename(target)
            else:
                shutil.rmtree(leftover)
        for leftover in self.root.glob(f"{_REMOVING}*"):
            shutil.rmtree(leftover)

    def _point_at_best(self) -> None:
        link = self.root / BEST
        if best := self.best():
            _point(link, best[0])
        elif link.is_symlink():  # of an earlier start with other settings: nothing keeps its target any longer
            link.unlink()

    def best(self) -> list[Path]:
        """The checkpoints kept for their score, the best first."""
        return [] if self.keep_best is None else self.keep_best.ranked(self._complete())

    def _prune(self, written: Path) -> None:
        if self.keep_last == 0:
            return
        kept = {written, *self.best()}
        for folder, _ in sorted(self._complete(), key=lambda pair: -pair[1].serial)[self.keep_last :]:
            if folder not in kept and folder.resolve() != self._in_use:
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Rename first: a half-deleted folder must not pass for a checkpoint."""
        doomed = self.root / f"{_REMOVING}{folder.name}"
        folder.rename(doomed)
        shutil.rmtree(doomed)


def newest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint under `root` that was saved last; None when there is none."""
    complete = _complete_checkpoints(Path(root))
    return max(complete, key=lambda pair: pair[1].serial)[0] if complete else None


def damaged_checkpoints(root: Path) -> list[str]:
    """One line, folder and defect, for each step folder under `root` that is not complete, by step."""
    return [
        f"checkpoint {folder} is damaged: {defect}"
        for folder in sorted(Path(root).glob("step_*"))
        if (defect := _defect(folder, checksums=False)) is not None
    ]


def resolve_checkpoint(path: Path | str) -> Path:
    """The step folder meant by `path`: a step folder, a link (`last`, `best`), a folder of checkpoints, or a run's folder.

    Sizes are checked (`check_integrity` reads checksums too). Raises CheckpointError in one line otherwise.
    """
    given = Path(path)
    if not given.exists():
        broken = f" (a link to {os.readlink(given)}, which is gone)" if given.is_symlink() else ""
        raise CheckpointError(f"no checkpoint at {given}{broken}; name a step folder, a run folder or a `last` link")
    if (given / MANIFEST).exists():
        folder = given.resolve()
        if (defect := _defect(folder, checksums=False)) is not None:
            raise CheckpointError(f"checkpoint {given} is damaged: {defect}; use an earlier one of {folder.parent}")
        return folder
    for root in (given, given / "checkpoints"):
        if (newest := newest_checkpoint(root)) is not None:
            return newest.resolve()
    raise CheckpointError(f"{given} holds no complete checkpoint (no step_* folder with {MANIFEST}); name one that does")


def check_integrity(folder: Path, pattern: str = "*") -> Manifest:
    """Compare the files whose relative path matches `pattern` with the manifest, checksums included. Raises CheckpointError
    naming the first that differs."""
    if (defect := _defect(Path(folder), checksums=True, pattern=pattern)) is not None:
        raise CheckpointError(f"checkpoint {folder} is damaged: {defect}; use an earlier one of {Path(folder).parent}")
    return read_manifest(Path(folder))


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError when the manifest is absent or unreadable."""
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["checkpoint"])
        if not all(isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str) for entry in manifest.files.values()):
            raise TypeError("files")
        if not (isinstance(manifest.step, int) and isinstance(manifest.serial, int)):
            raise TypeError("step, serial")
        if not all(isinstance(value, int | float) for value in manifest.validation.values()):
            raise TypeError("validation")
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable {MANIFEST}; name a complete checkpoint") from error


def _complete_checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    folders = [folder for folder in root.glob("step_*") if _defect(folder, checksums=False) is None]
    return [(folder, read_manifest(folder)) for folder in folders]


def _defect(folder: Path, *, checksums: bool, pattern: str = "*") -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None when it is sound. `pattern`: whose checksums to read."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return f"{MANIFEST} is absent or unreadable"
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if checksums and fnmatchcase(name, pattern) and _digest(file) != expected["sha256"]:
            return f"{name} differs from its checksum"
    return None


def _write_manifest(folder: Path, *, step: int, serial: int, validation: Mapping[str, float]) -> None:
    """Everything below `folder` is on disk when the manifest is: each file and folder is synced before it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        _sync(path)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    # NaN is no JSON, and no score.
    measured = {name: value for name, value in validation.items() if math.isfinite(value)}
    checkpoint = {"step": step, "serial": serial, "files": files, "validation": measured}
    content = {"verl": verl.__version__, "checkpoint": checkpoint}
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _sync(partial)
    partial.rename(folder / MANIFEST)
    _sync(folder)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(link: Path, target: Path) -> None:
    """Make `link` a relative link to `target`, by rename: at no moment is there none."""
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    os.replace(fresh, link)
    _sync(link.parent)
