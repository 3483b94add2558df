"""The PyTorch training engine: one model on one device, or sliced over the ranks of the process group (FSDP2).

Every method is called on all ranks, each with its own share of the data. Shares need not be equal: a rank with fewer
micro-batches, or none at all, takes part in the collective operations of the others with a batch of no weight.

Shapes: T tokens of a (micro-)batch laid end to end, R tokens of its row, N scored positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from verl.checkpoint.tensors import host_copies, load_tensors, save_tensors, saved_shapes
from verl.config.schema import ModelConfig, OptimizerConfig
from verl.data.batch import TokenBatch
from verl.engines.train.base import Loss, ModelOutputs
from verl.engines.train.gathering import BUCKET_BYTES
from verl.engines.train.loading import (
    ValueModel,
    export_model,
    load_causal_lm,
    load_value_model,
    resolve_device,
    resolve_dtype,
)
from verl.engines.train.memory import keep_freed_memory
from verl.engines.train.mesh import Parallelism, model_mesh
from verl.engines.train.offload import HostParking, ModuleParking
from verl.engines.train.optimizer import MasterAdamW
from verl.engines.train.packing import Packing, lay_out, micro_batches
from verl.engines.train.pipeline import Pipeline
from verl.engines.train.placement import Placement
from verl.engines.train.scorer import Scorer
from verl.engines.train.sharding import most_of
from verl.engines.train.token_shares import Peers
from verl.errors import UserError
from verl.observe.metrics import Metrics, merge_metrics

_STATE_FILE = "engine.json"
_WEIGHTS = "weights."
"""Before the names of master weights, beside Adam's `exp_avg.NAME` and so on."""


