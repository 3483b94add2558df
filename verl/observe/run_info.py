"""What a run was: its resolved configuration, the versions and commit it ran with, and the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import verl
from verl.observe.records import CONFIG_FILE, INFO_FILE, set_aside, write_atomically

_PACKAGES = ("torch", "transformers", "numpy", "vllm", "sglang", "megatron-core", "ray")


def run_info(run_dir: Path, config: str) -> None:
    """Write `config.yaml` (the resolved configuration, as text) and add this start to `run.json`.

    A configuration that differs from the one already there leaves that as `config.1.yaml` and so on. `run.json` holds a
    list with one entry a start, so that a resumed run shows what each part ran with.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    _keep_changed(run_dir / CONFIG_FILE, config)
    write_atomically(run_dir / CONFIG_FILE, config)
    info_file = run_dir / INFO_FILE
    starts = [*_earlier_starts(info_file), describe_run()]
    write_atomically(info_file, json.dumps(starts, indent=2) + "\n")


def _earlier_starts(file: Path) -> list[Any]:
    if not file.exists():
        return []
    try:
        starts = json.loads(file.read_bytes())
    except ValueError:
        starts = None
    if isinstance(starts, list):
        return starts
    set_aside(file)  # damaged, and nothing but a note: no reason to stop
    return []


def _keep_changed(file: Path, text: str) -> None:
    if file.exists() and file.read_bytes() != text.encode():
        set_aside(file)


def describe_run() -> dict[str, Any]:
    """Time, command, versions, commit of the source tree and hardware of this process."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "verl": verl.__version__,
        "commit": _git_commit(Path(verl.__file__).parent.parent),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "hardware": _hardware(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(source: Path) -> str | None:
    """Commit of the tree that verl is imported from, with `-dirty` when it has changes; None for an installed wheel."""
    if not (source / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a file system too slow to wait for
        return None
    return described.stdout.strip() or None


def _hardware() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
