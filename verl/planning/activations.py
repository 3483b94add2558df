"""What a pass keeps on the device, found by running it without data.

The model's own Hugging Face layers run forward and backward on fake tensors, which have shapes and no memory, in the
engine's precision scheme; a dispatch mode counts the bytes of all storages alive. A body of two layers minus a body of
one gives what a layer adds, so nothing here knows how a layer is made.

Shapes: R tokens of a row, R / tensor of them on one tensor rank, D hidden.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from verl.engines.train import attention

_ATTENTION = "verl_planned"
_TOKENS = 16384
"""Tokens traced, about: enough that no part of a layer's weights hides what grows with them."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Bytes as a function of tokens."""

    fixed: float
    per_token: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    @staticmethod
    def through(tokens: tuple[int, int], sizes: tuple[float, float]) -> Linear:
        slope = (sizes[1] - sizes[0]) / (tokens[1] - tokens[0])
        return Linear(fixed=sizes[0] - slope * tokens[0], per_token=slope)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes on one rank as a function of a row's tokens R."""

    layer: Linear
    """What a layer keeps for its backward pass."""
    ends: Linear
    """What is kept before the first layer and after the last: embeddings, rotary tables, final norm and its result."""
    backward: Linear
    """What the backward pass of one layer needs besides what was kept, at its peak: gradients of activations, one weight's
    gradient, and with checkpointing the layer's activations made again."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What a pass depends on besides the model."""

    dtype: torch.dtype
    sequence_length: int
    """Tokens of each sequence of a row; matters where attention keeps its scores (float32, capped scores)."""
    tensor: int = 1
    """Tensor-parallel ranks."""
    checkpointing: bool = False
    groups_keys: bool = True
    """Whether the attention kernel takes fewer key-value heads than query heads (torch 2.12); before, they are repeated."""


def kernel_groups_keys() -> bool:
    """Whether this torch's packed attention kernel takes grouped keys and values."""
    try:
        return "enable_gqa" in attention._varlen_parameters()
    except ImportError:  # a build of torch without the kernel
        return True


