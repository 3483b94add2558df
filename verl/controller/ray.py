"""The `ray` runtime: every rank of a pool is one process of a Ray cluster, and all groups of the pool live in it.

It joins the cluster that `RAY_ADDRESS` names or that `ray start` began on this machine, and starts one of its own where
there is none. A pool is one placement group with a bundle a rank; ranks of a pool with more than one get a process group
(NCCL on GPUs, gloo on CPUs). Arrays of a TokenBatch travel through the object store without being copied by pickle.

A rank that fails, dies or gives no answer ends the call, once, with what it was doing; the others may then wait in a
collective operation for ever, so the runtime has to be shut down after that.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from verl.controller.dispatch import Call
from verl.controller.runtime import ResourcePool, WorkerSpec
from verl.controller.worker import Worker, WorkerContext, WorkerGroup
from verl.errors import ConnectionLost, UserError, WorkerError, WorkerLost

PLACEMENT_DEADLINE_S = 120.0
"""Time for a cluster to find room for a pool."""
START_DEADLINE_S = 300.0
"""Time for the processes of a pool to start and to find each other."""
_GRACE_S = 3.0
"""When one rank has failed the others are heard for this long: the first to complain is often only the victim."""
_CAUSE_S = 30.0
"""The same while all that is known is a broken connection: a busy machine takes a while to report a death."""
_END_S = 20.0
"""Time for killed processes to be gone."""


class RayRuntime:
    """See the top of this module."""

    def __init__(self, *, timeout_s: float = 3600.0, num_cpus: int | None = None) -> None:
        """Join a cluster or start one.

        timeout_s: limit of one call on a group, after which the ranks that have not answered count as lost.
        num_cpus: CPUs of a cluster that has to be started; None: this machine's cores.
        """
        self.timeout_s = timeout_s
        _connect(num_cpus)
        self._pools: list[_Pool] = []

    def spawn(self, pool: ResourcePool, roles: Mapping[str, WorkerSpec]) -> dict[str, WorkerGroup]:
        """Start the pool's processes, with the workers of all roles in each, created in the order of `roles`.

        Raises:
            UserError: the cluster has no room for the pool; or what a worker's constructor raised.
            WorkerError: a constructor failed otherwise, or a process died.
        """
        started = _Pool(pool, taken=[other.pool for other in self._pools])
        self._pools.append(started)
        groups = {}
        try:
            for role, spec in roles.items():
                call = Call((role, spec.worker_class, dict(spec.kwargs)))
                started.run(role, "create", "__init__", dict.fromkeys(range(pool.num_workers), call), self.timeout_s).result()
                groups[role] = WorkerGroup(
                    spec.worker_class, spec.layout(pool.num_workers), _Executor(started, role, self.timeout_s)
                )
        except BaseException:
            self.shutdown()
            raise
        return groups

    def shutdown(self) -> None:
        """Kill the processes of all pools, whatever they are doing. The cluster stays."""
        while self._pools:
            self._pools.pop().close()

    def __enter__(self) -> RayRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("ray is not installed; run: pip install 'ray>=2.49', or set training.runtime=local") from None
    return ray


def _connect(num_cpus: int | None) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address and ":" in address:
        _check_answers(address)
    ray = _ray()
    if ray.is_initialized():
        return
    address = address or _begun_here()
    if address and _has_token():
        # A cluster asks for the token that its machine has, and Ray does not show it to an address that was given.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    quiet = {"log_to_driver": True, "logging_level": "ERROR"}
    if address:
        with contextlib.suppress(ConnectionError):
            ray.init(address=address, **quiet)
            return
    with _quiet_stderr():
        ray.init(address="local", num_cpus=num_cpus, _metrics_export_port=None, include_dashboard=False, **quiet)


def _begun_here() -> str | None:
    """Address of the cluster that `ray start` began on this machine, if it still runs.

    Ray's own `auto` would also join, and die with, a cluster that another program has started for itself.
    """
    from ray._private.services import find_bootstrap_address

    address = find_bootstrap_address(None)
    with contextlib.suppress(UserError):
        if address:
            _check_answers(address)
            return address
    return None


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes, and a run that was meant for a cluster must not go on alone."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"RAY_ADDRESS={address}: no cluster answers there ({error}); start it, or unset RAY_ADDRESS") from None


def _has_token() -> bool:
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").is_file()


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Ray speaks of usage statistics and of /dev/shm while it starts; its exceptions come as exceptions."""
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]


@dataclass(frozen=True)
class _Failure:
    """What a host answers when the call raised."""

    traceback: str
    user_error: UserError | None


@dataclass(frozen=True)
class _Place:
    machine: str
    pid: int
    address: tuple[str, int]


