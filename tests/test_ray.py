"""The `ray` runtime: the same workers and the same driver as in one process, on several; failures that surface once."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from verl.checkpoint.manager import CheckpointError, check_integrity, read_manifest
from verl.checkpoint.tensors import read_tensors
from verl.controller import (
    LocalRuntime,
    ResourcePool,
    Worker,
    WorkerError,
    WorkerLost,
    WorkerSpec,
    all_ranks,
    data_parallel,
    one_to_all,
    register,
)
from verl.data.batch import TokenBatch
from verl.errors import UserError
from verl.trainer.grpo import GRPOTrainer
from verl.trainer.ppo import PPOTrainer
from verl.trainer.sft import SFTTrainer
from verl.workers.model import ActorWorker

ray = pytest.importorskip("ray")
from ray_hosts import hosts  # noqa: E402
from runs import assert_alike, history, keys, make_inputs  # noqa: E402

pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


class Probe(Worker):
    @register(dispatch=one_to_all)
    def where(self):
        return self.context.rank, self.context.world_size, os.getpid()

    @register(dispatch=all_ranks)
    def sum_of_ranks(self):
        import torch.distributed as dist

        total = torch.tensor(float(self.context.rank))
        dist.all_reduce(total)
        return float(total)

    @register(dispatch=data_parallel)
    def double(self, batch):
        return batch.input_ids * 2.0

    @register(dispatch=data_parallel)
    def same(self, batch):
        return batch

    @register(dispatch=data_parallel, blocking=False)
    def slowly(self, words):
        time.sleep(0.5)
        return [word.upper() for word in words]

    @register(dispatch=all_ranks)
    def fail(self, rank, kind):
        """One rank fails, and the others wait for it in a collective operation."""
        import torch.distributed as dist

        if self.context.rank == rank:
            if kind == "exit":
                os._exit(1)
            if kind == "hang":
                time.sleep(100)
            broken = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:1")
            errors = {"user": UserError("model.path=x: no"), "own": TwoParts("model.path=x", "no"), "broken": broken}
            raise errors.get(kind) or ZeroDivisionError("once")
        dist.all_reduce(torch.ones(1))

    @register(dispatch=one_to_all)
    def peers(self):
        return sorted(self.context.peers), {os.getpid()}


class TwoParts(UserError):
    def __init__(self, field, fault):
        super().__init__(f"{field}: {fault}")


class Refuses(Worker):
    def __init__(self, context, *, message):
        raise UserError(message)


def batch(sequences=6):
    lengths = torch.arange(2, 2 + sequences)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return TokenBatch(cu, input_ids=torch.arange(int(cu[-1])), loss_mask=torch.ones(int(cu[-1]), dtype=torch.bool))


@pytest.fixture
def runtime():
    from verl.controller.ray import RayRuntime

    with RayRuntime(timeout_s=60) as made:
        yield made


def test_calls_reach_ranks_and_come_back_in_order(runtime):
    pool = ResourcePool(num_workers=2)
    groups = runtime.spawn(pool, {"a": WorkerSpec(Probe), "b": WorkerSpec(Probe)})
    places = groups["a"].where()
    assert [place[:2] for place in places] == [(0, 2), (1, 2)] and len({place[2] for place in places}) == 2
    assert groups["b"].where() == places  # colocated: one process a rank
    assert groups["a"].sum_of_ranks() == 1.0
    local = LocalRuntime().spawn(pool, {"a": WorkerSpec(Probe)})["a"]
    given = batch()
    assert torch.equal(groups["a"].double(given), local.double(given))
    assert groups["a"].same(given).input_ids.equal(given.input_ids)
    assert groups["a"].double(batch(1)).tolist() == [0.0, 2.0]  # fewer sequences than ranks
    started = time.monotonic()
    pending = [groups["a"].slowly(["x", "y", "z"]), groups["b"].slowly(["u"])]
    assert time.monotonic() - started < 0.4
    assert [p.result() for p in pending] == [["X", "Y", "Z"], ["U"]]


def test_pools_apart_live_in_processes_of_their_own(runtime):
    first = runtime.spawn(ResourcePool(name="one", num_workers=1), {"a": WorkerSpec(Probe)})["a"]
    second = runtime.spawn(ResourcePool(name="two", num_workers=2), {"a": WorkerSpec(Probe)})["a"]
    assert len({place[2] for place in first.where() + second.where()}) == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "error", "named"),
    [
        ("user", UserError, "^model.path=x: no$"),
        ("own", UserError, "^model.path=x: no$"),
        ("bug", WorkerError, r"^rank {rank} of 2 in a\.fail failed:\nTraceback (.|\n)*ZeroDivisionError: once$"),
        ("exit", WorkerLost, r"^rank {rank} of 2 in a\.fail died: "),
    ],
)
def test_the_rank_that_failed_is_named_once(kind, error, named, rank, runtime):
    group = runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"]
    started = time.monotonic()
    with pytest.raises(error, match=named.format(rank=rank)):
        group.fail(rank, kind)
    assert time.monotonic() - started < 20


def test_a_broken_connection_without_a_known_cause_counts_as_a_lost_worker(runtime, monkeypatch):
    monkeypatch.setattr("verl.controller.ray._CAUSE_S", 0.5)
    group = runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"]
    with pytest.raises(WorkerLost, match=r"^rank 1 of 2 in a\.fail lost its connection to another rank:\nTraceback"):
        group.fail(1, "broken")


def test_processes_are_gone_when_a_runtime_is_shut_down(runtime):
    places = runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"].where()
    assert hosts() == sorted(pid for _, _, pid in places)
    runtime.shutdown()
    assert hosts() == []


def test_a_hanging_rank_is_named_with_what_it_does():
    from verl.controller.ray import RayRuntime

    with RayRuntime(timeout_s=3) as runtime:
        group = runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"]
        with pytest.raises(WorkerLost, match=r"a\.fail: ranks 0, 1 of 2 gave no answer within 3 s") as error:
            group.fail(1, "hang")
        assert "time.sleep(100)" in str(error.value) and "all_reduce" in str(error.value)


def test_what_a_constructor_refuses_and_what_has_no_room(runtime):
    with pytest.raises(UserError, match=r"^no such thing$"):
        runtime.spawn(ResourcePool(), {"a": WorkerSpec(Refuses, {"message": "no such thing"})})
    with pytest.raises(UserError, match="needs 9 x 1 CPU, and the Ray cluster has 4 CPU in all"):
        runtime.spawn(ResourcePool(num_workers=9), {"a": WorkerSpec(Probe)})
    runtime.shutdown()
    assert runtime.spawn(ResourcePool(num_workers=2), {"a": WorkerSpec(Probe)})["a"].sum_of_ranks() == 1.0


# --- whole runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def local_runs(inputs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("local")
    GRPOTrainer(inputs["model"], config=keys(inputs, out / "grpo", algorithm__kl_loss_coef=0.01)).fit()
    PPOTrainer(inputs["model"], config=keys(inputs, out / "ppo", rollout__n=2, training__total_steps=3)).fit()
    return out


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"data_parallel_size": 2},
        {"data_parallel_size": 4},
        {"data_parallel_size": 4, "fsdp_size": 2},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"sequence_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"rollout_devices": 1},
        {"data_parallel_size": 2, "rollout_devices": 2},
        {"pipeline_model_parallel_size": 2, "rollout_devices": 1},
    ],
    ids=lambda parallel: " ".join(f"{name.split('_')[0]} {size}" for name, size in parallel.items()) or "one",
)
def test_grpo_is_the_same_on_any_ranks(parallel, inputs, local_runs, tmp_path):
    config = keys(inputs, tmp_path, algorithm__kl_loss_coef=0.01, training__runtime="ray", training__total_steps=5)
    config |= {f"parallel.{name}": size for name, size in parallel.items()}
    GRPOTrainer(inputs["model"], config=config).fit()
    assert_alike(tmp_path, local_runs / "grpo", 1e-4)
    saved = read_tensors(tmp_path / "checkpoints" / "last" / "actor")
    wanted = read_tensors(local_runs / "grpo" / "checkpoints" / "last" / "actor")
    assert saved.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name.startswith("weights."):
            assert torch.allclose(saved[name], tensor, atol=2e-4), name


@pytest.mark.parametrize("kind", ["data", "tensor_model"])
def test_ppo_is_the_same_on_two_ranks(kind, inputs, local_runs, tmp_path):
    config = keys(inputs, tmp_path, rollout__n=2, training__total_steps=3) | {f"parallel.{kind}_parallel_size": 2}
    PPOTrainer(inputs["model"], config=config).fit()
    assert_alike(tmp_path, local_runs / "ppo", 1e-4)


def test_a_run_goes_on_with_another_number_of_ranks(inputs, local_runs, tmp_path):
    grpo = {"algorithm__kl_loss_coef": 0.01}
    for ranks, steps in ((4, 2), (2, 3), (1, 5)):
        config = keys(inputs, tmp_path, **grpo, parallel__data_parallel_size=ranks, training__total_steps=steps)
        GRPOTrainer(inputs["model"], config=config).fit()
    assert_alike(tmp_path, local_runs / "grpo", 1e-4)


@pytest.mark.parametrize("kind", ["data", "tensor_model"])
def test_checkpoints_written_meanwhile_are_those_of_their_steps(kind, inputs, local_runs, tmp_path):
    config = keys(inputs, tmp_path, rollout__n=2, training__total_steps=3) | {f"parallel.{kind}_parallel_size": 2}
    background = {"training.save_interval": 1, "training.keep_last": 0, "training.async_save": True}
    PPOTrainer(inputs["model"], config=config | background).fit()
    assert_alike(tmp_path, local_runs / "ppo", 1e-4)
    for step in (1, 2):
        out = tmp_path / f"from_{step}"
        start = {"training.output_dir": str(out), "training.resume": str(tmp_path / "checkpoints" / f"step_{step:06d}")}
        PPOTrainer(inputs["model"], config=config | start).fit()
        for role in ("actor", "critic"):
            saved, wanted = (read_tensors(run / "checkpoints" / "last" / role) for run in (out, tmp_path))
            assert saved.keys() == wanted.keys()
            assert [name for name, tensor in wanted.items() if not torch.equal(saved[name], tensor)] == []


def test_sft_is_the_same_on_two_ranks_and_exports_what_transformers_loads(inputs, tmp_path):
    from transformers import AutoModelForCausalLM

    base = {k: v for k, v in keys(inputs, tmp_path).items() if k.split(".")[0] in ("data", "training", "tracking")}
    base |= {"actor.lr": 1e-3, "data.max_response_length": 64, "training.total_steps": 3, "training.eval_interval": None}
    results = {}
    for ranks in (1, 2):
        config = base | {"parallel.data_parallel_size": ranks, "training.output_dir": str(tmp_path / str(ranks))}
        results[ranks] = SFTTrainer(inputs["model"], config=config).fit()
    assert_alike(results[2].run_dir, results[1].run_dir, 1e-4)
    one, two = (dict(AutoModelForCausalLM.from_pretrained(r.checkpoint).named_parameters()) for r in results.values())
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


# --- workers that are lost


def kill_at(trainer, step: int, rank: int):
    """`kill -9` of one rank as the training step after `step` begins; once."""
    original, killed = trainer.step, []

    def step_after_murder(prompts):
        if trainer.global_step == step and not killed:
            killed.append(hosts()[rank])
            os.kill(killed[0], signal.SIGKILL)
        return original(prompts)

    trainer.step = step_after_murder


def test_a_killed_rank_ends_the_run_with_its_last_checkpoint_named(inputs, tmp_path):
    config = keys(inputs, tmp_path, parallel__data_parallel_size=2, training__save_interval=1, training__total_steps=3)
    trainer = GRPOTrainer(inputs["model"], config=config)
    kill_at(trainer, 2, 1)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"(?s)rank . of 2 in \w+\.\w+ died: .*start the run again to go on from .*step_000002"):
        trainer.fit()
    assert time.monotonic() - started < 60 and hosts() == []
    check_integrity((tmp_path / "checkpoints" / "last").resolve())


@pytest.mark.parametrize("rank", [0, 1], ids=["trainer", "generator"])
def test_a_death_in_either_of_two_pools_is_told(rank, inputs, local_runs, tmp_path, capsys):
    config = keys(inputs, tmp_path, algorithm__kl_loss_coef=0.01, parallel__rollout_devices=1)
    trainer = GRPOTrainer(inputs["model"], config=config | {"training.save_interval": 2, "training.max_restarts": 1})
    kill_at(trainer, 3, rank)
    assert trainer.fit().step == 5
    assert f"in {('actor', 'rollout')[rank]}." in capsys.readouterr().err
    assert_alike(tmp_path, local_runs / "grpo", 1e-4)


@pytest.mark.parametrize("background", [False, True])
def test_a_run_starts_again_by_itself_and_ends_the_same(background, inputs, local_runs, tmp_path, capsys):
    config = keys(inputs, tmp_path, algorithm__kl_loss_coef=0.01, parallel__data_parallel_size=2)
    config |= {"training.async_save": background}
    trainer = GRPOTrainer(inputs["model"], config=config | {"training.save_interval": 2, "training.max_restarts": 1})
    kill_at(trainer, 3, 0)
    assert trainer.fit().step == 5
    assert "restart 1 of 1, from " in capsys.readouterr().err
    assert_alike(tmp_path, local_runs / "grpo", 1e-4)


def kill_a_rank_after(seconds: float, choose: random.Random, ended: threading.Event) -> None:
    """`kill -9` of a random rank at that moment, or as soon after it as there is one."""
    ended.wait(seconds)
    while not ended.is_set():
        if ranks := hosts():
            os.kill(choose.choice(ranks), signal.SIGKILL)
            return
        time.sleep(0.05)


def test_a_rank_killed_while_a_run_starts_leaves_it_to_the_next_start(inputs, tmp_path, monkeypatch, capsys):
    config = keys(inputs, tmp_path, parallel__data_parallel_size=2, training__save_interval=1, training__total_steps=1)
    GRPOTrainer(inputs["model"], config=config).fit()
    original, killed = GRPOTrainer._restore, []

    def restore(self, folder, state):
        killed.append(hosts()[1])
        os.kill(killed[-1], signal.SIGKILL)
        monkeypatch.setattr(GRPOTrainer, "_restore", original)
        original(self, folder, state)

    monkeypatch.setattr(GRPOTrainer, "_restore", restore)
    with pytest.raises(WorkerLost, match="the run had not begun; start it again"):
        GRPOTrainer(inputs["model"], config=config | {"training.total_steps": 2}).fit()
    assert hosts() == []
    monkeypatch.setattr(GRPOTrainer, "_restore", restore)
    trainer = GRPOTrainer(inputs["model"], config=config | {"training.total_steps": 2, "training.max_restarts": 1})
    assert trainer.fit().step == 2 and len(killed) == 2
    assert "restart 1 of 1, from where it began" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_never_breaks_or_hangs_a_run(inputs, tmp_path):
    """Ten times a `kill -9` of a random rank at a random moment: a clear error within the limit, and whole checkpoints."""
    choose = random.Random(0)
    config = keys(inputs, tmp_path / "run", parallel__data_parallel_size=2, training__save_interval=1)
    config |= {"training.total_steps": 100_000, "training.worker_timeout_s": 60.0}
    for attempt in range(10):
        config |= {"training.async_save": attempt % 2 == 1}
        ended = threading.Event()
        killer = threading.Thread(target=kill_a_rank_after, args=(choose.uniform(1.0, 14.0), choose, ended))
        killer.start()
        started = time.monotonic()
        try:
            with pytest.raises(WorkerLost, match=r"died|find each other|lost its connection") as error:
                GRPOTrainer(inputs["model"], config=config).fit()
        finally:
            ended.set()
            killer.join()
        print(f"{time.monotonic() - started:.0f} s: {str(error.value).splitlines()[0]}")
        assert time.monotonic() - started < 100 and hosts() == []
        for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
            check_integrity(folder)
    step = read_manifest((tmp_path / "run" / "checkpoints" / "last").resolve()).step
    assert GRPOTrainer(inputs["model"], config=config | {"training.total_steps": step + 3}).fit().step == step + 3
    assert [row["step"] for row in history(tmp_path / "run") if row.get("kind") == "train"] == list(range(1, step + 4))


# --- a full disk


class OutOfSpace(ActorWorker):
    """The last rank finds the disk full at its second checkpoint."""

    saves = 0

    @register(dispatch=all_ranks)
    def save(self, folder, background=False):
        from torch.distributed.checkpoint import FileSystemWriter

        self.saves += 1
        if self.saves == 2 and self.context.rank == self.context.world_size - 1:
            full = OSError(errno.ENOSPC, "No space left on device")
            mock.patch.object(FileSystemWriter, "write_data", side_effect=full).start()  # for the rest of this process
        return super().save(folder, background)


@pytest.mark.parametrize(("ranks", "background"), [(1, False), (2, False), (2, True)])
def test_a_disk_that_is_full_for_one_rank_is_one_line_and_costs_no_checkpoint(ranks, background, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.workers.model.ActorWorker", OutOfSpace)
    config = keys(inputs, tmp_path, parallel__data_parallel_size=ranks, training__save_interval=1, training__keep_last=1)
    config |= {"training.async_save": background, "training.runtime": "ray"}
    with pytest.raises(CheckpointError, match=r"^checkpoint of step 2: the disk of .* is full \(earlier .* intact\)") as error:
        GRPOTrainer(inputs["model"], config=config).fit()
    assert "\n" not in str(error.value) and hosts() == []
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["last", "step_000001"]
    assert check_integrity((root / "last").resolve()).step == 1


# --- programs and scripts


def test_the_tutorials_dataflow_is_the_same_under_both_runtimes(inputs, tmp_path, monkeypatch):
    import importlib.util

    from verl.config import config_from_dict

    spec = importlib.util.spec_from_file_location("rejection_sampling", ROOT / "examples/dataflow/rejection_sampling.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rejection_sampling", module)
    monkeypatch.syspath_prepend(ROOT / "examples/dataflow")  # where the workers find it
    spec.loader.exec_module(module)
    body = (ROOT / "examples/dataflow/rejection_sampling.py").read_text().split("def deal")[1].split("if __name__")[0]
    assert len([line for line in body.splitlines() if line.strip()]) < 40
    losses = []
    for ranks in (1, 2):
        config = keys(inputs, tmp_path, training__total_steps=3, parallel__data_parallel_size=ranks, model__path=inputs["model"])
        losses.append(module.train(config_from_dict(config, printer=[].append)))
    assert len(losses[0]) > 0 and losses[0] == pytest.approx(losses[1], rel=1e-4)


def overrides(config: dict) -> list[str]:
    return [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in config.items()]


def processes_of_session(leader: int) -> list[str]:
    """Command lines of what is left of a program and of all it has started, ended ones apart."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if f"{MARK}={leader}" in (folder / "environ").read_bytes().decode(errors="replace") and command:
                left.append(command)
        except OSError:
            continue
    return left


