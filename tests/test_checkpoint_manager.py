"""Checkpoint folders: whole or absent, whatever happens while one is written."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.checkpoint.manager import CheckpointError, CheckpointManager, KeepBest, check_integrity, resolve_checkpoint
from verl.checkpoint.rng import rng_state, set_rng_state


def save(manager: CheckpointManager, step: int, content: str = "weights") -> Path:
    with manager.saving(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_text(f"{content} {step}")
        (folder / "trainer.json").write_text(json.dumps({"step": step}))
    return manager.folder(step)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("step_"))


def test_saves_and_moves_both_links(tmp_path):
    root, outside = tmp_path / "runs" / "a" / "checkpoints", tmp_path / "checkpoints" / "last"
    manager = CheckpointManager(root, keep_last=0, last_link=outside)
    assert manager.latest() is None
    for step in (1, 20):
        folder = save(manager, step)
        assert folder == root / f"step_{step:06d}" == manager.latest()
        for link in (root / "last", outside):
            assert link.resolve() == folder and not os.path.isabs(os.readlink(link))
    assert os.readlink(outside) == "../runs/a/checkpoints/step_000020"
    assert check_integrity(folder).step == 20
    assert set(check_integrity(folder).files) == {"actor/model.bin", "trainer.json"}
    # A run's folder can be moved: the link inside is relative.
    moved = tmp_path / "elsewhere"
    (tmp_path / "runs").rename(moved)
    assert (moved / "a" / "checkpoints" / "last" / "actor" / "model.bin").read_text() == "weights 20"


def test_keeps_the_newest_and_the_one_in_use(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        save(manager, step)
    assert steps(tmp_path) == ["step_000003", "step_000004"]
    manager.use(tmp_path / "step_000003")
    for step in (5, 6, 7):
        save(manager, step)
    assert steps(tmp_path) == ["step_000003", "step_000006", "step_000007"]


def test_a_resumed_run_outranks_larger_steps_of_the_abandoned_one(tmp_path):
    first = CheckpointManager(tmp_path, keep_last=2)
    save(first, 50)
    save(first, 70)
    resumed = CheckpointManager(tmp_path, keep_last=2)
    resumed.use(tmp_path / "step_000050")
    save(resumed, 60)
    assert resumed.latest() == tmp_path / "step_000060"
    assert steps(tmp_path) == ["step_000050", "step_000060", "step_000070"]
    save(resumed, 65)
    assert steps(tmp_path) == ["step_000050", "step_000060", "step_000065"]


def test_keeps_the_best_with_a_link_and_takes_scores_from_manifests(tmp_path):
    best = KeepBest(number=1, metric="val/accuracy")
    scores = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.9, 5: None, 6: float("nan")}
    for step, score in scores.items():
        manager = CheckpointManager(tmp_path, keep_last=1, keep_best=best)  # each a start of its own
        with manager.saving(step, {} if score is None else {"val/accuracy": score}) as folder:
            (folder / "model.bin").write_text(str(step))
        wanted = 1 if step == 1 else 2  # of equals the first
        assert (tmp_path / "best").resolve() == manager.folder(wanted) == manager.best()[0]
        assert steps(tmp_path) == sorted({f"step_{step:06d}", f"step_{wanted:06d}"})
        assert resolve_checkpoint(tmp_path / "best") == manager.folder(wanted)
        assert resolve_checkpoint(tmp_path) == manager.folder(step)  # the newest, as ever
    assert check_integrity(manager.folder(2)).validation == {"val/accuracy": 0.9}
    # Saved again with a worse score, it is the best no longer.
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=KeepBest(number=2, metric="val/loss", smaller_is_better=True))
    for step, loss in ((7, 3.0), (8, 1.0), (9, 2.0), (10, 5.0), (11, 4.0)):
        with manager.saving(step, {"val/loss": loss}):
            pass
    assert [folder.name for folder in manager.best()] == ["step_000008", "step_000009"]
    assert (tmp_path / "best").resolve() == manager.folder(8)
    with manager.saving(8, {"val/loss": 9.0}):
        pass
    assert (tmp_path / "best").resolve() == manager.folder(9)
    CheckpointManager(tmp_path, keep_last=1)  # without keep_best the link goes when the next is saved
    save(CheckpointManager(tmp_path, keep_last=1), 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000012"]


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 5, "old")
    save(manager, 5, "new")
    assert (manager.latest() / "actor" / "model.bin").read_text() == "new 5"
    check_integrity(manager.latest())


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_exception_while_writing_leaves_the_previous_one(tmp_path, error):
    manager = CheckpointManager(tmp_path, keep_last=1)
    good = save(manager, 1)
    with pytest.raises(type(error)), manager.saving(2) as folder:
        (folder / "half").write_text("x")
        raise error
    assert manager.latest() == good == (tmp_path / "last").resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000001"]
    check_integrity(good)


def test_a_full_disk_is_one_clear_line_and_costs_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    good = save(manager, 1)
    with pytest.raises(CheckpointError, match=r"step 2: the disk of .* is full") as caught, manager.saving(2):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "\n" not in str(caught.value)
    assert manager.latest() == good
    check_integrity(good)


def test_a_really_full_device(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    good = save(manager, 1)
    with pytest.raises(CheckpointError, match="full"), manager.saving(2), open("/dev/full", "wb") as file:
        file.write(b"x" * 100_000)
    assert manager.latest() == good


KILLED = """
import os, signal, sys
from pathlib import Path
from verl.checkpoint import manager as module
manager = module.CheckpointManager(Path(sys.argv[1]), keep_last=1)
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "writing":
    with manager.saving(2) as folder:
        (folder / "model.bin").write_text("half")
        kill()
