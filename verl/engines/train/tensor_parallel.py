"""Each block's matrices split over tensor ranks (Shoeybi et al. 2019): projections into heads and into the MLP by their
output, the projections back by their input, so that a block needs one exchange before and one after each half.

Embedding, head and norms are not split: each rank uses them for its own tokens, and `fully_shard` slices them.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from verl.engines.train.token_shares import Peers, add_up_tokens, gather_tokens
from verl.errors import ConfigError

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def check_divisible(config: Any, *, tensor: int, sequence: int) -> None:
    """Raise ConfigError when a model with the Hugging Face `config` cannot be split over so many ranks."""
    sizes = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    for name, size in (sizes | {"intermediate_size": config.intermediate_size}).items():
        if size % tensor:
            raise ConfigError(f"parallel.tensor_model_parallel_size={tensor} does not divide the model's {name}={size}")
    heads, kv_heads = (size // tensor for size in sizes.values())
    # Key-value heads that are too few are repeated, so the queries must divide by the repeated number.
    if heads % sequence or (kv_heads % sequence and sequence % kv_heads):
        raise ConfigError(
            f"parallel.sequence_parallel_size={sequence} does not fit {heads} query and {kv_heads} key-value heads a rank; "
            "it must divide the query heads, and divide or be a multiple of the key-value heads"
        )


def split_blocks(blocks: Sequence[nn.Module], mesh: DeviceMesh, peers: Peers, dtype: torch.dtype) -> None:
    """Leave each rank its part of every matrix of the `blocks`, which are on the meta device, as DTensors on `mesh`, and let
    attention and MLP gather their tokens in `dtype` and hand them back. Mends the modules in place."""
    for block in blocks:
        for half in (block.self_attn, block.mlp):
            for name, linear in half.named_children():
                if name in _BY_OUTPUT:
                    _split(linear, mesh, 0)
                elif name in _BY_INPUT:
                    _split(linear, mesh, 1)
                    linear.is_bias_mine = peers.rank == 0
            half.register_forward_pre_hook(_gathering(peers, dtype), with_kwargs=True)
            half.register_forward_hook(_handing_back(peers))


def _split(linear: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if parameter.ndim <= dim:
            continue  # a bias that is added to the sum
        shape = list(parameter.shape)
        shape[dim] //= mesh.size()
        part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        split = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
        setattr(linear, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    linear.forward = types.MethodType(_forward if dim == 0 else _partial_forward, linear)  # type: ignore[method-assign]


def _own(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _forward(linear: Any, x: Tensor) -> Tensor:
    return F.linear(x, _own(linear.weight), None if linear.bias is None else _own(linear.bias))


def _partial_forward(linear: Any, x: Tensor) -> Tensor:
    bias = linear.bias
    # The sum over ranks must hold the bias once; times 0, so that every rank has a gradient for it.
    return F.linear(x, _own(linear.weight), None if bias is None else bias * float(linear.is_bias_mine))


def _gathering(peers: Peers, dtype: torch.dtype) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_gathered(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _gathered(kwargs["hidden_states"])}

    def _gathered(hidden: Tensor) -> Tensor:
        return gather_tokens(hidden[0].to(dtype), peers)[None]

    return hook


def _handing_back(peers: Peers) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (add_up_tokens(output[0][0], peers)[None], *output[1:])
        return add_up_tokens(output[0], peers)[None]

    return hook