class _Host:
    """The actor: one rank's process, with a worker for each role."""

    def __init__(self, rank: int, world_size: int, device: str, threads: int, search_path: Sequence[str]) -> None:
        # What the driver can import can be imported here: a worker class beside its script, for one.
        sys.path.extend(entry for entry in search_path if entry not in sys.path)
        # FSDP2 itself calls what this speaks of; the user of a run can do nothing about it.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
        self._peers: dict[str, Worker] = {}
        address = _ray().util.get_node_ip_address()
        self._context = WorkerContext(rank=rank, world_size=world_size, device=device, address=address, peers=self._peers)  # type: ignore[arg-type]
        self._thread: int | None = None
        if device == "cpu":
            import torch

            torch.set_num_threads(threads)

    def place(self) -> _Place:
        """Where this process is, with a port that is free on its machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return _Place(socket.gethostname(), os.getpid(), (self._context.address, probe.getsockname()[1]))

    def join(self, address: tuple[str, int], timeout_s: float) -> None:
        """Set up torch.distributed among the hosts of the pool; rank 0 has `address`."""
        import torch.distributed as dist

        context = self._context
        os.environ.update(
            {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]), "LOCAL_RANK": "0"}
            | {"RANK": str(context.rank), "WORLD_SIZE": str(context.world_size)}
        )
        backend = "cpu:gloo,cuda:nccl" if context.device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    def create(self, role: str, worker_class: type[Worker], kwargs: Mapping[str, Any]) -> Any:
        return self._guarded(lambda: self._peers.__setitem__(role, worker_class(self._context, **kwargs)))

    def call(self, role: str, method: str, call: Call) -> Any:
        return self._guarded(lambda: getattr(self._peers[role], method)(*call.args, **call.kwargs))

    def where(self) -> str:
        """The innermost frames of what `call` is doing, a line each."""
        frame = sys._current_frames().get(self._thread) if self._thread is not None else None
        if frame is None:
            return "nothing"
        return "".join(traceback.format_stack(frame)[-4:]).rstrip()

    def _guarded(self, work: Any) -> Any:
        self._thread = threading.get_ident()
        try:
            return work()
        except Exception as error:
            error.__traceback__ = error.__traceback__.tb_next.tb_next  # the worker's own frames  # type: ignore[union-attr]
            return _Failure("".join(traceback.format_exception(error)), _portable(error))
        finally:
            self._thread = None


def _portable(error: Exception) -> UserError | None:
    """The user's error as it can travel: pickle does not rebuild one whose constructor asks for more than its message."""
    if not isinstance(error, UserError):
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return UserError(str(error))
    return error