def trace(config: Any, settings: TraceSettings) -> Activations:
    """Run bodies of one and of two layers of the Hugging Face `config` on rows of two sizes."""
    length = settings.sequence_length * settings.tensor
    small = max(1, _TOKENS // length) * length
    rows = (small, 2 * small)
    one, two = ([_run(config, settings, layers, r) for r in rows] for layers in (1, 2))
    layer = [b.kept - a.kept for a, b in zip(one, two, strict=True)]
    ends = [a.kept - x for a, x in zip(one, layer, strict=True)]
    extra = [a.peak - a.kept for a in one]
    return Activations(
        layer=Linear.through(rows, (layer[0], layer[1])),
        ends=Linear.through(rows, (ends[0], ends[1])),
        backward=Linear.through(rows, (extra[0], extra[1])),
    )


@dataclass(frozen=True)
class _Pass:
    kept: int
    """Bytes alive between forward and backward."""
    peak: int
    """Most bytes alive in the backward pass."""


def _run(config: Any, settings: TraceSettings, layers: int, rows: int) -> _Pass:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        body = _body(config, settings, layers)
        meter = _Meter(body)
        with meter:
            hidden = _hidden_states(body, rows, settings)
            kept = meter.live
            meter.peak = kept
            # Of the loss, the gradient alone is alive.
            hidden.backward(torch.empty_like(hidden))
    return _Pass(kept, meter.peak)


def _body(config: Any, settings: TraceSettings, layers: int) -> nn.Module:
    from transformers import AutoModel

    body = AutoModel.from_config(_cut(config, settings.tensor, layers), dtype=settings.dtype, attn_implementation=_register())
    for parameter in body.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    if settings.tensor > 1:
        for layer in body.layers:
            for half in (layer.self_attn, layer.mlp):
                _split_tokens(half, settings)
    if settings.checkpointing:
        # Renamed in transformers 5.24.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(body, name) for name in names if hasattr(body, name))
        enable({"use_reentrant": False, "preserve_rng_state": False})
    return body.train(settings.checkpointing)


def _cut(config: Any, tensor: int, layers: int) -> Any:
    """A copy of `config` with the layers, and with the part of heads and MLP that one tensor rank has."""
    config = copy.deepcopy(config)
    config.head_dim = head_dim(config)
    config.num_attention_heads //= tensor
    config.num_key_value_heads //= tensor
    config.intermediate_size //= tensor
    config.num_hidden_layers = layers
    # Embedding and head are counted elsewhere: gradients as large as theirs would hide a layer's.
    config.vocab_size, config.pad_token_id = 16, None
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, list(getattr(config, name)[:1]) * layers)
    return config


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _hidden_states(body: Any, rows: int, settings: TraceSettings) -> Tensor:
    """[R / tensor, D] as `Scorer` computes them."""
    inputs: dict[str, Any] = {
        "position_ids": torch.zeros(1, rows, dtype=torch.int64),
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "use_cache": False,
        "planned": settings,
    }
    input_ids = torch.zeros(1, rows // settings.tensor, dtype=torch.int64)
    if settings.dtype == torch.float32:
        return body(inputs_embeds=body.get_input_embeddings()(input_ids), **inputs).last_hidden_state[0]
    embeddings = body.get_input_embeddings()(input_ids).float()
    with torch.autocast("cpu", dtype=settings.dtype):
        hidden = body(inputs_embeds=embeddings, **inputs).last_hidden_state[0]
    return hidden.to(settings.dtype)


class _Meter(TorchDispatchMode):
    """Bytes of all storages that operations made and that are alive, parameters left out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, Any] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage  # kept, so that the number stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._watch, out)
        return out

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, functools.partial(self._gone, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._known[key]
        self.live -= size


def _apply(function: Any, *args: Any) -> Tensor:
    return function.apply(*args)


class _Kernel(torch.autograd.Function):
    """In the place of the packed attention kernel: keeps what FlashAttention keeps (Dao 2023). q [R, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        sums = q.new_empty(q.shape, dtype=torch.float32)  # the kernel adds up the gradient of queries in float32
        results = tuple(torch.empty_like(x) for x in (q, k, v))
        del sums
        return results


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What `verl.engines.train.attention` does on a GPU for a row of sequences of one length."""
    settings: TraceSettings = kwargs["planned"]
    softcap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if v.dtype != torch.float32 and softcap is None:
        if not settings.groups_keys and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return _apply(_Kernel, q, k, v)[None], None
    length, grouped = settings.sequence_length, q.shape[1] != k.shape[1]
    shape = q.shape
    q, k, v = (x.reshape(-1, length, *x.shape[1:]) for x in (q, k, v))
    window = None if window is None or window >= length else window
    with _sdpa(grouped=grouped):
        out = attention._padded_attention(q, k, v, kwargs["scaling"], window, softcap)
    return out.reshape(shape)[None], None


def _sdpa(*, grouped: bool) -> contextlib.AbstractContextManager[Any]:
    """The kernel that a GPU takes for float32: one that keeps no scores, which has no grouped keys, else the plain one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH) if grouped else contextlib.nullcontext()


@functools.cache
def _register() -> str:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_ATTENTION, _attention_forward)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    return _ATTENTION


class _Exchange(torch.autograd.Function):
    """[n, D] -> [n * ratio, D] in `forward_dtype`; the gradient has the shape it came in with, in `backward_dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: float, forward_dtype: torch.dtype, backward_dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, backward_dtype
        return x.new_empty(1, round(x.shape[1] * ratio), x.shape[2], dtype=forward_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].new_empty(ctx.shape, dtype=ctx.dtype), None, None, None


def _split_tokens(half: nn.Module, settings: TraceSettings) -> None:
    """Let attention or MLP gather the tokens of all tensor ranks and hand back its rank's own (float32 sums)."""
    size, dtype = settings.tensor, settings.dtype

    def gather(x: Tensor) -> Tensor:
        return _apply(_Exchange, x.to(dtype), size, dtype, dtype)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (gather(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": gather(kwargs["hidden_states"])}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        def hand_back(x: Tensor) -> Tensor:
            return _apply(_Exchange, x, 1 / size, torch.float32, x.dtype)

        return (hand_back(output[0]), *output[1:]) if isinstance(output, tuple) else hand_back(output)

    half.register_forward_pre_hook(before, with_kwargs=True)
    half.register_forward_hook(after)


def tracer(config: Any) -> Callable[[TraceSettings], Activations]:
    """`trace` of `config`, each setting once: a search asks for the same ones many times."""
    return functools.cache(functools.partial(trace, config))
