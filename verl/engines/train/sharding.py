"""One model over many ranks with PyTorch's `fully_shard` (FSDP2): each rank keeps a slice of every parameter, gathers a
block's whole weights while the block runs, and adds up its gradients into the slices (Zhao et al. 2023; ZeRO stage 3).

Parameters are float32 slices, the optimizer's masters; blocks compute in the engine's dtype; gradients are summed in
float32. Ranks form a mesh (replicas, slices): with `fsdp_size` below the number of ranks, parameters are sliced within
groups of that many and replicated between them (HSDP).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.errors import ConfigError


@functools.cache
def data_mesh(device_type: str, fsdp_size: int | None) -> DeviceMesh:
    """The mesh of all ranks: (slices,), or (replicas, slices). One mesh serves every engine of the process, since each
    mesh makes process groups of its own."""
    world = dist.get_world_size()
    size = world if fsdp_size is None else min(fsdp_size, world)
    if world % size:
        raise ConfigError(f"parallel.fsdp_size={size} does not divide the {world} ranks; use one of {_divisors(world)}")
    if size == world:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("replicate", "shard"))


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def shard(root: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Slice `blocks` one by one and what is left of `root` as one more unit, in place. Gradients are summed, not averaged:
    a loss is divided by its global count."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Where a rank's slice is the whole, freeing gathered weights between the passes would save little and cost a gather.
    reshard = mesh.size(mesh.ndim - 1) > 1
    for block in [*blocks, root]:
        unit: Any = fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard if block is not root else None)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def materialise(root: nn.Module, module: nn.Module, full: nn.Module | None, device: torch.device) -> None:
    """Give the sliced `module` inside `root`, which is on the meta device, the weights and buffers of rank 0's `full`
    (None on others), one tensor at a time: no rank but the first ever holds the whole model."""
    parameters = {} if full is None else dict(full.named_parameters())
    made: dict[int, nn.Parameter] = {}
    assigned: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            value = _from_rank_zero(parameters.get(name), parameter.shape, parameter.dtype, device)
            slices = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]
            made[id(parameter)] = nn.Parameter(slices, requires_grad=parameter.requires_grad)
        assigned[name] = made[id(parameter)]
    module.load_state_dict(assigned, assign=True, strict=False)
    buffers = {} if full is None else dict(full.named_buffers())
    for name, buffer in list(module.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._buffers[attribute] = _from_rank_zero(buffers.get(name), buffer.shape, buffer.dtype, device)
    # Slices that are padded are laid anew on the first move (or pass) after loading: now, before anyone keeps views of them.
    root.to(device)


def _from_rank_zero(value: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=device) if value is None else value.detach().to(device, dtype).contiguous()
    dist.broadcast(tensor, 0)
    return tensor


def most_of(count: int, device: torch.device) -> int:
    """The largest `count` of all ranks."""
    tensor = torch.tensor([count], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def local(tensor: Tensor) -> Tensor:
    """A rank's own part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """This rank's `part` as a slice of a tensor laid out like `whole`; as it is where `whole` is no sliced tensor or
    `part` (a step count, say) no slice."""
    if not isinstance(whole, DTensor) or part.shape != whole.to_local().shape:
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def copies(tensor: Tensor) -> int:
    """On how many ranks each element of a sliced tensor is; 1 for a tensor of a process that works alone."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    mesh = tensor.device_mesh
    slices = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    return dist.get_world_size() // functools.reduce(lambda a, b: a * b, slices, 1)


def whole(tensor: Tensor) -> Tensor:
    """The tensor without slices, on every rank; a collective operation where it is sliced."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def full_state(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole parameters on rank 0's CPU, in `dtype`; empty on other ranks. Gathers one tensor at a time."""
    state = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = whole(parameter.detach().to(dtype))
        if dist.get_rank() == 0:
            state[name] = value.cpu()
    return state
