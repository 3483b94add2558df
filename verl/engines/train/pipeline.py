"""Layers spread over stages: which stage has what, and the order in which micro-batches go through them.

Training follows 1F1B (Narayanan et al. 2021, PipeDream-Flush): a stage starts with as many forward passes as there are
stages after it, then alternates, so it never keeps more micro-batches than that plus one. Stages send each other hidden
states [1, R, D] and their gradients, nothing else; every stage of a replica is given the same batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.engines.train.token_shares import Peers
from verl.errors import ConfigError


class Passing(nn.Module):
    """In the place of a layer of another stage: gives its input on, or `inlet` where the stage before left off."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inlet: Tensor | None = None
        # What bodies read from their layers.
        for name in ("attention_type", "layer_type"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states if self.inlet is None else self.inlet


@dataclass(frozen=True)
class StagePlan:
    """Which layers each stage has."""

    bounds: tuple[int, ...]
    """Stage s has the layers from bounds[s] up to bounds[s + 1]."""

    @staticmethod
    def even(layers: int, stages: int) -> StagePlan:
        """Layers spread evenly. Raises ConfigError when there are fewer than stages."""
        if layers < stages:
            raise ConfigError(f"parallel.pipeline_model_parallel_size={stages}: the model has only {layers} layers")
        return StagePlan(tuple(layers * s // stages for s in range(stages + 1)))

    def stages_of(self, name: str, *, is_tied: bool) -> list[int]:
        """Stages that hold the parameter `name`: one, or both ends for an embedding that is also the output projection."""
        last = len(self.bounds) - 2
        parts = name.split(".")
        if "layers" in parts:
            layer = int(parts[parts.index("layers") + 1])
            return [next(s for s in range(last + 1) if layer < self.bounds[s + 1])]
        if "embed_tokens" in parts:
            return [0, last] if is_tied else [0]
        return [last]


def cut(module: nn.Module, body: nn.Module, plan: StagePlan, stage: int, *, is_tied: bool) -> Passing | None:
    """Leave in `module`, in place, what stage `stage` computes. Returns where its input goes in; None on the first."""
    first, last = stage == 0, stage == len(plan.bounds) - 2
    start, end = plan.bounds[stage], plan.bounds[stage + 1]
    inlet = None
    for index, layer in enumerate(body.layers):
        if not start <= index < end:
            body.layers[index] = Passing(layer)
            if index == start - 1:
                inlet = body.layers[index]
    if not first and not (last and is_tied):
        body.embed_tokens = nn.Identity()
    if not last:
        body.norm = nn.Identity()
        for name in ("lm_head", "value_head"):
            if hasattr(module, name):
                setattr(module, name, nn.Identity())
    return inlet


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the hidden states between stages."""
        ...


class Pipeline:
    """Runs passes through the stages. With one stage: one pass after the other."""

    def __init__(self, stages: Peers, device: torch.device) -> None:
        self._stages = stages
        self.stages = stages.size
        self._device = device
        self._is_first = stages.rank == 0
        self._is_last = stages.rank == stages.size - 1

    def forward(self, count: int, row: Callable[[int], HasShape], run: Callable[[int, Tensor | None], Any]) -> Iterator[Any]:
        """`count` passes without gradient, in order. `run(i, received)` does pass i and returns what the next stage gets, of
        `row(i).shape`; the last stage may return anything. Yields what `run` returned."""
        for i in range(count):
            out = run(i, self._receive(-1, row(i).shape))
            if not self._is_last:
                self._send(1, out)
            yield out

    def train(
        self,
        count: int,
        row: Callable[[int], HasShape],
        run: Callable[[int, Tensor | None], Tensor],
        before_backward: Callable[[int], None],
    ) -> None:
        """Forward and backward of `count` passes. `run` as in `forward`; on the last stage it returns the scalar loss."""
        ahead = min(self._stages.size - self._stages.rank - 1, count)
        alive: deque[tuple[Tensor | None, Tensor]] = deque()
        done = 0  # backward passes

        def shape(i: int) -> tuple[int, int, int]:
            return row(i).shape

        def forward(i: int, inlet: Tensor | None) -> Tensor:
            out = run(i, inlet)
            alive.append((inlet, out))
            return out.detach()

        def backward(gradient: Tensor | None) -> Tensor | None:
            nonlocal done
            inlet, out = alive.popleft()
            before_backward(done)
            out.backward(gradient)
            done += 1
            return None if inlet is None else inlet.grad

        for i in range(ahead):
            self._send(1, forward(i, self._receive(-1, shape(i))))
        inlet = self._receive(-1, shape(ahead)) if ahead < count else None
        for i in range(ahead, count):
            out = forward(i, inlet)
            gradient = None if self._is_last else self._exchange(1, out, 1, shape(done))[0]
            gradient = backward(gradient)
            if i + 1 < count and not self._is_first:
                inlet = self._exchange(-1, gradient, -1, shape(i + 1))[0].requires_grad_()
            elif not self._is_first:
                self._send(-1, gradient)
        for _ in range(ahead):
            self._send(-1, backward(self._receive(1, shape(done))))

    def _receive(self, step: int, shape: tuple[int, int, int]) -> Tensor | None:
        """From the stage before (-1) or after (1); None from beyond the ends."""
        if not 0 <= self._stages.rank + step < self._stages.size:
            return None
        (tensor,) = self._exchange(receive_from=step, shape=shape)
        return tensor.requires_grad_() if step < 0 else tensor

    def _send(self, step: int, tensor: Tensor | None) -> None:
        if tensor is not None and 0 <= self._stages.rank + step < self._stages.size:
            self._exchange(send_to=step, tensor=tensor)

    def _exchange(
        self,
        send_to: int | None = None,
        tensor: Tensor | None = None,
        receive_from: int | None = None,
        shape: tuple[int, int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Send and receive at once: neighbours that both began with a send would wait for each other."""
        group, mine = self._stages.group, self._stages.rank
        operations, received = [], ()
        if send_to is not None:
            assert tensor is not None
            peer = self._stages.global_rank(mine + send_to)
            operations.append(dist.P2POp(dist.isend, tensor.contiguous(), peer, group=group))
        if receive_from is not None:
            assert shape is not None
            into = torch.empty(shape, dtype=torch.float32, device=self._device)
            received = (into,)
            peer = self._stages.global_rank(mine + receive_from)
            operations.append(dist.P2POp(dist.irecv, into, peer, group=group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received
