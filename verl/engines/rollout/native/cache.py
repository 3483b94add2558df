"""The key-value cache, in one of two layouts behind one interface.

`paged`: blocks of a few tokens, [blocks, block_size, K, D], named by block tables; a group's prompt is stored once
    and its full blocks are shared by count of references. What a GPU wants.
`rows`: one block a slot as long as the longest sequence, [rows, K, block_size, D], and row i belongs to slot i, so
    the keys of a running batch are one strided view and no step copies them. What a CPU wants: there, gathering the
    pages costs as much as the attention itself. Untouched memory is never committed by the operating system.

Shapes: T tokens, K key-value heads, D head size, B sequences, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from verl.engines.rollout.native.spec import DecoderSpec

Layout = Literal["paged", "rows"]


class KVCache:
    """Keys and values of all layers. Block ids are the scheduler's affair; here they are only addresses."""

    def __init__(
        self, spec: DecoderSpec, *, layout: Layout, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout: Layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        k, d = spec.num_kv_heads, spec.head_dim
        self._num_kv_heads = k
        shape = (num_blocks, block_size, k, d) if layout == "paged" else (num_blocks, k, block_size, d)
        # Zeros, not empty: a masked position still enters the softmax as 0 * value, and 0 * NaN would be NaN.
        self._layers = [_zeros((2, *shape), dtype, device) for _ in range(spec.num_layers)]
        self._flat = [layer.view(-1, d) for layer in self._layers]
        heads = torch.arange(k, device=device)
        stride = 1 if layout == "paged" else block_size
        values = num_blocks * block_size * k
        # Offsets of a token's K keys and K values from its address.
        self._head_offsets = torch.cat((heads * stride, heads * stride + values))

    def addresses(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Where tokens live: `tables` [T, blocks] and `positions` [T] -> [T, 2K], to be handed to `write`."""
        size = self.block_size
        if self.layout == "rows":
            base = tables[:, 0] * (size * self._num_kv_heads) + positions
        else:
            column = torch.div(positions, size, rounding_mode="floor")
            block = tables.gather(1, column[:, None])[:, 0]
            base = (block * size + positions - column * size) * self._num_kv_heads
        return base[:, None] + self._head_offsets

    def write(self, layer: int, addresses: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [T, 2K, D] (keys first) at `addresses` [T, 2K]."""
        self._flat[layer].index_put_((addresses,), keys_values)

    def read(self, layer: int, tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` positions (or a little more) of B sequences, each [B, K, L, D].

        In layout `rows` sequence i must be in row i, which makes this a view.
        """
        storage = self._layers[layer]
        b = tables.shape[0]
        if self.layout == "rows":
            keys, values = storage[:, :b, :, :length].unbind(0)
            return keys, values
        num = -(-length // self.block_size)
        index = tables[:, :num].flatten()
        _, _, size, k, d = storage.shape
        keys, values = (storage[i].index_select(0, index).view(b, num * size, k, d)[:, :length].transpose(1, 2) for i in (0, 1))
        return keys, values

    def copy(self, copies: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of block `source` to block `destination`, for each pair."""
        if not copies:
            return
        device = self._head_offsets.device
        source = torch.tensor([s for s, _ in copies], device=device)
        destination = torch.tensor([d for _, d in copies], device=device)
        for storage in self._layers:
            part = storage[:, :, :length] if self.layout == "paged" else storage[:, :, :, :length]
            part.index_copy_(1, destination, part.index_select(1, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU out of `calloc`, whose pages take memory only once they are written: a cache for 256 long
    sequences costs what the sequences there really are need. torch.zeros writes every page at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
