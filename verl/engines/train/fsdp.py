"""The PyTorch training engine, at world size 1: one model on one device, no process group.

Sharding will wrap the module between loading and the optimizer; everything after sees named parameters only.

Shapes: T tokens of a (micro-)batch laid end to end, N scored positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from verl.config.schema import ModelConfig, OptimizerConfig
from verl.data.batch import TokenBatch
from verl.engines.train.attention import packed_inputs
from verl.engines.train.base import Loss, ModelOutputs
from verl.engines.train.loading import (
    ValueModel,
    export_model,
    load_causal_lm,
    load_value_model,
    resolve_device,
    resolve_dtype,
    share_permissions,
)
from verl.engines.train.logprobs import token_logprobs
from verl.engines.train.memory import keep_freed_memory
from verl.engines.train.optimizer import MasterAdamW
from verl.engines.train.packing import Packing, lay_out, micro_batches
from verl.errors import UserError
from verl.observe.metrics import Metrics, merge_metrics

_WEIGHTS_FILE, _OPTIMIZER_FILE, _STATE_FILE = "weights.safetensors", "optimizer.safetensors", "engine.json"


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
    ) -> None:
        """Load `model`. Without an `optimizer` the engine only computes (a reference model) and keeps no masters.

        `total_steps`: optimizer steps, for schedules that end. `temperature`: divides the logits, as in sampling.
        `max_tokens_per_micro_batch`: memory bound of a pass, cannot change results. Raises UserError for a model
        or setting that cannot work.
        """
        self.model = model
        self.head = head
        self.temperature = temperature
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.device = resolve_device(device)
        self.compute_dtype = resolve_dtype(model.dtype, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        # Masters start from the file's own precision, so a trained model is loaded in float32 and rounded after.
        load = load_causal_lm if head == "lm" else load_value_model
        self.module: nn.Module = load(model, self.device, torch.float32 if optimizer else self.compute_dtype)
        self._body: nn.Module = self.module.body if isinstance(self.module, ValueModel) else self.module.base_model
        self.optimizer: MasterAdamW | None = None
        if optimizer is None:
            self.module.requires_grad_(False)
        else:
            parameters = dict(self.module.named_parameters())
            self.optimizer = MasterAdamW(parameters, optimizer, total_steps=total_steps, compute_dtype=self.compute_dtype)
        if gradient_checkpointing:
            # Renamed in transformers 5.24; both take the keyword arguments of torch.utils.checkpoint first.
            name = (
                "activation_checkpointing_enable"
                if hasattr(self._body, "activation_checkpointing_enable")
                else "gradient_checkpointing_enable"
            )
            getattr(self._body, name)({"use_reentrant": False})
        self._gradient_checkpointing = gradient_checkpointing

    def compute(self, batch: TokenBatch, *, entropy: bool = False, all_tokens: bool = False) -> ModelOutputs:
        """Log-probs (and entropies in nats) or values of `batch`'s tokens, [T] float32 on the CPU, without gradient."""
        parts: dict[str, list[tuple[list[int], Tensor]]] = {}
        with torch.no_grad():
            for indices in micro_batches(batch, self.max_tokens_per_micro_batch, share_prompts=not all_tokens):
                outputs = self._forward(batch.select(indices), entropy, all_tokens)
                for name in ("logprobs", "entropy", "values"):
                    values = getattr(outputs, name)
                    if values is not None:
                        parts.setdefault(name, []).append((indices, values.cpu()))
        return ModelOutputs(**{name: batch.scatter_tokens(pieces) for name, pieces in parts.items()})

    def forward_backward(self, batch: TokenBatch, loss: Loss, *, count: float | None = None, all_tokens: bool = False) -> Metrics:
        """Accumulate the gradient of loss sum / `count` (default: `loss.count(batch)`) over micro-batches."""
        self._require_optimizer()
        # A batch with nothing to train on has sum 0 as well, so any divisor gives its gradient: zero.
        divisor = (loss.count(batch) if count is None else count) or 1.0
        metrics: list[Metrics] = []
        if self._gradient_checkpointing:
            # Transformers checkpoints in training mode alone; no other layer of these models depends on the mode.
            self.module.train()
        try:
            for indices in micro_batches(batch, self.max_tokens_per_micro_batch, share_prompts=not all_tokens):
                micro_batch = batch.select(indices)
                outputs = self._forward(micro_batch, loss.needs_entropy, all_tokens)
                result = loss(micro_batch.to(self.device), outputs)
                (result.total / divisor).backward()
                metrics.append(result.metrics)
        finally:
            if self._gradient_checkpointing:
                self.module.eval()
        return merge_metrics(metrics)

    def optimizer_step(self) -> Metrics:
        """Clip, guard, update, advance the schedule, drop the gradients. Metrics: grad_norm, lr, skipped_steps."""
        return self._require_optimizer().step()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's own parameters (no copies) under Hugging Face names; tied weights come once."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.data

    def save(self, folder: Path) -> None:
        """Write master weights, Adam's moments and the schedule's position; `load` continues bit for bit."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(_on_cpu(self._masters()), folder / _WEIGHTS_FILE)
        if self.optimizer is not None:
            save_file(_on_cpu(self.optimizer.state()), folder / _OPTIMIZER_FILE)
        num_steps = 0 if self.optimizer is None else self.optimizer.num_steps
        (folder / _STATE_FILE).write_text(json.dumps({"num_optimizer_steps": num_steps, "head": self.head}))
        share_permissions(folder, _STATE_FILE)

    def load(self, folder: Path) -> None:
        """Take what `save` wrote, in place: an engine that shares the parameters sees them at once."""
        from safetensors.torch import load_file

        for name in (_WEIGHTS_FILE, _STATE_FILE, *([_OPTIMIZER_FILE] if self.optimizer else [])):
            if not (folder / name).is_file():
                raise UserError(f"{folder}: no {name}; this is not a complete checkpoint of the training engine")
        weights = load_file(folder / _WEIGHTS_FILE)
        masters = self._masters()
        wrong = [
            n
            for n in sorted(masters.keys() | weights.keys())
            if n not in weights or n not in masters or masters[n].shape != weights[n].shape
        ]
        if wrong:
            raise UserError(
                f"{folder}: {len(wrong)} weights do not fit the model at {self.model.path}, {wrong[0]} first; use the run's model"
            )
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(weights[name])
        if self.optimizer is not None:
            self.optimizer.load_state(load_file(folder / _OPTIMIZER_FILE))
            self.optimizer.num_steps = json.loads((folder / _STATE_FILE).read_text())["num_optimizer_steps"]
            self.optimizer.publish()

    def export(self, folder: Path) -> None:
        """A Hugging Face folder (weights in the compute dtype, config, tokenizer), and the value head if there is one."""
        export_model(self.module, self.model, folder)

    def _masters(self) -> dict[str, Tensor]:
        named = self.module.named_parameters() if self.optimizer is None else self.optimizer.masters.items()
        return {name: parameter.data for name, parameter in named}

    def _require_optimizer(self) -> MasterAdamW:
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: it can compute, not train")
        return self.optimizer

    def _hidden_states(self, inputs: dict) -> Tensor:
        """[T, D] final hidden states, in the compute dtype.

        In half precision the residual stream stays float32, as the rollout engine keeps it: sixty roundings of it would
        make two passes over the same tokens differ by far more than their matrix products do.
        """
        if self.compute_dtype == torch.float32:
            return self._body(**inputs).last_hidden_state[0]
        embeddings = self._body.get_input_embeddings()(inputs.pop("input_ids")).float()
        with torch.autocast(self.device.type, dtype=self.compute_dtype):
            hidden = self._body(inputs_embeds=embeddings, **inputs).last_hidden_state[0]
        return hidden.to(self.compute_dtype)

    def _forward(self, batch: TokenBatch, entropy: bool, all_tokens: bool) -> ModelOutputs:
        """One packed pass over a micro-batch, which is on the CPU; the outputs are on the device."""
        # Scoring prompt tokens takes a copy of the prompt for each sequence.
        layout = lay_out(batch, share_prompts=not all_tokens)
        packing = Packing(layout.lengths, self.device, layout.contexts)
        has_prefix = batch.positions() > 0
        scored = (has_prefix if all_tokens else has_prefix & batch.loss_mask).nonzero()[:, 0]
        input_ids, rows = batch.input_ids, scored
        if layout.tokens is not None and layout.places is not None:
            input_ids, rows = input_ids[layout.tokens], layout.places[scored]
        input_ids, rows, scored = (x.to(self.device) for x in (input_ids, rows, scored))
        hidden = self._hidden_states(packed_inputs(input_ids, packing))
        zeros = torch.zeros(batch.num_tokens, device=self.device)
        if isinstance(self.module, ValueModel):
            return ModelOutputs(values=zeros.index_copy(0, scored, self.module(hidden.index_select(0, rows - 1))))
        logprobs, entropies = token_logprobs(
            hidden,
            self.module.get_output_embeddings().weight,
            input_ids,
            rows,
            temperature=self.temperature,
            softcap=getattr(self.module.config, "final_logit_softcapping", None),
            entropy=entropy,
        )
        if layout.places is not None:
            values = (None if x is None else zeros.to(x.dtype).index_copy(0, scored, x[rows]) for x in (logprobs, entropies))
            logprobs, entropies = values
        return ModelOutputs(logprobs=logprobs, entropy=entropies)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
