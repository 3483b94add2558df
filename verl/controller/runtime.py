"""`ResourcePool`, and what a runtime does with it. The runtimes are `local.py` (this process) and, on clusters, Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.controller.dispatch import WorkerLayout
from verl.controller.worker import Worker, WorkerGroup
from verl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ResourcePool:
    """The devices that a set of worker groups lives on. Groups of one pool are colocated: rank i of each shares
    a process and a device with rank i of the others, and they use it in turn."""

    name: str = "main"
    num_workers: int = 1
    device: str = "cpu"
    """Kind of device each worker gets: cpu or cuda."""
    threads: int | None = None
    """Threads of each worker's tensor operations on a CPU. None: the machine's cores shared out."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"pool {self.name}: num_workers={self.num_workers} must be at least 1")


@dataclass(frozen=True)
class WorkerSpec:
    """A worker class and the keyword arguments of its constructor."""

    worker_class: type[Worker]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def layout(self, world_size: int) -> WorkerLayout:
        """How the ranks share the data."""
        return self.worker_class.layout(world_size, **self.kwargs)


class Runtime(Protocol):
    def spawn(self, pool: ResourcePool, roles: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        """Create the workers of all roles on the pool, in order, and return their groups by role."""
        ...

    def shutdown(self) -> None:
        """End all workers of this runtime, whatever they are doing."""
        ...
