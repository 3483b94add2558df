"""A scoring process: reads requests from its standard input, writes outcomes to its standard output.

Each message is a length (8 bytes, little-endian) and a pickle. The first one names the reward function and the
deadline; the answer to it is `("ready", required columns)` or `("error", one line)`. Then a `RewardRequest` in, a
`ScoreOutcome` out. What the reward function prints goes to standard error, and it finds its standard input empty.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import Any, BinaryIO

from verl.errors import UserError
from verl.rewards.functions import RewardFunction, load_reward_function
from verl.rewards.outcome import ScoreOutcome, read_result

HEADER = struct.Struct("<Q")
# The driver kills a call at its deadline. This many seconds later the kernel does, should the driver be gone.
_GRACE_S = 2.0


def main() -> None:
    """Serve until the driver closes the pipe."""
    requests, replies = _take_over_stdio()
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread reads, so that the end of the driver is noticed while a call hangs, and so that the driver never
    # waits for a busy process to read.
    threading.Thread(target=_read_frames, args=(requests, frames), daemon=True).start()

    spec, function_kwargs, timeout_s = pickle.loads(frames.get())
    try:
        function = load_reward_function(spec, function_kwargs)
    except UserError as error:
        _write(replies, ("error", str(error)))
        return
    _write(replies, ("ready", function.required_columns))
    own_pid = os.getpid()
    while True:
        frame = frames.get()
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
        outcome = _score(function, frame)
        if os.getpid() != own_pid:
            os._exit(0)  # a child that the reward function forked and let return: the pipe is not its own
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, outcome)


def _score(function: RewardFunction, frame: bytes) -> ScoreOutcome:
    try:
        return read_result(function(pickle.loads(frame)))
    except BaseException as error:  # KeyboardInterrupt and the like too: it is the function's, not ours
        reason = " ".join(f"{type(error).__name__}: {_text(error)}".split())
        return ScoreOutcome(failure=reason[:300], kind="exception", traceback=traceback.format_exc())


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"


def _take_over_stdio() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes to the driver to ourselves; the file numbers 0 and 1 become /dev/null and standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it was opened on a pipe: nothing would show
    return requests, replies


def _read_frames(requests: BinaryIO, frames: queue.SimpleQueue[bytes]) -> None:
    while header := requests.read(HEADER.size):
        frames.put(requests.read(HEADER.unpack(header)[0]))
    # The driver is gone. The process leads its own group: whatever the reward function started goes with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _write(replies: BinaryIO, message: Any) -> None:
    payload = pickle.dumps(message)
    replies.write(HEADER.pack(len(payload)) + payload)
    replies.flush()


if __name__ == "__main__":
    main()
