"""Tensors that leave the device between uses, for host memory that is pinned where that makes the way back quick."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class ModuleParking:
    """The slices of a sharded module, on the device or on the host. PyTorch moves them, since it keeps views of its own."""

    def __init__(self, module: nn.Module, device: torch.device, moved: Callable[[], None]) -> None:
        """`moved` is called after each move, for views that others keep."""
        self._module = module
        self._device = device
        self._moved = moved
        self.is_parked = False

    def park(self) -> None:
        if not self.is_parked and self._device.type != "cpu":
            self._move(torch.device("cpu"))
            self.is_parked = True

    def fetch(self) -> None:
        if self.is_parked:
            self._move(self._device)
            self.is_parked = False

    def _move(self, device: torch.device) -> None:
        self._module.to(device)
        self._moved()


class HostParking:
    """A set of tensors that is on the device or parked on the host. The tensor objects stay the same; their memory moves,
    so whoever keeps views of it has to take them anew."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        """`tensors`: gives the set, which may grow (Adam's moments are born with the first step)."""
        self._tensors = tensors
        self._device = device
        self._host: dict[int, Tensor] = {}
        """Host memory of each tensor, kept for the next time: pinning is slower than copying."""
        self.is_parked = False

    def park(self) -> None:
        """Move to the host; nothing happens where the device is the host, or what is parked already."""
        if self.is_parked or self._device.type == "cpu":
            return
        moved = list(self._tensors())
        for tensor in moved:
            host = self._host.get(id(tensor))
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty_like(tensor.data, device="cpu", pin_memory=True)
                self._host[id(tensor)] = host
            host.copy_(tensor.data, non_blocking=True)
        torch.cuda.synchronize(self._device)  # before the device memory is given up
        for tensor in moved:
            tensor.data = self._host[id(tensor)]
        self.is_parked = True

    def fetch(self) -> None:
        """Bring everything back to the device."""
        if not self.is_parked:
            return
        for tensor in self._tensors():
            if tensor.device != self._device:
                tensor.data = tensor.data.to(self._device, non_blocking=True)
        self.is_parked = False
