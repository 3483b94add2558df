"""The scoring pool against functions that hang, die, throw and print: real processes throughout."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from verl.errors import UserError
from verl.rewards.functions import RewardRequest
from verl.rewards.pool import ScoringPool

REWARD = """
import os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "regex":  # holds the interpreter lock for ages
        import re
        re.match(r"(a+)+$", "a" * 60 + "b")
    if solution_str == "child":  # leaves a process behind and hangs
        child = subprocess.Popen(["sleep", "1000"])
        open(extra_info["file"], "w").write(str(child.pid))
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "crash":
        import ctypes
        ctypes.string_at(0)
    if solution_str == "throw":
        raise ValueError("two\\nlines")
    if solution_str == "sys.exit":
        sys.exit(1)
    if solution_str == "print":
        print("x" * 100_000)
        os.write(1, b"raw bytes")
        return {"score": 1.0, "read": float(len(sys.stdin.read()))}
    if solution_str == "torch":
        return float("torch" in sys.modules)
    if solution_str == "none":
        return None
    if solution_str == "pid":
        return os.getpid()
    return {"score": len(solution_str) + bonus, "index": extra_info.get("index", -1)}
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "reward.py"
    path.write_text(REWARD)
    return str(path)


@pytest.fixture
def pool(reward_file):
    with ScoringPool(reward_file, num_workers=2, timeout_s=1.0) as pool:
        pool.wait_until_ready()
        yield pool


def request(text, **extra_info):
    return RewardRequest(data_source="d", solution_str=text, ground_truth=None, extra_info=extra_info)


