"""Workers that hold a model and a training engine: actor, critic, reference. Thin: registered methods only."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from verl.checkpoint.background import BackgroundWriter
from verl.checkpoint.manager import noticing_full_disk
from verl.config.schema import Config, ModelConfig, OptimizerConfig
from verl.controller import Worker, WorkerContext, WorkerLayout, all_ranks, data_parallel, one_to_all, rank_zero, register
from verl.data.batch import TokenBatch
from verl.engines.train.base import Loss
from verl.engines.train.fsdp import FSDPEngine
from verl.engines.train.mesh import Parallelism
from verl.engines.weight_link import LinkAddress, WeightSender
from verl.observe.metrics import Metrics


class ModelWorker(Worker):
    """A worker with a training engine, over ranks as the section `parallel` says."""

    engine: FSDPEngine

    @classmethod
    def layout(cls, world_size: int, *, config: Config, **kwargs: Any) -> WorkerLayout:
        return parallelism(config).layout(world_size)


class TrainableWorker(ModelWorker):
    """What actor and critic share: update, save, load, export."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._writer = BackgroundWriter()

    @register(dispatch=data_parallel)
    def update(self, batch: TokenBatch, loss: Loss, count: float) -> Metrics:
        """One optimizer step on `batch`; `count` is the loss's count over the batch of all ranks."""
        with self.engine.resident():
            metrics = self.engine.forward_backward(batch, loss, count=count)
            with self.engine.resident(optimizer=True):
                step = self.engine.optimizer_step()
        return metrics | {f"{loss.prefix}/{name}": metric for name, metric in step.items()}

    @register(dispatch=all_ranks)
    def save(self, folder: Path, background: bool = False) -> None:
        """Write what exact resume needs; `background`: a copy of it, from now on (see `written`)."""
        with self.engine.resident(optimizer=True):
            self._write(folder, self.engine.saving(folder, background=background), background)

    @register(dispatch=all_ranks)
    def load(self, folder: Path) -> None:
        with self.engine.resident(optimizer=True):
            self.engine.load(folder)

    @register(dispatch=all_ranks)
    def export(self, folder: Path, background: bool = False) -> None:
        """Write a Hugging Face model folder, tokenizer included; `background` as in `save`."""
        with self.engine.resident():
            self._write(folder, self.engine.exporting(folder, background=background), background)

    def _write(self, folder: Path, write: Callable[[], None], background: bool) -> None:
        def noticing() -> None:
            with noticing_full_disk(folder):
                write()

        self._writer.submit(noticing) if background else noticing()

    @register(dispatch=one_to_all)
    def written(self, wait: bool) -> bool:
        """Whether this rank has written all that it began in the background; `wait`: until it has. Raises what failed."""
        return self._writer.written(wait_for_it=wait)


class ActorWorker(TrainableWorker):
    """The policy being trained."""

    def __init__(self, context: WorkerContext, *, config: Config, total_updates: int) -> None:
        super().__init__(context)
        self.engine = _engine(context, config, config.model, optimizer=config.actor, total_steps=total_updates)
        self._link: WeightSender | None = None

    @register(dispatch=rank_zero)
    def open_link(self, receivers: int, timeout_s: float) -> LinkAddress:
        """Where that many generators of another pool can take the weights from."""
        self._link = WeightSender(self.context.address, receivers, timeout_s)
        return self._link.address

    @register(dispatch=all_ranks, blocking=False)
    def send_weights(self, version: int) -> None:
        """Send the weights as policy `version` to the generators of another pool, which must be waiting for them."""
        with self.engine.resident():
            weights = self.engine.whole_weights(self.engine.compute_dtype)
            if self._link is not None:
                self._link.send(weights, self.engine.device, version)
            else:  # rank 0 sends, and puts them together with the help of all
                collections.deque(weights, maxlen=0)

    @register(dispatch=data_parallel)
    def compute_log_probs(self, batch: TokenBatch) -> Tensor:
        """[T] log-probs of the trained tokens under the present weights."""
        return _logprobs(self.engine, batch)


class ReferenceWorker(ModelWorker):
    """The policy as it was before training, frozen: what the KL terms compare with."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.engine = _engine(context, config, config.model)

    @register(dispatch=data_parallel)
    def compute_log_probs(self, batch: TokenBatch) -> Tensor:
        """[T] log-probs of the trained tokens."""
        return _logprobs(self.engine, batch)


class CriticWorker(TrainableWorker):
    """The value function of PPO: a language model's body with one output."""

    def __init__(self, context: WorkerContext, *, config: Config, total_updates: int) -> None:
        super().__init__(context)
        model = replace(config.model, path=config.critic.path or config.model.path)
        self.engine = _engine(context, config, model, head="value", optimizer=config.critic, total_steps=total_updates)

    @register(dispatch=data_parallel)
    def compute_values(self, batch: TokenBatch) -> Tensor:
        """[T] value of the state in which each trained token was chosen."""
        with self.engine.resident():
            values = self.engine.compute(batch).values
        assert values is not None  # a value head always gives them
        return values


def _engine(
    context: WorkerContext,
    config: Config,
    model: ModelConfig,
    *,
    head: Literal["lm", "value"] = "lm",
    optimizer: OptimizerConfig | None = None,
    total_steps: int | None = None,
) -> FSDPEngine:
    return FSDPEngine(
        model,
        head=head,
        optimizer=optimizer,
        total_steps=total_steps,
        temperature=config.rollout.temperature,
        max_tokens_per_micro_batch=(optimizer or config.actor).max_tokens_per_micro_batch,
        gradient_checkpointing=config.memory_optimization.gradient_checkpointing
        or config.memory_optimization.activation_checkpointing,
        device=context.device,
        parallelism=parallelism(config),
        param_offload=config.memory_optimization.param_offload,
        optimizer_offload=config.memory_optimization.optimizer_offload,
    )


def parallelism(config: Config) -> Parallelism:
    """How the ranks of a run share each of its models."""
    parallel = config.parallel
    return Parallelism(
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        sequence=parallel.sequence_parallel_size,
        fsdp_size=parallel.fsdp_size,
    )


def _logprobs(engine: FSDPEngine, batch: TokenBatch) -> Tensor:
    with engine.resident():
        logprobs = engine.compute(batch).logprobs
    assert logprobs is not None  # a language-model head always gives them
    return logprobs
