"""GPU memory of one training step by part, from sizes alone. All sizes are bytes on the fullest GPU unless said otherwise.

What is where follows `verl.engines.train`: unsliced engines keep parameters in the compute dtype with float32 masters;
sliced ones (FSDP2, several GPUs) keep float32 slices and gather a layer while it runs. The embedding and the head are
one more unit, gathered from the beginning of a pass to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.engines.train.logprobs import _CHUNK_ELEMENTS, _KEPT_ELEMENTS, _MIN_CHUNK_ROWS
from verl.planning.activations import Activations, TraceSettings, head_dim

GIB = 2**30
LIBRARY_BYTES = 64 * 2**20
"""Workspaces of matrix libraries, allocated for good (measured: 0.06 GiB)."""
_FLOAT32 = 4
_MOMENTS = 8
"""Bytes a parameter of Adam's two moments."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Numbers of parameters, exact, and what the layout has to divide."""

    layers: int
    matrices: int
    """Parameters of one layer that tensor ranks split."""
    norms: int
    """Parameters of one layer that they do not: norms, and biases of the projections back."""
    embedding: int
    head: int
    """Of the output projection; 0 where it is the embedding."""
    final: int
    """Of all else: the final norm."""
    hidden: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    softcap: bool
    """Whether the logits are capped (Gemma 2)."""

    @property
    def is_tied(self) -> bool:
        return self.head == 0

    @property
    def parameters(self) -> int:
        return self.layers * (self.matrices + self.norms) + self.embedding + self.head + self.final

    def key_value_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the key-value cache a token."""
        return 2 * self.layers * self.key_value_heads * self.head_dim * dtype.itemsize


def model_shape(config: Any) -> ModelShape:
    """Count the parameters of the Hugging Face `config`'s model, made without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config)
    body = module.base_model
    by_output = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")
    names = [(name, p.numel(), p.ndim) for name, p in body.layers[0].named_parameters()]
    matrices = sum(
        n for name, n, ndim in names if any(x in name for x in by_output) or (ndim == 2 and ("o_proj." in name or "down" in name))
    )
    layer = sum(n for _, n, _ in names)
    layers = len(body.layers)
    total = sum(p.numel() for p in module.parameters())
    embedding = module.get_input_embeddings().weight
    output = module.get_output_embeddings().weight
    head = 0 if output is embedding else output.numel()
    return ModelShape(
        layers=layers,
        matrices=matrices,
        norms=layer - matrices,
        embedding=embedding.numel(),
        head=head,
        final=total - layers * layer - embedding.numel() - head,
        hidden=config.hidden_size,
        vocabulary=output.shape[0],
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        intermediate=config.intermediate_size,
        softcap=getattr(config, "final_logit_softcapping", None) is not None,
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How GPUs share the work."""

    data: int = 1
    """Replicas, which share a batch; with several GPUs each keeps a slice of the parameters (FSDP)."""
    tensor: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def is_sliced(self) -> bool:
        return self.gpus > 1


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Keys of `memory_optimization`."""

    optimizer_offload: bool = False
    gradient_checkpointing: bool = False
    param_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be trained, besides the model."""

    prompt: int
    """Tokens of the longest prompt."""
    response: int
    """Tokens of the longest response."""
    dtype: torch.dtype = torch.bfloat16
    critic: bool = False
    """Whether a critic of the same size is trained on the same GPUs."""
    reference: bool = False
    """Whether a frozen copy of the model is scored on the same GPUs."""
    generates: bool = True
    """False for supervised fine-tuning."""
    max_sequences: int = 256
    """Sequences decoded at once."""
    cache_share: float = 0.5
    """Of the memory that is free when generation starts, for the key-value cache."""
    groups_keys: bool = True
    """Whether the attention kernel takes fewer key-value heads than query heads (torch 2.12)."""

    @property
    def sequence(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice to estimate."""

    layout: Layout
    switches: Switches
    micro_batch: int
    """Tokens of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One GPU's memory at one moment."""

    moment: str
    weights: float = 0.0
    """Parameters of the model at work, in the dtype they are kept in."""
    optimizer: float = 0.0
    """Adam's moments, and masters that are not the parameters."""
    gradients: float = 0.0
    """Float32 sums, and what is on its way into them."""
    activations: float = 0.0
    logits: float = 0.0
    """Workspace of log-probabilities: a chunk of logits and probabilities, the head's gradient."""
    gathered: float = 0.0
    """Whole layers, embedding and head, made from slices while they are used."""
    others: float = 0.0
    """Models not at work, the generator's copy of the weights, and libraries."""

    @property
    def total(self) -> float:
        model = self.weights + self.optimizer + self.gradients
        return model + self.activations + self.logits + self.gathered + self.others


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one GPU holds, and when."""

    plan: Plan
    peak: Parts
    """The fullest moment of training."""
    rest: float
    """Between updates, when something else uses the GPU."""
    generation: float
    """While generating, without the key-value cache."""
    key_value_token: float
    """Bytes of the key-value cache a token."""

    def cache_bytes(self, memory: float, workload: Workload) -> float:
        """The key-value cache that generation takes on a GPU with so much usable memory."""
        most = workload.max_sequences * workload.sequence * self.key_value_token
        return max(0.0, min(most, (memory - self.generation) * workload.cache_share))

    def shortage(self, memory: float, workload: Workload) -> float:
        """Bytes missing on a GPU with so much usable memory; 0 where training fits, and the cache of one sequence."""
        missing = self.peak.total - memory
        if workload.generates:
            sequence = workload.sequence * self.key_value_token
            missing = max(missing, self.generation + sequence / workload.cache_share - memory)
        return max(0.0, missing)


Tracer = Callable[[TraceSettings], Activations]


def estimate(shape: ModelShape, trace: Tracer, workload: Workload, plan: Plan) -> Estimate:
    """Memory of `plan` on the fullest GPU of each moment, whichever stage that is."""
    ends = sorted({0, plan.layout.pipeline - 1})
    stages = [_Stage(shape, trace, workload, plan, s).estimate() for s in ends]
    return replace(
        max(stages, key=lambda e: e.peak.total),
        rest=max(e.rest for e in stages),
        generation=max(e.generation for e in stages),
    )


def state_bytes(shape: ModelShape, workload: Workload, plan: Plan) -> float:
    """What training takes before any activation: quick to tell, and no more than `estimate` says."""
    stages = {0, plan.layout.pipeline - 1}

    def no_trace(_: TraceSettings) -> Activations:
        raise AssertionError("the state of the optimizer depends on no pass")

    return max(_Stage(shape, no_trace, workload, plan, s).step().total for s in stages)


@dataclass(frozen=True)
class _Stage:
    """One GPU of one pipeline stage."""

    shape: ModelShape
    trace: Tracer
    workload: Workload
    plan: Plan
    stage: int

    def estimate(self) -> Estimate:
        peaks = self._moments(self._others(critic=self.workload.critic), is_critic=False)
        if self.workload.critic:
            peaks += self._moments(self._others(actor=True), is_critic=True)
        rest = self._others(actor=True, critic=self.workload.critic)
        # The generator reads the actor's own parameters where they are whole; they return for it.
        returned = self._weights() if self._switches.param_offload and not self._is_sliced and self.workload.generates else 0.0
        return Estimate(
            plan=self.plan,
            peak=max(peaks, key=lambda parts: parts.total),
            rest=rest,
            generation=rest + returned,
            key_value_token=self.shape.key_value_bytes(self.workload.dtype),
        )

    def step(self) -> Parts:
        """The actor's optimizer step."""
        return self._step(self._others(critic=self.workload.critic))

    # What the GPU holds of a model

    @property
    def _switches(self) -> Switches:
        return self.plan.switches

    @property
    def _is_sliced(self) -> bool:
        return self.plan.layout.is_sliced

    @property
    def _is_last(self) -> bool:
        return self.stage == self.plan.layout.pipeline - 1

    @property
    def _num_layers(self) -> int:
        return -(-self.shape.layers // self.plan.layout.pipeline)

    @property
    def _layer(self) -> float:
        """Parameters of a layer on a tensor rank."""
        return self.shape.matrices / self.plan.layout.tensor + self.shape.norms

    @property
    def _ends(self) -> float:
        """Parameters of embedding, head and final norm on this stage, whole."""
        shape = self.shape
        has_embedding = self.stage == 0 or (self._is_last and shape.is_tied)
        return shape.embedding * has_embedding + (shape.head + shape.final) * self._is_last

    @property
    def _own(self) -> float:
        """Parameters of this GPU."""
        return (self._num_layers * self._layer + self._ends) / self.plan.layout.data

    @property
    def _size(self) -> int:
        return self.workload.dtype.itemsize

    def _weights(self) -> float:
        return self._own * (_FLOAT32 if self._is_sliced else self._size)

    def _optimizer(self) -> float:
        has_masters = not self._is_sliced and self._size < _FLOAT32
        return self._own * (_MOMENTS + _FLOAT32 * has_masters)

    def _kept_weights(self) -> float:
        return 0.0 if self._switches.param_offload else self._weights()

    def _kept_optimizer(self) -> float:
        return 0.0 if self._switches.optimizer_offload else self._optimizer()

    def _others(self, *, actor: bool = False, critic: bool = False) -> float:
        """Models not at work, the generator's copy, libraries."""
        trained = (actor + critic) * (self._kept_weights() + self._kept_optimizer())
        reference = self.workload.reference * self._kept_weights()
        # Sliced parameters are no use to the generator: it keeps a model of its own, whole on every GPU.
        copy = self.shape.parameters * self._size if self._is_sliced and self.workload.generates else 0
        return LIBRARY_BYTES + trained + reference + copy

    # Moments of an update

    def _moments(self, others: float, *, is_critic: bool) -> list[Parts]:
        moments = [self._layer_backward(others, is_critic), self._step(others)]
        if self._is_last and not is_critic:
            moments.append(self._head_backward(others))
        if self._is_sliced:
            moments.append(self._ends_reduced(others))
        return moments

    def _activations(self) -> Activations:
        settings = TraceSettings(
            dtype=self.workload.dtype,
            sequence_length=self.workload.sequence,
            tensor=self.plan.layout.tensor,
            checkpointing=self._switches.gradient_checkpointing,
            groups_keys=self.workload.groups_keys,
        )
        return self.trace(settings)

    def _kept_activations(self, found: Activations) -> float:
        """Of all micro-batches alive: 1F1B keeps one for each stage from here to the last."""
        alive = self.plan.layout.pipeline - self.stage
        tokens = self.plan.micro_batch
        return alive * (self._num_layers * found.layer.at(tokens) + found.ends.at(tokens))

    def _gathered(self) -> float:
        """In a layer's pass: this layer and the next, and the ends; all layers where a slice is the whole."""
        if not self._is_sliced:
            return 0.0
        layers = self._num_layers if self.plan.layout.data == 1 else min(2, self._num_layers)
        return (layers * self._layer + self._ends) * self._size

    def _sums(self) -> float:
        return self._own * _FLOAT32

    def _head_gradient(self) -> float:
        """Waits, in the compute dtype, for the embedding's (tied) or for the end of the pass (sliced)."""
        if not self._is_last or not (self.shape.is_tied or self._is_sliced):
            return 0.0
        return self.shape.vocabulary * self.shape.hidden * self._size

    def _layer_backward(self, others: float, is_critic: bool) -> Parts:
        found = self._activations()
        # Gradients of a sliced layer wait for its end, are widened, and handed out.
        widened = self._layer * (self._size + _FLOAT32) if self._is_sliced else 0.0
        return Parts(
            moment="backward pass of a layer",
            weights=self._weights(),
            optimizer=self._kept_optimizer(),
            gradients=self._sums() + widened + (0.0 if is_critic else self._head_gradient()),
            activations=self._kept_activations(found) + found.backward.at(self.plan.micro_batch),
            gathered=self._gathered(),
            others=others,
        )

    def _head_backward(self, others: float) -> Parts:
        found = self._activations()
        return Parts(
            moment="log-probabilities, backward",
            weights=self._weights(),
            optimizer=self._kept_optimizer(),
            gradients=self._sums(),
            activations=self._kept_activations(found),
            logits=logits_workspace(self.shape, self.plan.micro_batch / self.plan.layout.tensor, self.workload.dtype),
            gathered=self._gathered(),
            others=others,
        )

    def _ends_reduced(self, others: float) -> Parts:
        """Gradients of embedding and head, whole, on their way to the slices."""
        return Parts(
            moment="end of the backward pass",
            weights=self._weights(),
            optimizer=self._kept_optimizer(),
            gradients=self._sums() + self._ends * (self._size + _FLOAT32),
            gathered=self._ends * self._size,
            others=others,
        )

    def _step(self, others: float) -> Parts:
        return Parts(
            moment="optimizer step",
            weights=self._weights(),
            optimizer=self._optimizer(),
            gradients=self._sums(),
            others=others,
        )


def logits_workspace(shape: ModelShape, rows: float, dtype: torch.dtype) -> float:
    """Bytes of `verl.engines.train.logprobs`'s backward pass at its peak, if every one of `rows` tokens is scored.

    When a chunk's probabilities are made, its logits and the last chunk's probabilities and gradient are alive; when its
    product is added to the head's gradient, that gradient, the product, its probabilities and gradient are.
    """
    vocabulary = shape.vocabulary
    chunk_rows = min(rows, max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS["cuda"] // vocabulary))
    chunk = chunk_rows * vocabulary
    is_kept = rows <= _KEPT_ELEMENTS["cuda"] // vocabulary and not shape.softcap
    last = 0 if rows <= chunk_rows else _FLOAT32 + dtype.itemsize
    is_half = dtype.itemsize < _FLOAT32
    total = vocabulary * shape.hidden * _FLOAT32
    slope = _FLOAT32 * shape.softcap
    making = chunk * ((2 if is_kept else 2 * _FLOAT32) + _FLOAT32 * is_kept + last + slope) + total
    adding = chunk * (_FLOAT32 + dtype.itemsize) + (2 if is_half else 1) * total
    finishing = adding - total * is_half + vocabulary * shape.hidden * dtype.itemsize
    hidden = rows * shape.hidden * dtype.itemsize
    return max(making, adding, finishing) + hidden