def alive(pid):
    """Running, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_results_come_in_the_order_of_the_requests(pool):
    outcomes = pool.score([request("a" * (i % 7), index=i) for i in range(200)])
    assert [o.parts["index"] for o in outcomes] == list(range(200))
    assert [o.score for o in outcomes] == [i % 7 for i in range(200)]
    assert pool.score([]) == []


def test_each_failure_costs_its_own_sample_only(pool):
    before = set(pool.pids)
    texts = ["ok", "loop", "ok", "regex", "exit", "ok", "crash", "throw", "sys.exit", "none", "ok"]
    outcomes = dict(enumerate(pool.score([request(text) for text in texts])))
    assert [i for i, o in outcomes.items() if o.score is not None] == [0, 2, 5, 10]
    assert {i: o.kind for i, o in outcomes.items() if o.kind} == {
        **{1: "timeout", 3: "timeout", 4: "died", 6: "died"},
        **{7: "exception", 8: "exception", 9: "bad_result"},
    }
    assert outcomes[1].failure == "no result within 1 s (reward.timeout_s)"
    assert outcomes[4].failure == "the scoring process died (exit status 3)"
    assert outcomes[6].failure == "the scoring process died (SIGSEGV)"
    assert outcomes[7].failure == "ValueError: two lines"
    assert 'raise ValueError("two\\nlines")' in outcomes[7].traceback
    assert outcomes[8].failure == "SystemExit: 1"
    assert len(pool.pids) == 2 and not before & set(pool.pids)
    assert not any(alive(pid) for pid in before)
    assert pool.score([request("four")])[0].score == 4


def test_deadline_is_kept(pool):
    start = time.monotonic()
    outcomes = pool.score([request("loop"), request("regex"), request("a")])
    assert [o.kind for o in outcomes] == ["timeout", "timeout", None]
    assert 1.0 <= time.monotonic() - start < 6.0


def test_what_a_hanging_call_started_is_killed_with_it(pool, tmp_path):
    file = tmp_path / "pid"
    pool.score([request("child", file=str(file))])
    assert wait_until(lambda: not alive(int(file.read_text())))


def test_printing_and_reading_do_not_disturb_the_protocol(pool):
    outcomes = pool.score([request("print"), request("ab")])
    assert [o.score for o in outcomes] == [1.0, 2.0]
    assert outcomes[0].parts["read"] == 0.0


def test_large_messages_travel_both_ways(pool):
    assert [o.score for o in pool.score([request("x" * 3_000_000)] * 3)] == [3_000_000] * 3


def test_a_row_that_cannot_be_pickled_costs_only_itself(pool):
    outcomes = pool.score([request("a", lock=threading.Lock()), request("ab")])
    assert "cannot be sent to a scoring process: TypeError" in outcomes[0].failure
    assert outcomes[1].score == 2


def test_processes_do_not_load_torch_and_start_fast(reward_file):
    start = time.monotonic()
    with ScoringPool(reward_file, {"bonus": 0.5}, num_workers=1) as pool:
        pool.wait_until_ready()
        assert time.monotonic() - start < 5.0  # 0.1 s on an idle machine; the tests' machine is not
        assert pool.score([request("torch")])[0].score == 0.0
        assert pool.score([request("ab")])[0].score == 2.5


def test_sixty_four_trivial_scores_are_quick(pool):
    requests = [request("a")] * 64
    times = []
    for _ in range(20):
        start = time.perf_counter()
        pool.score(requests)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02, f"{min(times) * 1000:.1f} ms"


def test_a_worker_killed_while_idle_or_starting_costs_no_sample(pool):
    pool.score([request("a")])
    for pid in pool.pids:
        os.kill(pid, 9)
    time.sleep(0.1)
    assert [o.score for o in pool.score([request("a"), request("ab"), request("abc")])] == [1, 2, 3]


def test_an_interrupted_call_leaves_the_pool_usable(pool):
    import _thread

    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            pool.score([request("loop"), request("loop"), request("loop")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert [o.score for o in pool.score([request("a"), request("ab")])] == [1, 2]


def test_close_leaves_no_process_and_can_be_repeated(reward_file):
    pool = ScoringPool(reward_file, num_workers=3)
    pids = pool.pids
    pool.close()
    pool.close()
    assert len(pids) == 3 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([request("a")])


def test_import_errors_are_the_users_to_mend(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(4)")
    with pytest.raises(UserError, match=r"the process that imports it died \(exit status 4\)"):
        ScoringPool(str(tmp_path / "dies.py"), num_workers=2).wait_until_ready()
    (tmp_path / "lacks.py").write_text("import no_such_module_here")
    with pytest.raises(UserError, match="No module named 'no_such_module_here'"):
        ScoringPool(str(tmp_path / "lacks.py"), num_workers=2).score([request("a")])


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from verl.rewards.functions import RewardRequest
from verl.rewards.pool import ScoringPool
pool = ScoringPool("reward:compute_score", num_workers=2, timeout_s={timeout})
print(*pool.pids, flush=True)
requests = [RewardRequest(data_source="", solution_str=t, ground_truth=0) for t in {texts!r}]
print([o.score for o in pool.score(requests)], flush=True)
"""


def start_script(reward_file, tmp_path, texts, timeout):
    """A script without a `__main__` guard that finds its reward on its own search path and never closes its pool."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=os.path.dirname(reward_file), texts=texts, timeout=timeout))
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)


def test_a_plain_script_needs_no_main_guard_and_leaves_nothing_behind(reward_file, tmp_path):
    out, _ = start_script(reward_file, tmp_path, ["a", "ab"], 10.0).communicate(timeout=60)
    pids, scores = out.splitlines()
    assert scores == "[1.0, 2.0]"
    assert not any(alive(int(pid)) for pid in pids.split())


@pytest.mark.parametrize("text", ["loop", "regex"])
def test_workers_end_when_the_driver_is_killed(reward_file, tmp_path, text):
    # "regex" never lets another thread run: the kernel's timer ends it.
    process = start_script(reward_file, tmp_path, [text], 1.0 if text == "regex" else 100.0)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(pids) == 2 and wait_until(lambda: not any(alive(pid) for pid in pids))