else:
    if sys.argv[2] == "before rename":
        module._sync = lambda path, sync=module._sync: kill() if (Path(path) / "manifest.json").exists() else sync(path)
    elif sys.argv[2] == "before link":
        module._point = kill
    elif sys.argv[2] == "removing":
        module.shutil.rmtree = kill
    with manager.saving(2) as folder:
        (folder / "model.bin").write_text("whole")
"""


@pytest.mark.parametrize(("moment", "survivor"), [("writing", 1), ("before rename", 2), ("before link", 2), ("removing", 2)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, moment, survivor):
    save(CheckpointManager(tmp_path, keep_last=1), 1)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), moment])
    assert done.returncode == -signal.SIGKILL
    # Before anything is cleared, a reader gets a whole checkpoint.
    check_integrity(resolve_checkpoint(tmp_path))
    check_integrity(resolve_checkpoint(tmp_path / "last"))
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert manager.latest() == tmp_path / f"step_{survivor:06d}"
    check_integrity(manager.latest())
    save(manager, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000003"]


def test_resolve_accepts_step_run_and_link(tmp_path):
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", keep_last=0, last_link=tmp_path / "last")
    save(manager, 1)
    newest = save(manager, 2)
    for given in (newest, tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "last", str(tmp_path / "last")):
        assert resolve_checkpoint(given) == newest
    assert resolve_checkpoint(manager.folder(1)) == manager.folder(1)


def test_damage_is_found_and_named(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=0)
    older, newer = save(manager, 1), save(manager, 2)
    model = newer / "actor" / "model.bin"
    model.write_text("weightz 2")
    with pytest.raises(CheckpointError, match=r"actor/model.bin differs from its checksum"):
        check_integrity(newer)
    model.write_text("short")
    with pytest.raises(CheckpointError, match="has 5 bytes instead of 9"):
        resolve_checkpoint(newer)
    assert manager.latest() == older
    model.unlink()
    with pytest.raises(CheckpointError, match=r"actor/model.bin is missing"):
        check_integrity(newer)
    for text in ("{", '{"checkpoint": {"step": 2, "serial": "2", "files": {}}}'):
        (newer / "manifest.json").write_text(text)
        assert resolve_checkpoint(tmp_path) == older


@pytest.mark.parametrize("name", ["step_000002", ".writing-step_000002", ".removing-x"])
def test_a_file_where_a_checkpoint_would_be_is_left(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match="is a file where a checkpoint would be"):
        CheckpointManager(tmp_path, keep_last=1)
    assert (tmp_path / name).read_text() == "mine"


def test_errors_of_resolve_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("gone")
    for path, words in (
        ("nowhere", "no checkpoint at"),
        ("empty", "holds no complete checkpoint"),
        ("dangling", "a link to gone"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            resolve_checkpoint(tmp_path / path)
        assert "\n" not in str(caught.value)


def test_a_folder_in_the_place_of_the_link_is_refused_at_start(tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.raises(CheckpointError, match="is no link"):
        CheckpointManager(tmp_path / "run", keep_last=1, last_link=tmp_path / "last")


def test_rng_state_survives_json_and_repeats_every_generator():
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    random.gauss(0, 1), np.random.randn(), torch.randn(3)  # leaves cached halves of Gaussian pairs behind
    stored = json.dumps(rng_state())

    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.randn(2).tolist(),
            torch.randn(3).tolist(),
            torch.randperm(9).tolist(),
        )

    first = draw()
    assert draw() != first
    set_rng_state(json.loads(stored))
    assert draw() == first