MARK = "VERL_TEST_PROCESS_OF"


@pytest.mark.parametrize("signalled", ["the driver", "the terminal's processes"])
@pytest.mark.parametrize("place", ["in one process", "on this cluster", "on a cluster of its own"])
def test_an_interrupted_run_saves_and_leaves_nothing_behind(place, signalled, inputs, tmp_path):
    """Ctrl-C, which a terminal sends to every process of the program."""
    config = keys(inputs, tmp_path / "run", model__path=inputs["model"], training__total_steps=100_000)
    config |= {} if place == "in one process" else {"parallel.data_parallel_size": 2}
    address = ray.get_runtime_context().gcs_address if place == "on this cluster" else "local"
    program = subprocess.Popen(
        [sys.executable, "-m", "verl", "train", *overrides(config)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": address, MARK: str(os.getpid())},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert program.stdout is not None
    shown = ""
    try:
        while "[Step 2]" not in shown:
            line = program.stdout.readline()
            assert line, shown + program.stderr.read()
            shown += line
        seen = " ".join(processes_of_session(os.getpid()))
        assert ("raylet" in seen and "ray::_Host" in seen) == (place == "on a cluster of its own"), seen
        (os.kill if signalled == "the driver" else os.killpg)(program.pid, signal.SIGINT)
        output, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 130, errors
    assert errors.count("finishing this step, then saving") == 1 and "interrupted" in errors.splitlines(), errors
    assert "Traceback" not in errors + output and "Warning" not in errors and "saved: " in output
    root = tmp_path / "run" / "checkpoints"
    step = check_integrity((root / "last").resolve()).step
    assert step == history(tmp_path / "run")[-1]["step"] and [p.name for p in root.glob("step_*")] == [f"step_{step:06d}"]
    assert hosts() == []
    for _ in range(100):
        if not (left := processes_of_session(os.getpid())):
            break
        time.sleep(0.1)
    assert left == []


def test_the_guides_script_runs_under_ray(inputs, tmp_path):
    """`bash examples/grpo_trainer/run_qwen3-0.6b.sh`, with a small model and two CPU processes."""
    changes = keys(inputs, tmp_path / "run", model__path=inputs["model"], parallel__data_parallel_size=2, training__total_steps=2)
    shown = subprocess.run(
        ["bash", ROOT / "examples/grpo_trainer/run_qwen3-0.6b.sh", *overrides(changes)],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "[Step 2] Final Reward" in shown.stdout
    assert len(history(tmp_path / "run")) == 2
