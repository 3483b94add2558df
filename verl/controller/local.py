"""The `local` runtime: every worker lives in the driver's process, so that a debugger, a profiler and a traceback
just work. Several ranks of a group run one after the other: right for tests of a dataflow, not a way to go faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.controller.dispatch import WorkerLayout
from verl.controller.runtime import ResourcePool, WorkerSpec
from verl.controller.worker import Worker, WorkerContext, WorkerGroup


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class _InProcess:
    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def submit(self, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Done:
        return _Done(getattr(self._workers[rank], method)(*args, **kwargs))


class LocalRuntime:
    def spawn(self, pool: ResourcePool, roles: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        peers: list[dict[str, Any]] = [{} for _ in range(pool.num_workers)]
        groups = {}
        for role, spec in roles.items():
            workers = []
            for rank in range(pool.num_workers):
                context = WorkerContext(rank=rank, world_size=pool.num_workers, device=pool.device, peers=peers[rank])
                worker = spec.worker_class(context, **spec.kwargs)
                peers[rank][role] = worker
                workers.append(worker)
            layout = spec.layout or WorkerLayout.data_parallel(pool.num_workers)
            groups[role] = WorkerGroup(spec.worker_class, layout, _InProcess(workers))
        return groups

    def shutdown(self) -> None:
        """Nothing to end: the workers are objects of this process."""
