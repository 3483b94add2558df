"""How long training stands still for a checkpoint, with and without training.async_save.

    python benchmarks/async_save.py [--layers 28] [--saves 3]

A Qwen3-0.6B-shaped model with random weights, its Adam moments, and its export are written to a temporary folder: once by
waiting for the files, once by copying to host memory and writing from there. Printed: medians of the seconds in which
training cannot go on, of the seconds until everything is written, and the bytes of a checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from memory_switches import build_model

from verl.config.schema import ModelConfig, OptimizerConfig
from verl.data.batch import TokenBatch
from verl.engines.train.fsdp import FSDPEngine


def trained_engine(folder: Path) -> FSDPEngine:
    """An engine that has done a step: Adam has its moments."""
    from verl.algorithms.losses import SFTLoss

    engine = FSDPEngine(ModelConfig(path=str(folder)), optimizer=OptimizerConfig(lr=1e-6))
    batch = TokenBatch(torch.tensor([0, 64]), input_ids=torch.arange(64), loss_mask=torch.arange(64) > 8)
    engine.forward_backward(batch, SFTLoss())
    engine.optimizer_step()
    return engine


def save(engine: FSDPEngine, folder: Path, background: bool) -> tuple[float, float]:
    """(seconds until training can go on, seconds until all is written)"""
    started = time.perf_counter()
    writes = [engine.exporting(folder, background=background), engine.saving(folder / "actor", background=background)]
    copied = time.perf_counter() - started
    for write in writes:
        write()
    written = time.perf_counter() - started
    return (copied if background else written), written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--saves", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        build_model(root / "model", args.layers, "cuda" if torch.cuda.is_available() else "cpu")
        engine = trained_engine(root / "model")
        medians = {}
        for background in (False, True):
            save(engine, root / f"warm_{background}", background)
            times = [save(engine, root / f"{background}_{i}", background) for i in range(args.saves)]
            medians[background] = [statistics.median(column) for column in zip(*times, strict=True)]
        size = sum(file.stat().st_size for file in (root / "warm_True").rglob("*") if file.is_file())
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, torch {torch.__version__}, {args.layers} layers, {size / 2**30:.2f} GiB a checkpoint")
    print(f"{'training.async_save':20} {'blocked, s':>12} {'written after, s':>18}")
    for background, (blocked, written) in medians.items():
        print(f"{str(background).lower():20} {blocked:12.2f} {written:18.2f}")
    print(f"blocked {medians[False][0] / medians[True][0]:.1f} times shorter")


if __name__ == "__main__":
    main()
