"""Weights on their way between processes: from the actor's rank 0 to every rank of a generator on other devices.

They travel in buckets by broadcast, over NCCL between GPUs and over gloo between CPUs. A key-value store beside them says
what each bucket holds, so that both ends need to know only an address. While one bucket travels the next is put together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.engines.hybrid import fingerprint
from verl.engines.train.gathering import BUCKET_BYTES


@dataclass(frozen=True)
class LinkAddress:
    """Where the sender of weights is found, and how many receivers it waits for."""

    host: str
    port: int
    receivers: int
    timeout_s: float


class WeightSender:
    """The sending end. Opening it waits for nobody; the first `send` waits for all receivers."""

    def __init__(self, host: str, receivers: int, timeout_s: float) -> None:
        # Port 0: the system picks one that is free.
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        self.address = LinkAddress(host=host, port=self._store.port, receivers=receivers, timeout_s=timeout_s)
        self._group: Any = None
        self._sent: list[str] = []

    def send(
        self, weights: Iterable[tuple[str, Tensor]], device: torch.device, version: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Give all of `weights`, on `device`, to the receivers, which wait in `receive` and have done with the version before."""
        if self._group is None:
            self._group = _group(self._store, 0, self.address, device)
        for key in self._sent:  # of the version before, which has arrived everywhere
            self._store.delete_key(key)
        self._sent = []
        fingerprints: dict[str, Tensor] = {}
        under_way: tuple[Any, Tensor] | None = None
        for shapes, flat in _buckets(weights, bucket_bytes, fingerprints):
            self._announce(version, shapes)
            work = self._group.broadcast(flat, 0)
            if under_way is not None:
                under_way[0].wait()
            under_way = work, flat
        if under_way is not None:
            under_way[0].wait()
        self._announce(version, None)
        self._announce(version, {name: int(sent) for name, sent in fingerprints.items()})

    def _announce(self, version: int, what: Any) -> None:
        key = f"weights/{version}/{len(self._sent)}"
        self._store.set(key, json.dumps(what))
        self._sent.append(key)


def _buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, fingerprints: dict[str, Tensor]
) -> Iterator[tuple[list[tuple[str, list[int]]], Tensor]]:
    """Runs of tensors of up to `bucket_bytes`, copied one behind the other, with their names and shapes; a larger tensor is
    a bucket of its own. Notes down the fingerprint of each."""
    shapes: list[tuple[str, list[int]]] = []
    flat, used = torch.empty(0), 0
    for name, tensor in weights:
        fingerprints[name] = fingerprint(tensor)
        if used + tensor.numel() > flat.numel():
            if shapes:
                yield shapes, flat[:used]
            flat, used, shapes = tensor.new_empty(max(bucket_bytes // tensor.element_size(), tensor.numel())), 0, []
        flat[used : used + tensor.numel()].copy_(tensor.reshape(-1))
        shapes.append((name, list(tensor.shape)))
        used += tensor.numel()
    if shapes:
        yield shapes, flat[:used]


class WeightReceiver:
    """The receiving end, one for each rank that generates; `dtype` is what the sender's weights are in."""

    def __init__(self, address: LinkAddress, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        timeout = timedelta(seconds=address.timeout_s)
        self._store = dist.TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._address, self._rank, self._device, self._dtype = address, rank, device, dtype
        self._group: Any = None
        self.fingerprints: dict[str, int] = {}
        """Name -> fingerprint of what was sent last, known once it has all been received."""

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Every weight of `version` in the order of sending; a tensor is valid until the one after its bucket is asked for."""
        if self._group is None:
            self._group = _group(self._store, 1 + self._rank, self._address, self._device)
        index = 0
        while (bucket := self._announced(version, index)) is not None:
            shapes = [(name, torch.Size(shape)) for name, shape in bucket]
            flat = torch.empty(sum(shape.numel() for _, shape in shapes), dtype=self._dtype, device=self._device)
            self._group.broadcast(flat, 0).wait()
            for (name, shape), part in zip(shapes, flat.split([shape.numel() for _, shape in shapes]), strict=True):
                yield name, part.view(shape)
            index += 1
        self.fingerprints = self._announced(version, index + 1)

    def _announced(self, version: int, index: int) -> Any:
        return json.loads(self._store.get(f"weights/{version}/{index}"))


def _group(store: dist.Store, rank: int, address: LinkAddress, device: torch.device) -> Any:
    """A process group of the sender (rank 0) and all receivers, beside those that each side has of its own."""
    size, timeout = 1 + address.receivers, timedelta(seconds=address.timeout_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