class FSDPEngine:
    """Forward, backward, optimizer step, export and state of one Hugging Face model. See `TrainEngine`.

    Outputs are computed where the policy chose the token (`loss_mask`) and are 0 elsewhere; with `all_tokens`
    they are computed at every token that has a prefix (all but the first of each sequence).
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        head: Literal["lm", "value"] = "lm",
        optimizer: OptimizerConfig | None = None,
        total_steps: int | None = None,
        temperature: float = 1.0,
        max_tokens_per_micro_batch: int = 16384,
        gradient_checkpointing: bool = False,
        device: str = "auto",
        sharding: Literal["auto", "always", "never"] = "auto",
        parallelism: Parallelism | None = None,
        param_offload: bool = False,
        optimizer_offload: bool = False,
    ) -> None:
        """Load `model`. Without an `optimizer` the engine only computes (a reference model) and keeps no masters.

        `total_steps`: optimizer steps, for schedules that end. `temperature`: divides the logits, as in sampling.
        `max_tokens_per_micro_batch`: memory bound of a pass, cannot change results. `sharding`: spread the model over the
        ranks; auto does so where there are several. `parallelism`: in which ways; None: slices alone.
        `param_offload`, `optimizer_offload`: parameters, and what only the update needs, are in host memory except within
        `resident`. Raises UserError for a model or setting that cannot work.
        """
        self.model = model
        self.head = head
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.device = resolve_device(device)
        self.compute_dtype = resolve_dtype(model.dtype, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.is_sharded = sharding == "always" or (sharding == "auto" and several)
        # Masters start from the file's own precision, so a trained model is loaded in float32 and rounded after.
        dtype = torch.float32 if optimizer or self.is_sharded else self.compute_dtype
        load = load_causal_lm if head == "lm" else load_value_model
        self.module: nn.Module = load(model, torch.device("meta") if self.is_sharded else self.device, dtype)
        self._body: nn.Module = self.module.body if isinstance(self.module, ValueModel) else self.module.base_model
        if optimizer is None:
            self.module.requires_grad_(False)
        self._placement: Placement | None = None
        self._writers: dist.ProcessGroup | None = None
        if self.is_sharded:
            mesh = model_mesh(self.device.type, parallelism or Parallelism())
            self._placement = Placement(self.module, self._body, mesh, self.compute_dtype, temperature)
            self._placement.materialise(load(model, torch.device("cpu"), dtype) if dist.get_rank() == 0 else None, self.device)
            self._scorer = self._placement.scorer
            self._pipeline = Pipeline(mesh.stages, self.device)
        else:
            self._scorer = Scorer(self.module, self._body, self.compute_dtype, temperature)
            self._pipeline = Pipeline(Peers.alone(), self.device)
        self.optimizer: MasterAdamW | None = None
        if optimizer is not None:
            self.optimizer = MasterAdamW(
                dict(self.module.named_parameters()),
                optimizer,
                total_steps=total_steps,
                compute_dtype=self.compute_dtype,
                sums=self._placement,
            )
        if gradient_checkpointing:
            # Renamed in transformers 5.24; both take the keyword arguments of torch.utils.checkpoint first.
            name = (
                "activation_checkpointing_enable"
                if hasattr(self._body, "activation_checkpointing_enable")
                else "gradient_checkpointing_enable"
            )
            getattr(self._body, name)({"use_reentrant": False})
        self._gradient_checkpointing = gradient_checkpointing
        self._parameters_home: HostParking | ModuleParking | None = None
        if param_offload and self.is_sharded:
            self._parameters_home = ModuleParking(self._scorer, self.device, self._after_a_move)
        elif param_offload:
            self._parameters_home = HostParking(self.module.parameters, self.device)
        self._optimizer_home: HostParking | None = None
        if optimizer_offload and self.optimizer is not None:
            self._optimizer_home = HostParking(self.optimizer.tensors, self.device)
        self._residents = 0
        self._leave()

    @contextmanager
    def resident(self, *, optimizer: bool = False) -> Iterator[None]:
        """Parameters, and with `optimizer` what the update needs, on the device while the block runs. Every use of the
        engine's weights belongs into such a block, which may hold others; it costs nothing where nothing leaves."""
        self._residents += 1
        if self._parameters_home is not None:
            self._parameters_home.fetch()
        if optimizer and self._optimizer_home is not None:
            self._optimizer_home.fetch()
        try:
            yield
        finally:
            self._residents -= 1
            if optimizer and self._optimizer_home is not None:
                self._optimizer_home.park()
            if self._residents == 0:
                self._leave()

    @property
    def parameters_are_away(self) -> bool:
        """Whether parameters are in host memory, so that their device memory will be another after `resident`."""
        return self._parameters_home is not None and self._parameters_home.is_parked

    def _leave(self) -> None:
        for home in (self._parameters_home, self._optimizer_home):
            if home is not None:
                home.park()

    def _after_a_move(self) -> None:
        if self.optimizer is not None:
            self.optimizer.take_slices()

    def compute(self, batch: TokenBatch, *, entropy: bool = False, all_tokens: bool = False) -> ModelOutputs:
        """Log-probs (and entropies in nats) or values of `batch`'s tokens, [T] float32 on the CPU, without gradient."""
        names = ["values"] if self.head == "value" else ["logprobs", "entropy"] if entropy else ["logprobs"]
        parts: dict[str, list[tuple[list[int], Tensor]]] = {name: [] for name in names}
        groups = self._micro_batches(batch, all_tokens)
        row = self._rows(batch, groups, all_tokens)
        with torch.no_grad():
            passes = self._pipeline.forward(len(groups), row, lambda i, received: self._pass(row(i), entropy, received))
            for indices, outputs in zip(groups, passes, strict=True):
                if indices is None or isinstance(outputs, Tensor):
                    continue  # no data, or another stage has the results
                for name, pieces in parts.items():
                    pieces.append((indices, getattr(outputs, name).cpu()))
        if self._placement is not None:
            self._placement.let_go()
        return ModelOutputs(**{name: batch.scatter_tokens(pieces) for name, pieces in parts.items()})

    def forward_backward(self, batch: TokenBatch, loss: Loss, *, count: float | None = None, all_tokens: bool = False) -> Metrics:
        """Accumulate the gradient of loss sum / `count` (default: `loss.count(batch)`) over micro-batches."""
        self._require_optimizer()
        # A batch with nothing to train on has sum 0 as well, so any divisor gives its gradient: zero.
        divisor = (loss.count(batch) if count is None else count) or 1.0
        metrics: list[Metrics] = []
        groups = self._micro_batches(batch, all_tokens)
        row = self._rows(batch, groups, all_tokens)

        def run(i: int, received: Tensor | None) -> Tensor:
            outputs = self._pass(row(i), loss.needs_entropy, received)
            if isinstance(outputs, Tensor):
                return outputs
            if groups[i] is None:
                return sum(x.sum() for x in (outputs.logprobs, outputs.entropy, outputs.values) if x is not None) * 0.0
            result = loss(row(i).batch.to(self.device), outputs)
            metrics.append(result.metrics)
            return result.total / divisor

        if self._gradient_checkpointing:
            # Transformers checkpoints in training mode alone; no other layer of these models depends on the mode.
            self.module.train()
        try:
            self._pipeline.train(len(groups), row, run, lambda i: self._will_reduce(is_last=i == len(groups) - 1))
        finally:
            if self._gradient_checkpointing:
                self.module.eval()
        return merge_metrics(metrics)

    def _micro_batches(self, batch: TokenBatch, all_tokens: bool) -> list[list[int] | None]:
        """Sequences of each micro-batch; None where other ranks have one and this rank has no more."""
        groups: list[list[int] | None] = []
        if len(batch):
            groups += micro_batches(batch, self.max_tokens_per_micro_batch, share_prompts=not all_tokens)
        if self.is_sharded:
            groups += [None] * (most_of(len(groups), self.device) - len(groups))
        return groups

    def _will_reduce(self, *, is_last: bool) -> None:
        """Whether the next backward pass hands its gradients to the slices. With slices smaller than the whole each pass
        does, since only that keeps memory small; where a rank holds the whole, once a batch is enough."""
        if self._placement is not None and self._placement.slice_is_whole:
            self._scorer.set_requires_gradient_sync(is_last)  # type: ignore[operator]

    def optimizer_step(self) -> Metrics:
        """Clip, guard, update, advance the schedule, drop the gradients. Metrics: grad_norm, lr, skipped_steps."""
        return self._require_optimizer().step()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own parameters (no copies) under Hugging Face names; tied weights come once. Slices of a sliced
        model are DTensors."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.data

    def whole_weights(self, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole and in `dtype`, on every rank; a tensor is valid until the one after its bucket is asked for."""
        if self._placement is not None:
            yield from self._placement.whole_weights(dtype, bucket_bytes)
            return
        for name, tensor in self.named_weights():
            yield name, tensor.to(dtype)

    def save(self, folder: Path) -> None:
        """Write master weights, Adam's moments and the schedule's position; `load` continues bit for bit.

        Each rank writes its slices; they can be read on any number of ranks.
        """
        self.saving(folder)()

    def saving(self, folder: Path, *, background: bool = False) -> Callable[[], None]:
        """What `save` does, to be called on every rank; `background`: of a copy in host memory made now, so that it can be
        called in another thread while training goes on."""
        tensors = {_WEIGHTS + name: tensor for name, tensor in self._masters().items()} | self._optimizer_state()
        state = {"num_optimizer_steps": 0 if self.optimizer is None else self.optimizer.num_steps, "head": self.head}
        group = None
        if background:
            tensors = host_copies(tensors)
            group = self._writing_group()

        def write() -> None:
            save_tensors(folder, tensors, group)
            if self._is_first():
                (folder / _STATE_FILE).write_text(json.dumps(state))

        return write

    def _writing_group(self) -> dist.ProcessGroup | None:
        """Connections of their own for threads that write: those of training are in use."""
        if self._writers is None and self.is_sharded:
            self._writers = dist.new_group(backend="gloo")
        return self._writers

    def load(self, folder: Path) -> None:
        """Take what `save` wrote, in place: an engine that shares the parameters sees them at once."""
        if not (folder / _STATE_FILE).is_file():
            raise UserError(f"{folder}: no {_STATE_FILE}; this is not a complete checkpoint of the training engine")
        state = json.loads((folder / _STATE_FILE).read_text())
        saved = saved_shapes(folder)
        self._check_fits(folder, {n.removeprefix(_WEIGHTS): shape for n, shape in saved.items() if n.startswith(_WEIGHTS)})
        load_tensors(folder, {_WEIGHTS + name: tensor for name, tensor in self._masters().items()})
        if self.optimizer is not None:
            # A parameter that was never stepped has no moments.
            moments = {name: tensor for name, tensor in self.optimizer.empty_state().items() if name in saved}
            load_tensors(folder, moments)
            self.optimizer.load_state(moments)
            self.optimizer.num_steps = state["num_optimizer_steps"]
            self.optimizer.publish()

    def _check_fits(self, folder: Path, saved: dict[str, torch.Size]) -> None:
        if self._placement is not None:
            wanted = self._placement.shapes
        else:
            wanted = {name: parameter.shape for name, parameter in self.module.named_parameters()}
        wrong = [name for name in sorted(wanted.keys() | saved.keys()) if wanted.get(name) != saved.get(name)]
        if wrong:
            raise UserError(
                f"{folder}: {len(wrong)} weights do not fit the model at {self.model.path}, {wrong[0]} first; use the run's model"
            )

    def export(self, folder: Path) -> None:
        """A Hugging Face folder (weights in the compute dtype, config, tokenizer), and the value head if there is one."""
        self.exporting(folder)()

    def exporting(self, folder: Path, *, background: bool = False) -> Callable[[], None]:
        """What `export` does, on whatever ranks it is called; `background`: while training goes on (see `saving`)."""
        if self._placement is None and not background:
            return partial(export_model, self.module, self.model, folder)
        weights = {}
        for name, tensor in self.whole_weights(self.compute_dtype):
            if self._is_first():
                weights[name] = tensor.to("cpu", copy=True)

        def write() -> None:
            if self._is_first():
                # This rank's module may lack some layers; export wants a whole one, of which it reads no weights.
                load = load_causal_lm if self.head == "lm" else load_value_model
                export_model(load(self.model, torch.device("meta"), self.compute_dtype), self.model, folder, weights)

        return write

    def _is_first(self) -> bool:
        return not self.is_sharded or dist.get_rank() == 0

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {} if self.optimizer is None else self.optimizer.state()

    def _masters(self) -> dict[str, Tensor]:
        """Float32 weights where there is an optimizer; DTensors where they are sliced."""
        if self.optimizer is None or self.is_sharded:
            return {name: parameter.data for name, parameter in self.module.named_parameters()}
        return {name: master.data for name, master in self.optimizer.masters.items()}

    def _require_optimizer(self) -> MasterAdamW:
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: it can compute, not train")
        return self.optimizer

    def _rows(self, batch: TokenBatch, groups: list[list[int] | None], all_tokens: bool) -> Callable[[int], _Row]:
        """Micro-batches laid out on the device, on demand; the few that a pipeline keeps alive are made once."""

        @lru_cache(maxsize=1 + self._pipeline.stages)
        def row(i: int) -> _Row:
            indices = groups[i]
            if indices is not None:
                return self._lay_out(batch.select(indices), all_tokens)
            return self._lay_out(_NO_WEIGHT, False)

        return row

    def _lay_out(self, batch: TokenBatch, all_tokens: bool) -> _Row:
        # Scoring prompt tokens takes a copy of the prompt for each sequence.
        layout = lay_out(batch, share_prompts=not all_tokens)
        has_prefix = batch.positions() > 0
        scored = (has_prefix if all_tokens else has_prefix & batch.loss_mask).nonzero()[:, 0]
        input_ids, rows = batch.input_ids, scored
        if layout.tokens is not None and layout.places is not None:
            input_ids, rows = input_ids[layout.tokens], layout.places[scored]
        lengths, contexts = layout.lengths, layout.contexts
        shares = self._scorer.shares
        if shares is not None and (extra := shares.padding(input_ids.shape[0])):
            # One more piece, which nothing sees and nobody scores.
            input_ids = F.pad(input_ids, (0, extra))
            lengths, contexts = [*lengths, extra], None if contexts is None else [*contexts, -1]
        packing = Packing(lengths, self.device, contexts)
        own = input_ids.shape[0] if shares is None else input_ids.shape[0] // shares.tokens.size
        input_ids, rows, scored = (x.to(self.device) for x in (input_ids, rows, scored))
        return _Row(batch, input_ids, rows, scored, packing, (1, own, self._body.config.hidden_size))

    def _pass(self, row: _Row, entropy: bool, received: Tensor | None) -> ModelOutputs | Tensor:
        """One packed pass over a micro-batch: outputs on the device, or on stages but the last what the next one gets."""
        first, entropies = self._scorer(row.input_ids, row.rows, row.packing, entropy, received)
        if not self._scorer.is_last:
            return first
        zeros = torch.zeros(row.batch.num_tokens, device=self.device)
        outputs = [None if x is None else zeros.to(x.dtype).index_copy(0, row.scored, x[row.rows]) for x in (first, entropies)]
        if self.head == "value":
            return ModelOutputs(values=outputs[0])
        return ModelOutputs(logprobs=outputs[0], entropy=outputs[1])


@dataclass(frozen=True)
class _Row:
    """A micro-batch laid end to end; `batch` is on the CPU, the rest on the device."""

    batch: TokenBatch
    input_ids: Tensor
    """[R], padding included."""
    rows: Tensor
    """[N] places in the row of the tokens to score."""
    scored: Tensor
    """[N] their places in the batch."""
    packing: Packing
    shape: tuple[int, int, int]
    """Of the hidden states that a rank has between layers."""


_NO_WEIGHT = TokenBatch(torch.tensor([0, 2]), input_ids=torch.zeros(2), loss_mask=torch.tensor([False, True]))
"""What a rank without data passes through the model, so that it takes part in what the others do together."""
