"""The ranks of a training engine as a grid: pipeline stages x data x sequence x tensor, the last varying fastest.

All ranks of one *replica* (the same data rank) work on the same sequences. A row's tokens are spread over its sequence and
tensor ranks (`TokenShares`), its layers over its stages. Parameters are sliced (FSDP) over the data and sequence ranks of
a stage, after tensor ranks have taken their part of the matrices they split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from verl.controller.dispatch import WorkerLayout
from verl.engines.train.token_shares import Peers, TokenShares
from verl.errors import ConfigError

TENSOR = "tensor"
"""Name of the mesh dimension over which matrices are split."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks one replica of a model is spread over, by kind, and how many hold one sliced copy."""

    tensor: int = 1
    """Ranks that split each layer's matrices (Shoeybi et al. 2019)."""
    pipeline: int = 1
    """Ranks (stages) that split the layers."""
    sequence: int = 1
    """Ranks that split each row of tokens, and exchange them for heads in attention (Ulysses, Jacobs et al. 2023)."""
    fsdp_size: int | None = None
    """Ranks that hold one sliced copy of a stage; None: all its data and sequence ranks."""

    @property
    def replica_size(self) -> int:
        return self.tensor * self.pipeline * self.sequence

    def layout(self, world_size: int) -> WorkerLayout:
        """Data rank of each rank. Raises ConfigError when replicas do not fill the world."""
        if world_size % self.replica_size:
            raise ConfigError(
                f"parallel: tensor {self.tensor} x pipeline {self.pipeline} x sequence {self.sequence} = {self.replica_size} "
                f"ranks a replica do not divide {world_size} ranks"
            )
        self.slices(world_size)
        row = self.sequence * self.tensor
        per_stage = world_size // self.pipeline
        return WorkerLayout(data_ranks=tuple(rank % per_stage // row for rank in range(world_size)))

    def slices(self, world_size: int) -> int:
        """Ranks that hold one sliced copy of a stage. Raises ConfigError when such groups do not fill a stage."""
        ranks = world_size // (self.pipeline * self.tensor)
        size = ranks if self.fsdp_size is None else self.fsdp_size
        if ranks % size:
            raise ConfigError(f"parallel.fsdp_size={size} does not divide the {ranks} ranks; use one of {_divisors(ranks)}")
        return size


@dataclass(frozen=True, kw_only=True)
class ModelMesh:
    """This rank's place in the grid, and whom it works with."""

    fsdp: DeviceMesh
    """(slices,) or (replicas, slices), of this rank's stage and tensor rank."""
    tensor: DeviceMesh | None
    """None where matrices are not split."""
    shares: TokenShares | None
    """None where each rank has whole rows."""
    stages: Peers
    """Ranks that differ from this one by the stage alone."""
    ends: dist.ProcessGroup | None
    """First and last stage of this rank's column, if it is one of them and there are several."""
    stage_size: int
    """Ranks of one stage."""

    @property
    def is_first(self) -> bool:
        return self.stages.rank == 0

    @property
    def is_last(self) -> bool:
        return self.stages.rank == self.stages.size - 1

    def copies(self, tensor: DTensor) -> int:
        """On how many ranks of its stage each element of a sliced parameter is."""
        mesh = tensor.device_mesh
        sizes = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        return self.stage_size // functools.reduce(lambda a, b: a * b, sizes, 1)

    def is_split(self, tensor: DTensor) -> bool:
        """Whether tensor ranks have different parts of it."""
        return TENSOR in (tensor.device_mesh.mesh_dim_names or ())


@functools.cache
def model_mesh(device_type: str, parallelism: Parallelism) -> ModelMesh:
    """One mesh serves every engine of the process, since each makes process groups of its own. Collective."""
    world, p = dist.get_world_size(), parallelism
    p.layout(world)
    size = p.slices(world)
    dims = {"stage": p.pipeline, "replicate": world // (p.pipeline * p.tensor * size), "shard": size, TENSOR: p.tensor}
    # A dimension of one rank is left out, but for the slices: fewer groups, and layouts that say what they are.
    kept = {name: n for name, n in dims.items() if n > 1 or name == "shard"}
    root = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    names = tuple(name for name in kept if name in ("replicate", "shard"))
    fsdp = root if len(names) == len(kept) else root[names if len(names) > 1 else names[0]]
    return ModelMesh(
        fsdp=fsdp,
        tensor=root[TENSOR] if p.tensor > 1 else None,
        shares=_shares(world, p),
        stages=Peers.of(root.get_group("stage")) if p.pipeline > 1 else Peers.alone(),
        ends=_ends(world, p),
        stage_size=world // p.pipeline,
    )


def _shares(world: int, p: Parallelism) -> TokenShares | None:
    row = p.sequence * p.tensor
    if row == 1:
        return None
    return TokenShares(
        tokens=_peers(world, lambda rank: rank // row),
        tensor=_peers(world, lambda rank: rank // p.tensor) if p.tensor > 1 else None,
        sequence=_peers(world, lambda rank: (rank // row, rank % p.tensor)) if p.sequence > 1 else None,
    )


def _ends(world: int, p: Parallelism) -> dist.ProcessGroup | None:
    if p.pipeline == 1:
        return None
    per_stage, mine = world // p.pipeline, None
    for column in range(per_stage):
        ranks = [column, column + (p.pipeline - 1) * per_stage]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _peers(world: int, key: Callable[[int], object]) -> Peers:
    """The group of ranks with the key of this one; every rank takes part in making every group."""
    groups: dict[object, list[int]] = {}
    for rank in range(world):
        groups.setdefault(key(rank), []).append(rank)
    made = {k: dist.new_group(ranks) for k, ranks in groups.items()}
    return Peers.of(made[key(dist.get_rank())])


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def slice_of(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole `value`, laid out like the parameter `like`: tensor ranks take theirs first, and slices
    are made of that, so mesh dimensions are gone through from the last."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for dim in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[dim]
        if not placement.is_replicate():
            value = _chunk(value, like.device_mesh.size(dim), coordinate[dim], placement.dim)  # type: ignore[attr-defined]
    return value


def _chunk(value: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    chunks: Sequence[torch.Tensor] = value.chunk(count, dim)
    return chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)
