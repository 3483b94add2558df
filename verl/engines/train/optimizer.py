"""AdamW on float32 master weights, the learning-rate schedule, clipping, and the guard against non-finite gradients.

A float32 parameter is its own master. A half-precision one gets a float32 master that holds what rounding would
lose (an update of 1e-6 on a weight of 1 vanishes in bfloat16, whose spacing there is 0.008), and its gradients
of all micro-batches are added up in float32 as each backward pass produces them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.config.schema import OptimizerConfig
from verl.engines.train.sharding import like, local
from verl.errors import ConfigError
from verl.observe.metrics import Last, Metrics, Sum

_SCHEDULES = ("constant", "linear", "cosine")


def lr_at(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (from 0).

    Warm-up is linear and ends at step `lr_warmup_steps - 1` with the full rate, so that the first step already
    learns. After it: constant, or from lr down to min_lr_ratio * lr at step `total_steps`, in a straight line
    or along half a cosine (Loshchilov & Hutter 2017, eq. 5, without restarts); from there on the minimum.
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_schedule == "constant" or total_steps is None:
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


class GradientSums(Protocol):
    """What ranks that hold parts of one model have to tell each other about its gradients."""

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up, in place, what other ranks have of the gradients of this rank's slices."""
        ...

    def copies(self, name: str) -> int:
        """On how many ranks each element of a parameter is."""
        ...


class MasterAdamW:
    """Decoupled weight decay Adam (Loshchilov & Hutter 2019) on the parameters of one module.

    Weight decay acts on matrices alone (embeddings included): norms and biases, which are vectors, have none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        total_steps: int | None,
        compute_dtype: torch.dtype,
        sums: GradientSums | None = None,
    ) -> None:
        """`parameters`: float32, by name; each is put in `compute_dtype` in place, its float32 storage becoming the master.
        The master of a sliced parameter is this rank's slice: gathered weights take their dtype when they are gathered."""
        if config.lr_schedule not in _SCHEDULES:
            raise ConfigError(f"lr_schedule={config.lr_schedule!r}: use one of {', '.join(_SCHEDULES)}")
        if config.lr_schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"lr_schedule={config.lr_schedule!r} needs the number of steps: set training.total_steps or use constant"
            )
        self.config = config
        self.total_steps = total_steps
        self.num_steps = 0
        """Optimizer steps so far, skipped ones included: the position in the schedule."""
        self._parameters = dict(parameters)
        self._sums = sums
        self._gradients: dict[str, Tensor] = {}
        """Float32 sums for masters of half-precision parameters, which may be off the device until the update."""
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                self.masters[name] = nn.Parameter(local(parameter.detach()))  # as `take_slices` does again
                continue
            if compute_dtype == torch.float32:
                self.masters[name] = parameter
                continue
            master = nn.Parameter(parameter.data)
            parameter.data = parameter.data.to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._add_gradient(name, p))
            self.masters[name] = master
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        others = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self) -> Metrics:
        """Clip to the global norm, update, publish the masters to the module, drop the gradients.

        With a non-finite gradient nothing is updated; the step is counted in `skipped_steps` and the schedule
        moves on, as the training step has passed. `grad_norm` is the norm before clipping.
        """
        lr = lr_at(self.num_steps, self.config, self.total_steps)
        self.num_steps += 1
        self._take_gradients()
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = self._norm(self._sums) if self._sums is not None else float(torch.nn.utils.get_total_norm(gradients))
        finite = math.isfinite(norm)
        if finite:
            if 0 < self.config.gradient_clip < norm:
                torch._foreach_mul_(gradients, self.config.gradient_clip / norm)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.publish()
        self._adam.zero_grad(set_to_none=True)
        metrics: Metrics = {"lr": Last(lr), "skipped_steps": Sum(0.0 if finite else 1.0)}
        if finite:
            metrics["grad_norm"] = Last(norm)
        return metrics

    def _add_gradient(self, name: str, parameter: Tensor) -> None:
        # Runs as soon as the parameter's gradient is complete, so at most one half-precision gradient is alive.
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if name in self._gradients:
            self._gradients[name].add_(gradient)
        else:
            self._gradients[name] = gradient.float()

    def take_slices(self) -> None:
        """Let the masters of sliced parameters be their present memory, after that has moved."""
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                self.masters[name].data = local(parameter.detach())

    def tensors(self) -> Iterator[Tensor]:
        """What only the update needs: moments, and masters that are no parameters of the module."""
        for name, master in self.masters.items():
            if master is not self._parameters[name] and not isinstance(self._parameters[name], DTensor):
                yield master
            yield from (t for kind, t in self._adam.state[master].items() if kind != "step")

    def _take_gradients(self) -> None:
        """Hand all gradients to the masters."""
        while self._gradients:
            name, gradient = self._gradients.popitem()
            self.masters[name].grad = gradient
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                self.masters[name].grad = local(parameter.grad)
                parameter.grad = None
        if self._sums is not None:
            self._sums.complete({name: m.grad for name, m in self.masters.items() if m.grad is not None})

    def _norm(self, sums: GradientSums) -> float:
        """Global gradient norm over all ranks: an element that several ranks hold counts once."""
        held = [(m.grad, sums.copies(name)) for name, m in self.masters.items() if m.grad is not None]
        device = next(iter(self.masters.values())).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if held:
            norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in held])).double()
            shares = torch.tensor([1 / count for _, count in held], dtype=torch.float64).to(device, non_blocking=True)
            square = (norms.square() * shares).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module's parameters, in place: whoever shares them sees the new weights."""
        own = [(p, self.masters[n]) for n, p in self._parameters.items() if not isinstance(p, DTensor)]
        pairs = [(p, m) for p, m in own if p is not m]
        if pairs:
            torch._foreach_copy_([p.data for p, _ in pairs], [m.data for _, m in pairs])

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step counts: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`; sliced like the parameters."""
        return {
            f"{kind}.{name}": like(tensor, self._parameters[name])
            for name, master in self.masters.items()
            for kind, tensor in self._adam.state[master].items()
        }

    def empty_state(self) -> dict[str, Tensor]:
        """Tensors of the shapes that `state` has after a step, to be filled from a checkpoint."""
        made = {}
        for name, master in self.masters.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                made[f"{kind}.{name}"] = like(torch.zeros_like(master.data), self._parameters[name])
            made[f"step.{name}"] = torch.zeros((), dtype=torch.float32, device=master.device)
        return made

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; parameters that were never stepped have no entries."""
        self._adam.state.clear()
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            master = self.masters[name]
            self._adam.state[master][kind] = local(tensor).to(master.device)