class _Pool:
    """A placement group and its hosts."""

    def __init__(self, pool: ResourcePool, taken: Sequence[ResourcePool]) -> None:
        """`taken`: the pools that already hold a part of the cluster."""
        ray = _ray()
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.pool = pool
        bundle = _bundle(pool)
        self._placement = placement_group([bundle] * pool.num_workers, strategy="PACK")
        self.hosts: list[Any] = []
        self._places: list[_Place] = []
        if not self._placement.wait(PLACEMENT_DEADLINE_S if _has_room([pool, *taken]) else 0):
            self.close()
            raise UserError(_no_room(pool, taken))
        threads = pool.threads or max(1, len(os.sched_getaffinity(0)) // pool.num_workers)
        search_path = [entry or os.getcwd() for entry in sys.path]
        actor = ray.remote(concurrency_groups={"watch": 1})(_Host)
        for rank in range(pool.num_workers):
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
            host = actor.options(**options).remote(rank, pool.num_workers, pool.device, threads, search_path)
            self.hosts.append(host)
        self._join()

    def _join(self) -> None:
        ray = _ray()
        try:
            self._places = ray.get([host.place.remote() for host in self.hosts], timeout=START_DEADLINE_S)
            address = self._places[0].address
            if len(self.hosts) > 1:
                ray.get([host.join.remote(address, 2 * START_DEADLINE_S) for host in self.hosts], timeout=START_DEADLINE_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.close()
            who = f"pool {self.pool.name}: its {self.pool.num_workers} processes"
            raise WorkerLost(f"{who} did not start, or do not find each other: {' '.join(str(error).split())}") from None

    def run(self, role: str, host_method: str, stage: str, calls: Mapping[int, Call], timeout_s: float) -> _Running:
        """Call `host_method` of the hosts named in `calls`. Calls that are one object are sent once."""
        ray = _ray()
        sent: dict[int, Any] = {}
        references = {}
        for rank, call in calls.items():
            host = self.hosts[rank]
            if host_method == "create":
                references[rank] = host.create.remote(*call.args)
                continue
            if id(call) not in sent:
                sent[id(call)] = ray.put(call)
            references[rank] = host.call.remote(role, stage, sent[id(call)])
        return _Running(self, f"{role}.{stage}", references, time.monotonic() + timeout_s, timeout_s)

    def where(self, ranks: Iterable[int]) -> str:
        """What these ranks are doing, as far as they can still say."""
        ray = _ray()
        lines = []
        for rank in ranks:
            try:
                asked = self.hosts[rank].where.options(concurrency_group="watch").remote()
                lines.append(f"rank {rank}:\n{ray.get(asked, timeout=5)}")
            except (ray.exceptions.RayError, TimeoutError):
                lines.append(f"rank {rank}: no answer")
        return "\n".join(lines)

    def close(self) -> None:
        ray = _ray()
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        for host in self.hosts:
            ray.kill(host)
        self.hosts = []
        remove_placement_group(self._placement)
        self._await_end()

    def _await_end(self) -> None:
        """Killing is asynchronous: wait until the processes of this machine, and the device memory they hold, are gone, since
        what follows may be a restart. Those of other machines cannot be watched from here."""
        deadline = time.monotonic() + _END_S
        for place in self._places:
            while place.machine == socket.gethostname() and _is_running(place.pid) and time.monotonic() < deadline:
                time.sleep(0.02)
        self._places = []


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _bundle(pool: ResourcePool) -> dict[str, float]:
    """What one rank of the pool takes of a cluster."""
    return {"CPU": 1, "GPU": 1} if pool.device.startswith("cuda") else {"CPU": 1}


def _has_room(pools: Sequence[ResourcePool]) -> bool:
    total = _ray().cluster_resources()
    needs = collections.Counter[str]()
    for pool in pools:
        needs.update({kind: pool.num_workers for kind in _bundle(pool)})
    return all(total.get(kind, 0) >= amount for kind, amount in needs.items())


def _no_room(pool: ResourcePool, taken: Sequence[ResourcePool]) -> str:
    total, bundle = _ray().cluster_resources(), _bundle(pool)
    needs = " and ".join(f"{pool.num_workers} x {amount:g} {kind}" for kind, amount in bundle.items())
    has = ", ".join(f"{total.get(kind, 0):g} {kind}" for kind in bundle)
    others = "".join(f", of which pool {other.name} takes {other.num_workers}" for other in taken)
    return (
        f"pool {pool.name} needs {needs}, and the Ray cluster has {has} in all{others}; ask for fewer ranks (parallel.*), "
        "add nodes, or end what else runs there"
    )


@dataclass(frozen=True)
class _Executor:
    pool: _Pool
    role: str
    timeout_s: float

    def submit(self, method: str, calls: Mapping[int, Call]) -> _Running:
        return self.pool.run(self.role, "call", method, calls, self.timeout_s)


class _Running:
    """Calls under way. `result` waits for all, or for the first that fails."""

    def __init__(self, pool: _Pool, stage: str, references: Mapping[int, Any], deadline: float, timeout_s: float) -> None:
        self._pool = pool
        self._stage = stage
        self._ranks = {reference: rank for rank, reference in references.items()}
        self._deadline = deadline
        self._timeout_s = timeout_s

    def result(self) -> Mapping[int, Any]:
        ray = _ray()
        results: dict[int, Any] = {}
        failures: dict[int, _Failure | Exception] = {}
        waiting, deadline = list(self._ranks), self._deadline
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            rank = self._ranks[ready[0]]
            try:
                answer = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                answer = error
            if isinstance(answer, _Failure | Exception):
                grace = _CAUSE_S if _blame(answer) == _VICTIM else _GRACE_S
                deadline = min(deadline, time.monotonic() + grace)
                failures[rank] = answer
            else:
                results[rank] = answer
        if failures:
            raise self._error(failures)
        if waiting:
            raise self._hung(sorted(self._ranks[reference] for reference in waiting))
        return results

    def _error(self, failures: Mapping[int, _Failure | Exception]) -> Exception:
        """The failure that is the cause of the others: a death before an exception, any before a broken connection."""
        rank, failure = min(failures.items(), key=lambda item: (_blame(item[1]), item[0]))
        if isinstance(failure, _Failure) and failure.user_error is not None:
            return failure.user_error
        where = f"rank {rank} of {len(self._pool.hosts)} in {self._stage}"
        if isinstance(failure, _Failure) and _blame(failure) == _VICTIM:
            return ConnectionLost(f"{where} lost its connection to another rank:\n{failure.traceback.rstrip()}")
        if isinstance(failure, _Failure):
            return WorkerError(f"{where} failed:\n{failure.traceback.rstrip()}")
        if isinstance(failure, _ray().exceptions.RayTaskError):
            return WorkerError(f"{where} could not be called:\n{_COLOURS.sub('', str(failure)).rstrip()}")
        # Whatever else Ray raises says that a process, a node, or a result that was there, is gone.
        return WorkerLost(f"{where} died: {' '.join(str(failure).split())}")

    def _hung(self, ranks: list[int]) -> WorkerLost:
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {len(self._pool.hosts)}"
        return WorkerLost(
            f"{self._stage}: {names} gave no answer within {self._timeout_s:g} s (training.worker_timeout_s)\n"
            f"{self._pool.where(ranks)}"
        )


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BROKEN = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset",
    "ncclRemoteError",
    "DistNetworkError",
    "DistBackendError",
)
_DEAD, _CAUSE, _VICTIM = range(3)


def _blame(failure: _Failure | Exception) -> int:
    if isinstance(failure, Exception):
        return _DEAD
    return _VICTIM if any(sign in failure.traceback for sign in _BROKEN) else _CAUSE
