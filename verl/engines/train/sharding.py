"""One model over many ranks with PyTorch's `fully_shard` (FSDP2): each rank keeps a slice of every parameter, gathers a
block's whole weights while the block runs, and adds up its gradients into the slices (Zhao et al. 2023; ZeRO stage 3).

Parameters are float32 slices, the optimizer's masters; blocks compute in the engine's dtype; gradients are summed in
float32. The mesh is (slices,) or (replicas, slices): parameters are sliced within groups and replicated between them (HSDP).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.engines.train.mesh import slice_of


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


def materialise(
    root: nn.Module, module: nn.Module, names: Mapping[str, Tensor], full: nn.Module | None, device: torch.device
) -> None:
    """Give the sliced `module` inside `root`, which is on the meta device, the weights and buffers of rank 0's `full`
    (None on others), one tensor at a time: no rank but the first ever holds the whole model.

    names: of all parameters and buffers of the whole model, with tensors of their shape and dtype; the module may lack some.
    """
    source = {} if full is None else dict(full.named_parameters()) | dict(full.named_buffers())
    own: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        own.setdefault(id(parameter), []).append(name)
    places = {aliases[0]: aliases for aliases in own.values()}
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    assigned: dict[str, nn.Parameter] = {}
    for name, tensor in names.items():
        value = _from_rank_zero(source.get(name), tensor.shape, tensor.dtype, device)
        if name in buffers:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = value
        elif name in parameters:
            parameter = parameters[name]
            slices = like(slice_of(value, parameter).clone(), parameter)  # type: ignore[arg-type]
            made = nn.Parameter(slices, requires_grad=parameter.requires_grad)
            assigned |= dict.fromkeys(places[name], made)
    module.load_state_dict(assigned, assign=True, strict=False)
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
