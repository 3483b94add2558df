"""The `ray` runtime over several nodes: raylets of their own on this machine, with object stores of their own."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray")
from ray_hosts import hosts  # noqa: E402
from runs import assert_alike, keys, make_inputs  # noqa: E402

from verl.controller import ResourcePool, Worker, WorkerLost, WorkerSpec, all_ranks, data_parallel, one_to_all, register  # noqa: E402
from verl.controller.ray import RayRuntime  # noqa: E402
from verl.data.batch import TokenBatch  # noqa: E402
from verl.trainer.grpo import GRPOTrainer  # noqa: E402

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture
def cluster(monkeypatch):
    """A head without room for a pool, and two nodes with a CPU each. For one test: they lose nodes."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DEBUG", "legacy")
    ray.shutdown()
    quiet = {"include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    made.nodes = [made.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


class Probe(Worker):
    @register(dispatch=one_to_all)
    def node(self):
        return ray.get_runtime_context().get_node_id()

    @register(dispatch=all_ranks)
    def sum_of_ranks(self):
        import torch.distributed as dist

        total = torch.tensor(float(self.context.rank))
        dist.all_reduce(total)
        return float(total)

    @register(dispatch=data_parallel)
    def same(self, batch):
        return batch

    @register(dispatch=all_ranks)
    def stop_in_the_middle(self, value):
        product = 6 * value
        breakpoint()
        return product

    @register(dispatch=all_ranks)
    def wait_for_each_other(self):
        import torch.distributed as dist

        while True:
            dist.barrier()


def test_ranks_on_different_nodes_reach_each_other(cluster):
    with RayRuntime(timeout_s=60) as runtime:
        group = runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"]
        assert len(set(group.node())) == 2 and ray.get_runtime_context().get_node_id() not in group.node()
        assert group.sum_of_ranks() == 1.0
        # Large enough to travel from one object store to another.
        length = 300_000
        batch = TokenBatch(torch.tensor([0, length, 2 * length]), input_ids=torch.arange(2 * length))
        assert torch.equal(group.same(batch).input_ids, batch.input_ids)


def test_grpo_over_two_nodes_is_the_same_as_in_one_process(cluster, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    local = keys(inputs, tmp_path / "local", training__total_steps=3)
    GRPOTrainer(inputs["model"], config=local).fit()
    GRPOTrainer(
        inputs["model"], config=keys(inputs, tmp_path / "ray", training__total_steps=3, parallel__data_parallel_size=2)
    ).fit()
    assert_alike(tmp_path / "ray", tmp_path / "local", 1e-4)


def test_a_node_that_goes_down_ends_the_call_as_a_lost_worker(cluster):
    with RayRuntime(timeout_s=120) as runtime:
        group = runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"]
        assert group.sum_of_ranks() == 1.0
        threading.Timer(0.5, cluster.remove_node, (cluster.nodes[1],), {"allow_graceful": False}).start()
        started = time.monotonic()
        with pytest.raises(WorkerLost, match=r"^rank . of 2 in a\.wait_for_each_other (died|lost its connection)"):
            group.wait_for_each_other()
        assert time.monotonic() - started < 60
    assert hosts() == []


def test_a_node_that_goes_down_ends_a_run_with_its_last_checkpoint_named(cluster, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    config = keys(inputs, tmp_path / "run", parallel__data_parallel_size=2, training__save_interval=1, training__total_steps=9)
    trainer = GRPOTrainer(inputs["model"], config=config)
    original = trainer.step

    def step(prompts):
        if trainer.global_step == 2:
            cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        return original(prompts)

    trainer.step = step
    with pytest.raises(WorkerLost, match=r"(?s)rank . of 2 in .*start the run again to go on from .*step_000002"):
        trainer.fit()
    assert hosts() == []


def test_a_breakpoint_in_a_worker_waits_for_ray_debug(cluster):
    """As docs/start/multinode.md says, with a person who looks at a variable and goes on."""
    with RayRuntime(timeout_s=60) as runtime:
        group = runtime.spawn(ResourcePool(num_workers=1), {"a": WorkerSpec(Probe)})["a"]
        answers: list[int] = []
        call = threading.Thread(target=lambda: answers.append(group.stop_in_the_middle(7)))
        call.start()
        debugger = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "debug", "--address", cluster.address],
            env=os.environ | {"RAY_AUTH_MODE": "token"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert debugger.stdin is not None and debugger.stdout is not None
        seen = b""
        for awaited, typed in ((b"test_cluster.py:", b"0\n"), (b"(Pdb)", b"p 'product', product\n"), (b"42)", b"c\n")):
            deadline = time.monotonic() + 30
            while awaited not in seen and time.monotonic() < deadline:
                if awaited == b"test_cluster.py:":
                    debugger.stdin.write(b"\n")  # refreshes the list
                    debugger.stdin.flush()
                    time.sleep(0.2)
                seen += os.read(debugger.stdout.fileno(), 4096)
            debugger.stdin.write(typed)
            debugger.stdin.flush()
        call.join(30)
        debugger.kill()
        debugger.wait()
    assert "('product', 42)" in seen.decode() and answers == [42]


def test_a_breakpoint_in_one_process_is_plain_pdb(tmp_path):
    script = tmp_path / "dataflow.py"
    script.write_text(
        "from verl.controller import LocalRuntime, ResourcePool, Worker, WorkerSpec, all_ranks, register\n"
        "class Probe(Worker):\n"
        "    @register(dispatch=all_ranks)\n"
        "    def stop_in_the_middle(self, value):\n"
        "        product = 6 * value\n"
        "        breakpoint()\n"
        "        return product\n"
        "group = LocalRuntime().spawn(ResourcePool(), {'a': WorkerSpec(Probe)})['a']\n"
        "print('answer', group.stop_in_the_middle(7))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        env={name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"},  # Ray's, in this process
        input="p 'product', product\nc\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "('product', 42)" in done.stdout and "answer 42" in done.stdout


def test_an_address_where_no_cluster_is_is_named(tmp_path):
    """A run that was meant for a cluster does not go on alone."""
    done = subprocess.run(
        [sys.executable, "-c", "from verl.controller.ray import RayRuntime; RayRuntime()"],
        env=os.environ | {"RAY_ADDRESS": "127.0.0.1:9"},
        capture_output=True,
        text=True,
    )
    assert done.returncode and "UserError: RAY_ADDRESS=127.0.0.1:9: " in done.stderr and "unset RAY_ADDRESS" in done.stderr


def test_clusters_of_other_programs_are_left_alone(tmp_path):
    """One that `ray.init` began belongs to its program, and ends with it."""
    script = tmp_path / "other.py"
    script.write_text(
        "import ray, sys\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, logging_level='ERROR')\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    ours = (
        "import ray; from verl.controller.ray import RayRuntime\n"
        "RayRuntime(num_cpus=2); print(ray.get_runtime_context().gcs_address, ray.cluster_resources()['CPU'])"
    )
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as other:
        assert other.stdin and other.stdout
        theirs = other.stdout.readline().strip()
        done = subprocess.run([sys.executable, "-c", ours], env=env, capture_output=True, text=True, timeout=120)
        other.stdin.close()
    assert theirs and done.returncode == 0, done.stderr
    address, cpus = done.stdout.split()
    assert address != theirs and float(cpus) == 2
