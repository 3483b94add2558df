"""`SFTTrainer`: supervised fine-tuning over the same engine, data order, logger and checkpoints as RL."""

from __future__ import annotations

from verl.trainer.startup import gc_paused  # isort: skip

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.algorithms.losses import SFTLoss
from verl.config import SFT, Config
from verl.controller import WorkerSpec
from verl.data.batch import TokenBatch
from verl.data.loader import SFTLoader
from verl.data.sft import SFTDataset, load_sft_dataset
from verl.data.tokenizer import load_tokenizer
from verl.engines.train.loading import context_length
from verl.errors import ConfigError
from verl.observe.console import plural
from verl.observe.metrics import Last, Metrics, Sum, merge_metrics, metric_values
from verl.observe.timing import Timer
from verl.trainer.configure import configure
from verl.trainer.inputs import planned_steps, resolve_models
from verl.trainer.restarts import with_restarts
from verl.trainer.roles import closing_runtime, resource_pool, start_runtime
from verl.trainer.session import RunResult, RunSession, plan_session


class SFTTrainer:
    """Minimises the negative log-likelihood of the answers, a mean over answer tokens.

    `data.train_batch_size` rows a step; optimizer settings are the actor's.
    """

    def __init__(self, model_config: Any, **options: Any) -> None:
        """See `verl.trainer.configure.configure`."""
        config = resolve_models(configure(model_config, {}, purpose=SFT, **options))
        # The likelihood is the model's own, whatever temperature rollouts will have.
        self.config: Config = replace(config, rollout=replace(config.rollout, temperature=1.0))
        self.loss = SFTLoss()
        self.timer = Timer()
        self.global_step = 0

    def fit(self) -> RunResult:
        """Train to the end, or on from the last checkpoint."""
        return with_restarts(self)

    def run(self) -> RunResult:
        """`fit`, once: a worker that is lost ends it."""
        self.prepare()
        session, checkpoint, training = self.session, self.session.resume_from, self.config.training
        metrics: Metrics = {}
        with closing_runtime(self.runtime), session, session.logger as logger, self.loader as batches:
            if self.global_step == 0 and training.eval_before_training and training.eval_interval != 0:
                self.validate()
            for batch in batches:
                metrics = self.step(batch)
                logger.log(self.global_step, metrics, kind="sft")
                if session.due(self.global_step, training.eval_interval):
                    self.validate()
                if session.due(self.global_step, training.save_interval):
                    checkpoint = self.save()
                session.after_step(self.global_step, self.save)
        return RunResult(run_dir=session.run_dir, step=self.global_step, metrics=metric_values(metrics), checkpoint=checkpoint)

    def step(self, batch: TokenBatch) -> Metrics:
        """One optimizer step."""
        with self.timer("step"):
            metrics = self.actor.update(batch, self.loss, self.loss.count(batch))
        self.global_step += 1
        seconds = self.timer.seconds("step")
        size: Metrics = {
            "perf/total_num_tokens": Sum(batch.num_tokens),
            "perf/tokens_per_s": Last(batch.num_tokens / seconds),
            "training/epoch": Last(self.loader.epoch),
        }
        return merge_metrics([metrics, size, self.timer.metrics()])

    def validate(self) -> dict[str, float]:
        """Negative log-likelihood of the held-out answers, a mean over their tokens, in nats; logged, and returned."""
        rows, size = self.validation, self.config.data.train_batch_size
        if rows is None:
            return {}
        total, count = 0.0, 0
        for start in range(0, len(rows), size):
            batch = rows.batch(range(start, min(start + size, len(rows))))
            logprobs = self.actor.compute_log_probs(batch)[batch.loss_mask]
            total, count = total - float(logprobs.double().sum()), count + logprobs.numel()
        values = {"val/loss": total / count}
        self.session.logger.log(self.global_step, values, kind="val")
        self.session.validated(self.global_step, values)
        return values

    def check(self) -> str:
        """Find everything that can be wrong with the input, without loading a model; returns what would be done."""
        config = self.config
        tokenizer = load_tokenizer(config.model)
        self.dataset = load_sft_dataset(config.data.train_files, config.data, config.model, tokenizer)
        self.validation = None
        if config.data.val_files:
            self.validation = load_sft_dataset(config.data.val_files, config.data, config.model, tokenizer, "test")
        for dataset in (self.dataset, self.validation):
            if dataset is not None:
                _check_context_length(config, dataset)
        self.total_steps = planned_steps(config, len(self.dataset))
        plan_session(config, algorithm="sft", kind="sft", total_steps=self.total_steps)
        held_out = "" if self.validation is None else f", {plural(len(self.validation), 'held-out row')}"
        return (
            f"sft on {config.model.path}: {plural(len(self.dataset), 'training row')}{held_out}, "
            f"{plural(self.total_steps, 'step')} of {plural(config.data.train_batch_size, 'row')}, "
            f"learning rate {config.actor.lr:g}"
        )

    def dry_run(self) -> str:
        """`check`, under the name it has in every trainer."""
        return self.check()

    @gc_paused()
    def prepare(self) -> None:
        """Check the input, open the run, load the model, restore the checkpoint if there is one. Idempotent."""
        if hasattr(self, "session"):
            return
        from verl.workers.model import ActorWorker

        config = self.config
        self.global_step = 0
        print(self.check())
        session = RunSession(config, algorithm="sft", kind="sft", total_steps=self.total_steps)
        self.loader = SFTLoader(
            self.dataset,
            config.data.train_batch_size,
            seed=config.training.seed if config.data.seed is None else config.data.seed,
            shuffle=config.data.shuffle,
            prefetch=config.data.prefetch,
            total_steps=self.total_steps,
        )
        with ExitStack() as undo:
            undo.callback(session.release)
            undo.push(session.logger)
            self.runtime = start_runtime(config)
            undo.callback(self.runtime.shutdown)
            spec = WorkerSpec(ActorWorker, {"config": config, "total_updates": self.total_steps})
            self.actor = self.runtime.spawn(resource_pool(config), {"actor": spec})["actor"]
            if session.resume_from is not None:
                self.actor.load(session.resume_from / "actor")
                self.loader.load_state_dict(session.state["loader"])
                self.global_step = session.start_step
            session.restore_rng()
            undo.pop_all()  # only what fails here is undone here: `run` ends the rest
        self.session = session  # last: a trainer that has one is ready

    def save(self) -> Path:
        """Write a checkpoint: a Hugging Face model folder with, inside, what exact resume needs."""
        return self.session.save(self.global_step, {"loader": self.loader.state_dict()}, self._write_models, self._written)

    def _write_models(self, folder: Path) -> None:
        background = self.config.training.async_save
        self.actor.export(folder, background)
        self.actor.save(folder / "actor", background)

    def _written(self, wait: bool) -> bool:
        return all(self.actor.written(wait))


def _check_context_length(config: Config, dataset: SFTDataset) -> None:
    limit, longest = context_length(config.model.path), int(dataset.lengths.max())
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest row has {longest} tokens, over the {limit} positions of {config.model.path}; "
            f"lower data.max_response_length, so that longer rows than that are dropped"
        )
