"""The scoring pool: reward functions run in processes of their own, each call under a deadline.

A call that hangs, or a process that dies (segmentation fault, `os._exit`, out of memory), costs its own sample: the
process is killed with everything it started, replaced, and the failure is reported in that sample's place.

Processes are new interpreters (`subprocess`), never forks: the driver may hold CUDA, threads and locks. They do not
import the driver's main script, so the script needs no `if __name__ == "__main__"`, and they do not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from verl.errors import UserError
from verl.rewards.functions import RewardRequest
from verl.rewards.outcome import ScoreOutcome
from verl.rewards.worker import HEADER

START_DEADLINE_S = 120.0
"""Time for a process to start and import the reward function (which may import torch or sympy)."""
MAX_FAILED_STARTS = 3
"""In a row, of a function that has been imported before."""
QUEUE_DEPTH = 8
"""Requests a process is sent ahead, so that a quick function never waits for the driver."""

# The driver's exact search path, so that what can be imported here can be imported there.
_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.rewards.worker import main; main()"


def default_num_workers() -> int:
    """As many as this process may use cores, 4 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores)


class _Worker:
    """One scoring process and the two ends of its pipes. Never blocks: the pool waits for all of them at once."""

    def __init__(self, selector: selectors.BaseSelector, first_message: bytes) -> None:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the driver alone, and one kill reaches all of the group
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self.state: Literal["starting", "idle", "busy"] = "starting"
        self.queue: deque[int] = deque()
        """Which requests it was sent; it works on the first."""
        self.deadline = time.monotonic() + START_DEADLINE_S
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._selector = selector
        selector.register(self.stdout, selectors.EVENT_READ, self)
        self.send(first_message)

    def begin(self, index: int, payload: bytes, timeout_s: float) -> None:
        if self.state == "idle":
            self.state, self.deadline = "busy", time.monotonic() + timeout_s
        self.queue.append(index)
        self.send(payload)

    def finish(self, timeout_s: float) -> int:
        """The request just answered leaves the queue, and the clock of the next one starts."""
        index = self.queue.popleft()
        self.deadline = time.monotonic() + timeout_s
        if not self.queue:
            self.state = "idle"
        return index

    def send(self, payload: bytes) -> None:
        waiting = bool(self._unsent)
        self._unsent = memoryview(bytes(self._unsent) + HEADER.pack(len(payload)) + payload)
        if not waiting:
            self.flush()
            if self._unsent:
                self._selector.register(self.stdin, selectors.EVENT_WRITE, self)

    def on_writable(self) -> None:
        self.flush()
        if not self._unsent:
            self._selector.unregister(self.stdin)

    def flush(self) -> None:
        """Write what the pipe takes. A broken pipe is left to the reading side, which sees the end as well."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = memoryview(b"")

    def receive(self) -> list[Any]:
        """The messages that are complete. Raises EOFError when the process has ended."""
        chunk = os.read(self.stdout.fileno(), 1 << 20)
        if not chunk:
            raise EOFError
        self._received += chunk
        messages: list[Any] = []
        start = 0
        while len(self._received) >= start + HEADER.size:
            end = start + HEADER.size + HEADER.unpack_from(self._received, start)[0]
            if len(self._received) < end:
                break
            messages.append(pickle.loads(bytes(self._received[start + HEADER.size : end])))
            start = end
        del self._received[:start]
        return messages

    def kill(self, grace_s: float = 0.0) -> int:
        """End the process and its children, at once or `grace_s` seconds later; its exit status (negative: the signal)."""
        if self._unsent:
            self._selector.unregister(self.stdin)
        self._selector.unregister(self.stdout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        return _end_process(self.process)


def _end_process(process: subprocess.Popen[bytes]) -> int:
    # The group outlives its leader if the reward function started processes, so it is killed in either case.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.wait()


class ScoringPool:
    """`num_workers` scoring processes for one reward function. A context manager; also closed at exit."""

    def __init__(
        self, function: str, function_kwargs: Mapping[str, Any] | None = None, *, num_workers: int = 0, timeout_s: float = 10.0
    ) -> None:
        """Start the processes, without waiting for them: see `wait_until_ready`.

        Args:
            function: `package.module:name` or `path/to/file.py:name`.
            function_kwargs: passed to it by name.
            num_workers: 0 takes `default_num_workers()`.
            timeout_s: deadline of one call, in seconds.
        """
        self.timeout_s = timeout_s
        self.required_columns: tuple[str, ...] = ()
        """Columns a TRL-style function cannot do without; known once a process is ready."""
        self._first_message = pickle.dumps((function, dict(function_kwargs or {}), timeout_s))
        self._function = function
        self._was_ready = False
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        # Runs when the pool is closed, collected, or the interpreter exits, whichever is first.
        self._finalizer = weakref.finalize(self, _shut_down, self._workers, self._selector)
        for _ in range(num_workers or default_num_workers()):
            self._start_worker()

    def wait_until_ready(self) -> None:
        """Return once a process has imported the function; at once when one has before.

        Raises:
            UserError: the function cannot be imported or does not accept the arguments.
        """
        try:
            while not self._was_ready:
                self._step({}, deque())
        except BaseException:
            self.close()
            raise

    def score(self, requests: Sequence[RewardRequest]) -> list[ScoreOutcome]:
        """Score every request; outcomes in the order of the requests, failures in their place."""
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("the scoring pool is closed")
            self.wait_until_ready()
            outcomes: dict[int, ScoreOutcome] = {}
            pending = deque(range(len(requests)))
            try:
                while len(outcomes) < len(requests):
                    for worker in [w for w in self._workers if w.state != "starting"]:
                        if worker.state == "idle" and worker.process.poll() is not None:
                            self._replace(worker)  # it died between two calls: no sample is to blame
                        else:
                            self._fill_queue(worker, requests, pending, outcomes)
                    if len(outcomes) < len(requests):
                        self._step(outcomes, pending)
            except BaseException:
                # Interrupted: answers still to come belong to requests nobody waits for any more.
                for worker in [w for w in self._workers if w.state == "busy"]:
                    self._replace(worker)
                raise
            return [outcomes[index] for index in range(len(requests))]

    def close(self) -> None:
        """Kill and reap all processes. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, for reports and tests."""
        return [worker.process.pid for worker in self._workers]

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self._selector, self._first_message))

    def _replace(self, worker: _Worker, grace_s: float = 0.0) -> int:
        self._workers.remove(worker)
        status = worker.kill(grace_s)
        self._start_worker()
        return status

    def _fill_queue(
        self, worker: _Worker, requests: Sequence[RewardRequest], pending: deque[int], outcomes: dict[int, ScoreOutcome]
    ) -> None:
        # Towards the end one each, so that no request waits behind another while a process has nothing to do.
        while pending and len(worker.queue) < min(QUEUE_DEPTH, 1 + len(pending) // len(self._workers)):
            index = pending.popleft()
            try:
                payload = pickle.dumps(requests[index], protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # whatever a user's column raises when it is pickled
                reason = f"the row cannot be sent to a scoring process: {type(error).__name__}: {error}"
                outcomes[index] = ScoreOutcome(failure=reason, kind="exception")
                continue
            worker.begin(index, payload, self.timeout_s)

    def _step(self, outcomes: dict[int, ScoreOutcome], pending: deque[int]) -> None:
        """Wait for the next event or deadline and deal with it. Outcomes are added under their request's index;
        requests that a lost process had not begun go back to `pending`."""
        deadlines = [worker.deadline for worker in self._workers if worker.state != "idle"]
        events = self._selector.select(max(0.0, min(deadlines) - time.monotonic()))
        for key, mask in events:
            worker: _Worker = key.data
            if worker not in self._workers:
                continue  # replaced a moment ago, in this very loop
            if mask & selectors.EVENT_WRITE:
                worker.on_writable()
            else:
                self._receive(worker, outcomes, pending)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.state != "idle" and w.deadline <= now]:
            if worker.state == "starting":
                raise UserError(
                    f"reward.function {self._function!r} takes over {START_DEADLINE_S:.0f} s to import; make it lighter"
                )
            outcomes[worker.queue.popleft()] = ScoreOutcome(
                failure=f"no result within {self.timeout_s:g} s (reward.timeout_s)", kind="timeout"
            )
            pending.extendleft(reversed(worker.queue))
            self._replace(worker)

    def _receive(self, worker: _Worker, outcomes: dict[int, ScoreOutcome], pending: deque[int]) -> None:
        try:
            messages = worker.receive()
        except EOFError:
            self._bury(worker, outcomes, pending)
            return
        for message in messages:
            if worker.state == "busy":
                outcomes[worker.finish(self.timeout_s)] = message
            elif message[0] == "error":
                raise UserError(message[1])
            else:
                self.required_columns = message[1]
                self._was_ready, self._failed_starts = True, 0
                worker.state = "idle"

    def _bury(self, worker: _Worker, outcomes: dict[int, ScoreOutcome], pending: deque[int]) -> None:
        # The pipe closes a moment before the exit status is there.
        status = self._replace(worker, grace_s=1.0)
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if worker.state == "busy":
            outcomes[worker.queue.popleft()] = ScoreOutcome(failure=f"the scoring process died ({how})", kind="died")
            pending.extendleft(reversed(worker.queue))
        elif worker.state == "starting":
            # Where the function has been imported before, something from outside killed this process: try again.
            self._failed_starts += 1
            if not self._was_ready or self._failed_starts > MAX_FAILED_STARTS:
                raise UserError(f"reward.function {self._function!r}: the process that imports it died ({how})")


def _shut_down(workers: list[_Worker], selector: selectors.BaseSelector) -> None:
    for worker in workers:
        _end_process(worker.process)
    workers.clear()
    selector.close()
