"""training.async_save: checkpoints written while training goes on."""

import errno
import signal
import threading
import time
from contextlib import ExitStack
from unittest import mock

import pytest
from runs import history, keys, make_inputs
from test_trainer import assert_same, weights
from torch.distributed.checkpoint import FileSystemWriter

from verl.checkpoint.background import BackgroundSave, BackgroundWriter
from verl.checkpoint.manager import CheckpointError, CheckpointManager, DiskFull, check_integrity
from verl.trainer.grpo import GRPOTrainer
from verl.trainer.ppo import PPOTrainer
from verl.trainer.sft import SFTTrainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def begin(root, written) -> BackgroundSave:
    with ExitStack() as saving:
        (saving.enter_context(CheckpointManager(root, keep_last=1).saving(1)) / "weights").write_text("1")
        return BackgroundSave(saving.pop_all(), written)


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_has_its_name_only_when_all_is_written(tmp_path):
    ready = []
    save = begin(tmp_path, lambda wait: bool(ready))
    assert not save.advance() and names(tmp_path) == [".writing-step_000001"]
    ready.append(True)
    assert save.advance(wait_for_it=True) and names(tmp_path) == ["last", "step_000001"]
    assert set(check_integrity(tmp_path / "step_000001").files) == {"weights"}


def test_a_write_that_fails_costs_the_checkpoint_and_says_so(tmp_path):
    def written(wait):
        raise DiskFull("the disk of there is full")

    with pytest.raises(CheckpointError, match=r"checkpoint of step 1: the disk of .* is full .*earlier checkpoints are intact"):
        begin(tmp_path, written).advance()
    assert names(tmp_path) == []


def test_at_the_end_of_a_run_an_earlier_error_stays_the_news(tmp_path, capsys):
    def fails(wait):
        raise OSError("broken")

    def never(wait):
        raise AssertionError("a dead worker was asked")

    begin(tmp_path / "a", fails).finish_after(ValueError(), workers_answer=True)
    assert capsys.readouterr().err == "the last checkpoint was lost: broken\n"
    begin(tmp_path / "b", never).finish_after(ValueError(), workers_answer=False)
    begin(tmp_path / "c", lambda wait: True).finish_after(ValueError(), workers_answer=True)
    assert names(tmp_path / "a") == names(tmp_path / "b") == [] and names(tmp_path / "c") == ["last", "step_000001"]
    with pytest.raises(OSError, match="broken"):
        begin(tmp_path / "d", fails).finish_after(None, workers_answer=True)


def test_a_writer_tells_when_it_is_done_and_what_failed_once():
    writer, gate, done = BackgroundWriter(), threading.Event(), []
    assert writer.written(wait_for_it=False)
    writer.submit(gate.wait)
    writer.submit(lambda: done.append(1))
    assert not writer.written(wait_for_it=False) and not done
    gate.set()
    assert writer.written(wait_for_it=True) and done == [1]
    writer.submit(lambda: 1 / 0)
    writer.submit(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        writer.written(wait_for_it=True)
    assert done == [1, 2] and writer.written(wait_for_it=False)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "sft"])
def test_checkpoints_are_those_of_a_run_that_waits_for_them(kind, inputs, tmp_path):
    trainer = {"grpo": GRPOTrainer, "ppo": PPOTrainer, "sft": SFTTrainer}[kind]
    changes = {"training__save_interval": 1, "training__keep_last": 0, "training__total_steps": 3}
    config = keys(inputs, tmp_path, **changes)
    if kind == "sft":
        config = {k: v for k, v in config.items() if k.split(".")[0] in ("data", "training", "tracking")}
        config |= {"actor.lr": 1e-3, "data.max_response_length": 64}
    for name, background in (("waits", False), ("goes_on", True)):
        out = {"training.output_dir": str(tmp_path / name), "training.async_save": background}
        result = trainer(inputs["model"], config=config | out).fit()
        assert result.checkpoint == tmp_path / name / "checkpoints" / "step_000003" and result.checkpoint.is_dir()
    for step in (1, 2, 3):
        folders = [tmp_path / name / "checkpoints" / f"step_{step:06d}" for name in ("waits", "goes_on")]
        files = [check_integrity(folder).files for folder in folders]
        assert files[0].keys() == files[1].keys()
        assert files[0]["model.safetensors"] == files[1]["model.safetensors"]
    for role in ("actor", "critic") if kind == "ppo" else ("actor",):
        assert_same(weights(tmp_path / "waits", role), weights(tmp_path / "goes_on", role))
    # It goes on from the one in the middle as the other does.
    resumed = config | {
        "training.resume": str(folders[1].with_name("step_000002")),
        "training.output_dir": str(tmp_path / "again"),
    }
    trainer(inputs["model"], config=resumed | {"training.async_save": True}).fit()
    assert_same(weights(tmp_path / "waits"), weights(tmp_path / "again"))


def test_training_goes_on_while_a_checkpoint_is_written(inputs, tmp_path, monkeypatch):
    gate, write = threading.Event(), FileSystemWriter.write_data

    def slow(self, *args, **kwargs):
        assert gate.wait(60), "no step came while the checkpoint was being written"
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)

    class Watched(GRPOTrainer):
        def step(self, prompts):
            if self.global_step == 3:  # the checkpoint of step 2 is still waiting
                assert names(tmp_path / "checkpoints") == [".writing-step_000002"]
                gate.set()
            return super().step(prompts)

    config = keys(inputs, tmp_path, training__async_save=True, training__save_interval=2, training__total_steps=4)
    Watched(inputs["model"], config=config).fit()
    assert names(tmp_path / "checkpoints") == ["last", "step_000002", "step_000004"]


def test_a_disk_that_fills_up_meanwhile_ends_the_run_in_one_line(inputs, tmp_path):
    config = keys(inputs, tmp_path, training__async_save=True, training__save_interval=2)

    class Filling(GRPOTrainer):
        def step(self, prompts):
            if self.global_step == 3:
                patch.start()
            return super().step(prompts)

    patch = mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    try:
        with pytest.raises(CheckpointError, match=r"^checkpoint of step 4: the disk of .* is full \(earlier .* intact\)"):
            Filling(inputs["model"], config=config).fit()
    finally:
        patch.stop()
    assert names(tmp_path / "checkpoints") == ["last", "step_000002"]
    check_integrity(tmp_path / "checkpoints" / "step_000002")
    assert GRPOTrainer(inputs["model"], config=config).fit().step == 5 and history(tmp_path)[-1]["step"] == 5


def test_an_interrupt_waits_for_what_is_being_written(inputs, tmp_path, monkeypatch):
    write = FileSystemWriter.write_data

    def slow(self, *args, **kwargs):
        time.sleep(1)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)

    class Interrupted(GRPOTrainer):
        def step(self, prompts):
            if self.global_step == 1:
                signal.raise_signal(signal.SIGINT)
            return super().step(prompts)

    with pytest.raises(KeyboardInterrupt):
        Interrupted(inputs["model"], config=keys(inputs, tmp_path, training__async_save=True, training__save_interval=2)).fit()
    assert names(tmp_path / "checkpoints") == ["last", "step_000002"]
    check_integrity(tmp_path / "checkpoints" / "step_000002")
