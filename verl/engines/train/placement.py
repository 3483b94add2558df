"""One model spread over the ranks of a process group: which part of it is on this rank, and what the ranks tell each other.

Made on the meta device: matrices are split for tensor ranks, layers of other stages are taken out, what is left is sliced
(`fully_shard`), and only then do weights come in, one at a time, from rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.engines.train import sharding
from verl.engines.train.gathering import whole_weights
from verl.engines.train.mesh import ModelMesh
from verl.engines.train.pipeline import Passing, StagePlan, cut
from verl.engines.train.scorer import Scorer
from verl.engines.train.tensor_parallel import check_divisible, split_blocks


class Placement:
    """What of a model is on this rank. Its methods are collective operations."""

    def __init__(self, module: nn.Module, body: nn.Module, mesh: ModelMesh, dtype: torch.dtype, temperature: float) -> None:
        """Take the rank's part of `module`, which is on the meta device, in place; `dtype`: of computation.

        Raises ConfigError when the model cannot be split so. `materialise` has to follow.
        """
        shares, stages = mesh.shares, mesh.stages
        layers: Any = body.layers
        tensor = 1 if shares is None or shares.tensor is None else shares.tensor.size
        sequence = 1 if shares is None or shares.sequence is None else shares.sequence.size
        check_divisible(body.config, tensor=tensor, sequence=sequence)
        self.mesh = mesh
        self._module = module
        self.names: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        """Every parameter and buffer of the whole model, on the meta device."""
        self.shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        """Of every parameter of the whole model."""
        self._is_tied = len(self.shapes) < len(dict(module.named_parameters(remove_duplicate=False)))
        self._plan = StagePlan.even(len(layers), stages.size)
        inlet = cut(module, body, self._plan, stages.rank, is_tied=self._is_tied) if stages.size > 1 else None
        blocks = [layer for layer in layers if not isinstance(layer, Passing)]
        if mesh.tensor is not None and shares is not None and shares.tensor is not None:
            split_blocks(blocks, mesh.tensor, shares.tensor, dtype)
        self.scorer = Scorer(module, body, dtype, temperature, shares=shares, inlet=inlet, is_last=mesh.is_last)
        sharding.shard(self.scorer, blocks, mesh.fsdp, dtype)
        self.slice_is_whole = mesh.fsdp.size(mesh.fsdp.ndim - 1) == 1

    def materialise(self, full: nn.Module | None, device: torch.device) -> None:
        """Take weights from rank 0's `full`; None on others."""
        sharding.materialise(self.scorer, self._module, self.names, full, device)

    def let_go(self) -> None:
        """Give up gathered weights that a forward pass alone has left, so that the module's parameters are the slices again."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up, in place, gradients of what tensor ranks have in common, and of an embedding that both ends have."""
        parameters: dict[str, Any] = dict(self._module.named_parameters())
        works = []
        if self.mesh.tensor is not None:
            group = self.mesh.tensor.get_group()
            common = [g for name, g in gradients.items() if not self.mesh.is_split(parameters[name])]
            works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in common]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        if self.mesh.ends is not None:
            for name, gradient in gradients.items():
                if len(self._stages_of(name)) > 1:
                    dist.all_reduce(gradient, group=self.mesh.ends)

    def copies(self, name: str) -> int:
        """On how many ranks each element of a parameter of this rank is."""
        parameter: Any = self._module.get_parameter(name)
        return self.mesh.copies(parameter) * len(self._stages_of(name))

    def whole_weights(self, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model, whole, on every rank; see `gathering.whole_weights`."""
        own = whole_weights(((n, p.data) for n, p in self._module.named_parameters()), dtype, bucket_bytes)
        stages = self.mesh.stages
        if stages.size == 1:
            yield from own
            return
        device = next(self._module.parameters()).device
        for stage in range(stages.size):
            for name, shape in self.shapes.items():
                holders = self._stages_of(name)
                if stage not in holders:
                    continue
                is_mine = stage == stages.rank
                tensor = next(own)[1].contiguous() if is_mine else torch.empty(shape, dtype=dtype, device=device)
                if stage == holders[0]:
                    dist.broadcast(tensor, group_src=stage, group=stages.group)
                    yield name, tensor

    def _stages_of(self, name: str) -> list[int]:
        if self.mesh.stages.size == 1:
            return [0]
        return self._plan.stages_of(name, is_tied=self._is_tied)
