"""`verl export`: a checkpoint's weights as a Hugging Face folder, whatever ranks saved them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl.checkpoint.manager import check_integrity, resolve_checkpoint
from verl.errors import UserError
from verl.observe.records import check_writable


def export_checkpoint(checkpoint: Path, output: Path, dtype: str | None = None) -> Path:
    """Write the policy of `checkpoint` (a step, run, `last` or `best`) to `output` from its master weights.

    dtype: float32 or bfloat16; None: that of the model folder inside the checkpoint, which is the dtype of training.
    Raises UserError when the checkpoint is incomplete or damaged, or `output` is no empty place.
    """
    import torch

    from verl.checkpoint.tensors import read_tensors
    from verl.config.schema import ModelConfig
    from verl.engines.train.loading import export_model, load_causal_lm, stored_dtype

    folder = resolve_checkpoint(checkpoint)
    check_writable("output", output, folder=True)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not empty; name another folder")
    check_integrity(folder)
    kind = getattr(torch, dtype) if dtype else stored_dtype(folder)
    tensors = read_tensors(folder / "actor")
    weights = {name.removeprefix("weights."): t.to(kind) for name, t in tensors.items() if name.startswith("weights.")}
    model = ModelConfig(path=str(folder))
    export_model(load_causal_lm(model, torch.device("meta"), kind), model, output, weights)
    return output


def main(argv: Sequence[str]) -> None:
    """Write a checkpoint's weights as a Hugging Face folder."""
    import argparse

    parser = argparse.ArgumentParser(prog="verl export", description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a step folder, a run, or a `last` or `best` link")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: that of training")
    args = parser.parse_args(argv)
    from verl.observe.console import quiet_third_party

    quiet_third_party()
    print(f"written: {export_checkpoint(args.checkpoint, args.output, args.dtype)}")
