"""Sliced and split weights put together again, bucket by bucket, the next one on its way while the last is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.engines.train.mesh import TENSOR
from verl.engines.train.token_shares import all_gather

BUCKET_BYTES = 256 * 2**20
"""Gathered weights of one bucket; a larger tensor is a bucket of its own."""


def whole_weights(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
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
        if bucket and (size + bytes_ > bucket_bytes or _mesh(tensor) != _mesh(bucket[0][1])):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += bytes_
    if bucket:
        yield bucket


def _mesh(tensor: Tensor) -> object:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


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
        if not isinstance(first, DTensor):
            return _Bucket(tensors, dtype)
        group = first.device_mesh.get_group("shard")
        ranks = dist.get_world_size(group)
        mine = torch.cat([_padded_slice(t, ranks, dtype) for _, t in tensors])
        gathered = torch.empty(ranks, mine.numel(), dtype=dtype, device=mine.device)
        work = all_gather(gathered.view(-1), mine, group=group, async_op=True)
        return _Bucket(tensors, dtype, gathered, work)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        if self.gathered is None:
            yield from ((name, tensor.detach().to(self.dtype)) for name, tensor in self.tensors)
            return
        assert self.work is not None
        self.work.wait()
        parts = list(self._parts(self.gathered))
        mesh: Any = self.tensors[0][1].device_mesh  # type: ignore[attr-defined]
        if TENSOR not in mesh.mesh_dim_names:
            yield from parts
            return
        mine = torch.cat([part.reshape(-1) for _, part in parts])
        self.gathered = mine.new_empty(mesh.size(mesh.ndim - 1), mine.numel())
        all_gather(self.gathered.view(-1), mine, group=mesh.get_group(TENSOR))
        offset = 0
        for (name, part), (_, tensor) in zip(parts, self.tensors, strict=True):
            pieces = self.gathered[:, offset : offset + part.numel()].unflatten(1, part.shape)
            yield name, torch.cat(pieces.unbind(), dim=_split_dim(tensor))
            offset += part.numel()

    def _parts(self, gathered: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the slices make up: tensors, or this tensor rank's part of them."""
        ranks, offset = gathered.shape[0], 0
        for name, tensor in self.tensors:
            shape = _part_shape(tensor)
            rows = -(-shape[0] // ranks)
            size = rows * shape[1:].numel()
            part = gathered[:, offset : offset + size].reshape(ranks * rows, *shape[1:])
            yield name, part[: shape[0]]
            offset += size


def _split_dim(tensor: Any) -> int:
    return tensor.placements[-1].dim


def _part_shape(tensor: Any) -> torch.Size:
    """Shape of what a tensor rank has of it, slices together."""
    if TENSOR not in tensor.device_mesh.mesh_dim_names:
        return tensor.shape
    shape = list(tensor.shape)
    shape[_split_dim(tensor)] //= tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    return torch.Size(shape)


def _padded_slice(tensor: Any, ranks: int, dtype: torch.dtype) -> Tensor:
    """This rank's rows in `dtype`, flat, with as many behind them as make all ranks alike."""
    shape = _part_shape(tensor)
    part = tensor.to_local().detach().to(dtype)
    flat = part.new_zeros(-(-shape[0] // ranks) * shape[1:].numel())
    flat[: part.numel()] = part.reshape(-1)
    return flat
