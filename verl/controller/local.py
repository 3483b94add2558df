"""The `local` runtime: every worker lives in the driver's process, so that a debugger, a profiler and a traceback
just work. Several ranks of a group run one after the other: right for tests of a dataflow, not a way to go faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.controller.dispatch import Call
from verl.controller.runtime import ResourcePool, WorkerSpec
from verl.controller.worker import Worker, WorkerContext, WorkerGroup


class _Done:
    def __init__(self, results: Mapping[int, Any]) -> None:
        self._results = results

    def result(self) -> Mapping[int, Any]:
        return self._results


class _InProcess:
    """Runs calls at once, in rank order; what they raise reaches the driver with its own traceback."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def submit(self, method: str, calls: Mapping[int, Call]) -> _Done:
        return _Done({rank: getattr(self._workers[rank], method)(*c.args, **c.kwargs) for rank, c in calls.items()})


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
            groups[role] = WorkerGroup(spec.worker_class, spec.layout(pool.num_workers), _InProcess(workers))
        return groups

    def shutdown(self) -> None:
        """Nothing to end: the workers are objects of this process."""
