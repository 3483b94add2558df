"""`Worker`, `@register` and `WorkerGroup`: the two halves of the hybrid programming model.

The driver holds worker groups and calls their registered methods; each call is split by the method's
dispatch, run on the ranks by the runtime, and gathered (HybridFlow, Sheng et al. 2024, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from verl.controller.dispatch import Call, Dispatch, WorkerLayout
from verl.errors import ConnectionLost, WorkerError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__verl_registration__"


@dataclass(frozen=True)
class Registration:
    dispatch: Dispatch
    blocking: bool


def register(*, dispatch: Dispatch, blocking: bool = True) -> Callable[[F], F]:
    """Mark a worker method as callable from the driver.

    `dispatch` says how arguments are shared out and results gathered. With `blocking=False` the call
    returns at once with a `Pending` whose `.result()` waits.
    """

    def mark(method: F) -> F:
        setattr(method, _MARK, Registration(dispatch, blocking))
        return method

    return mark


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Where a worker lives."""

    rank: int
    world_size: int
    """Ranks of the pool. With more than one, in processes of their own, `torch.distributed` is set up among them."""
    device: str
    address: str = "127.0.0.1"
    """Under which other processes of the run reach this one."""
    peers: dict[str, Any] = field(default_factory=dict)
    """Role -> worker of the same rank, in the same process: the groups colocated with this one, in the
    order of their creation. The hybrid engine is built on it: the rollout worker finds the actor here."""


class Worker:
    """Base of all workers: subclasses take the context first and keep their state to themselves."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @classmethod
    def layout(cls, world_size: int, **kwargs: Any) -> WorkerLayout:
        """How `world_size` workers made with `kwargs` share the data; by default each has a share of its own."""
        return WorkerLayout.data_parallel(world_size)


class Pending(Protocol):
    """The result of a non-blocking call."""

    def result(self) -> Any: ...


class Executor(Protocol):
    """What a runtime gives a group: a way to run a method on its ranks."""

    def submit(self, method: str, calls: Mapping[int, Call]) -> Pending:
        """Start the method on each rank named; the result is a mapping from rank to result.

        When ranks fail, `result()` raises once: a UserError as it is, anything else as a WorkerError.
        """
        ...


@dataclass(frozen=True)
class _Gathering:
    results: Pending
    gather: Callable[[Mapping[int, Any]], Any]

    def result(self) -> Any:
        return self.gather(self.results.result())


def wait_for(*pending: Pending) -> list[Any]:
    """The results of calls that run side by side, perhaps on groups that wait for each other.

    Where several fail, the failure that is the cause is raised, not a connection that broke because of it.
    """
    results, errors = [], []
    for call in pending:
        try:
            results.append(call.result())
        except WorkerError as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, ConnectionLost)), errors[0])
    return results


class WorkerGroup:
    """The driver's handle on N ranks of one worker class; registered methods are attributes."""

    def __init__(self, worker_class: type[Worker], layout: WorkerLayout, executor: Executor) -> None:
        self.worker_class = worker_class
        self.layout = layout
        self._executor = executor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # of a protocol, such as copying; the group may not be initialised yet
            raise AttributeError(name)
        method = getattr(self.worker_class, name, None)
        registration: Registration | None = getattr(method, _MARK, None)
        if registration is None:
            known = sorted(n for n in dir(self.worker_class) if hasattr(getattr(self.worker_class, n), _MARK))
            raise AttributeError(f"{self.worker_class.__name__} registers no method {name!r}; it has {', '.join(known)}")

        def call(*args: Any, **kwargs: Any) -> Any:
            plan = registration.dispatch(self.layout, args, kwargs)
            pending = _Gathering(self._executor.submit(name, plan.calls), plan.gather)
            return pending.result() if registration.blocking else pending

        call.__name__ = name
        call.__doc__ = method.__doc__
        return call
