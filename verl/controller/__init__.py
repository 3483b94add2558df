"""The hybrid programming model: worker groups that the driver calls, and the runtimes that carry the calls out."""

from verl.controller.dispatch import Call, DispatchPlan, WorkerLayout, all_ranks, all_to_all, data_parallel, one_to_all, rank_zero
from verl.controller.local import LocalRuntime
from verl.controller.runtime import ResourcePool, Runtime, WorkerSpec
from verl.controller.worker import Worker, WorkerContext, WorkerGroup, register, wait_for
from verl.errors import WorkerError, WorkerLost

__all__ = [
    "Call",
    "DispatchPlan",
    "LocalRuntime",
    "ResourcePool",
    "Runtime",
    "Worker",
    "WorkerContext",
    "WorkerError",
    "WorkerGroup",
    "WorkerLayout",
    "WorkerLost",
    "WorkerSpec",
    "all_ranks",
    "all_to_all",
    "data_parallel",
    "one_to_all",
    "rank_zero",
    "register",
    "wait_for",
]
