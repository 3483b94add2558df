"""The 3D-HybridEngine: one model, two layouts. Weights go from the training engine to the rollout engine here.

Where both live in one process and the model is not sliced, the native engine reads the trainer's own parameters, so a
sync moves nothing: it only drops caches made with the old weights and takes the new version number. Any other engine is
handed a stream of whole tensors under Hugging Face names: slices are cast to the rollout's dtype, then gathered bucket by
bucket, the next one on its way while the last is loaded, so the extra memory is two buckets whatever the model's size.
Every sync ends with a comparison of both sides' fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from verl.engines.rollout.base import RolloutEngine
from verl.engines.train.base import TrainEngine

BUCKET_BYTES = 256 * 2**20
"""Gathered weights of one bucket; a larger tensor is a bucket of its own."""


def sync_weights(
    source: TrainEngine, target: RolloutEngine, *, version: int, shared: bool, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Bring `target` to the weights of `source`. `shared`: both use the same parameter tensors.

    A collective operation where the source is sliced: every rank calls it, each with the target beside it.

    Raises:
        RuntimeError: weights did not arrive as they were sent.
    """
    if shared:
        target.load_weights((), version)
        return
    sent: dict[str, Tensor] = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole_weights(source.named_weights(), target.weight_dtype, bucket_bytes):
            sent[name] = fingerprint(tensor)
            yield name, tensor

    target.load_weights(stream(), version)
    arrived = {name: fingerprint(tensor) for name, tensor in target.named_weights() if name in sent}
    if missing := sorted(sent.keys() - arrived.keys()):
        raise RuntimeError(f"weight sync {version}: the rollout engine has no {missing[0]} ({len(missing)} weights are missing)")
    differing = [name for name in sent if int(sent[name]) != int(arrived[name])]
    if differing:
        raise RuntimeError(f"weight sync {version}: {len(differing)} weights arrived changed, {differing[0]} first")


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 scalar of all bits of a tensor, on its device; equal tensors have equal ones, and a changed, zeroed or
    misplaced element all but surely gives another."""
    bits = tensor.detach().contiguous().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    # Weights by position make transposed and swapped elements count; the sum wraps around, which is no loss.
    places = torch.arange(1, 1 + min(bits.numel(), _PERIOD), device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _PERIOD):
        part = bits[start : start + _PERIOD].long()
        total = total * 1_000_003 + (part * places[: part.numel()]).sum()
    return total


_PERIOD = 2**22
"""Elements widened to int64 at a time."""


def whole_weights(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """`weights` whole and in `dtype`, in order; collective where they are sliced. A tensor is valid until the one after
    its bucket is asked for."""
    running: _Bucket | None = None
    for bucket in _buckets(weights, dtype, bucket_bytes):
        following = _Bucket.start(bucket, dtype)
        if running is not None:
            yield from running.finish()
        running = following
    if running is not None:
        yield from running.finish()


def _buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Runs of tensors that are gathered alike and together take up to `bucket_bytes`."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        bytes_ = tensor.numel() * dtype.itemsize
        if bucket and (size + bytes_ > bucket_bytes or _layout(tensor) != _layout(bucket[0][1])):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += bytes_
    if bucket:
        yield bucket


def _layout(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


@dataclass
class _Bucket:
    """Tensors on their way: `gathered` [ranks, n] will hold each rank's padded slices, one after the other."""

    tensors: list[tuple[str, Tensor]]
    dtype: torch.dtype
    gathered: Tensor | None = None
    work: dist.Work | None = None

    @staticmethod
    def start(tensors: list[tuple[str, Tensor]], dtype: torch.dtype) -> _Bucket:
        first = tensors[0][1]
        if not isinstance(first, DTensor) or not _is_row_sliced(first):
            return _Bucket(tensors, dtype)
        group = first.device_mesh.get_group(first.device_mesh.ndim - 1)
        ranks = dist.get_world_size(group)
        mine = torch.cat([_padded_slice(t, ranks, dtype) for _, t in tensors])
        gathered = torch.empty(ranks, mine.numel(), dtype=dtype, device=mine.device)
        work = dist.all_gather_into_tensor(gathered.view(-1), mine, group=group, async_op=True)
        return _Bucket(tensors, dtype, gathered, work)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        if self.gathered is None:
            for name, tensor in self.tensors:
                tensor = tensor.detach().to(self.dtype)
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return
        assert self.work is not None
        self.work.wait()
        ranks, offset = self.gathered.shape[0], 0
        for name, tensor in self.tensors:
            rows = -(-tensor.shape[0] // ranks)
            size = rows * tensor.shape[1:].numel()
            part = self.gathered[:, offset : offset + size].reshape(ranks * rows, *tensor.shape[1:])
            yield name, part[: tensor.shape[0]]
            offset += size


def _is_row_sliced(tensor: DTensor) -> bool:
    *outer, last = tensor.placements
    return last == Shard(0) and all(placement.is_replicate() for placement in outer)


def _padded_slice(tensor: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    """This rank's rows in `dtype`, flat, with as many behind them as make all ranks alike."""
    rows = -(-tensor.shape[0] // ranks)
    part = tensor.to_local().detach().to(dtype)  # type: ignore[attr-defined]
    flat = part.new_zeros(rows * tensor.shape[1:].numel())
    flat[: part.numel()] = part.reshape(-1)
    return flat
