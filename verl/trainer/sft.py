"""`SFTTrainer`: supervised fine-tuning over the same engine, data order, logger and checkpoints as RL."""

from __future__ import annotations

from verl.trainer.startup import gc_paused  # isort: skip

from pathlib import Path
from typing import Any

from verl.algorithms.losses import SFTLoss
from verl.config.schema import Config
from verl.controller import LocalRuntime, ResourcePool, WorkerSpec
from verl.data.batch import TokenBatch
from verl.data.loader import SFTLoader
from verl.data.sft import load_sft_dataset
from verl.data.tokenizer import load_tokenizer
from verl.engines.train.loading import check_model_folder, resolve_device
from verl.observe.metrics import Last, Metrics, Sum, merge_metrics, metric_values
from verl.observe.timing import Timer
from verl.trainer.configure import configure
from verl.trainer.inputs import planned_steps
from verl.trainer.session import RunResult, RunSession


class SFTTrainer:
    """Minimises the negative log-likelihood of the answers, a mean over answer tokens.

    `data.train_batch_size` rows a step; optimizer settings are the actor's.
    """

    def __init__(self, model_config: Any, **options: Any) -> None:
        """See `verl.trainer.configure.configure`."""
        self.config: Config = configure(model_config, {}, **options)
        self.loss = SFTLoss()
        self.timer = Timer()
        self.global_step = 0

    def fit(self) -> RunResult:
        """Train to the end, or on from the last checkpoint."""
        self.prepare()
        session, checkpoint = self.session, self.session.resume_from
        metrics: Metrics = {}
        with session, session.logger as logger, self.loader as batches:
            for batch in batches:
                metrics = self.step(batch)
                logger.log(self.global_step, metrics, kind="sft")
                if session.due(self.global_step, self.config.training.save_interval):
                    checkpoint = self.save()
                session.stop_if_interrupted(self.global_step, self.save)
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

    @gc_paused()
    def prepare(self) -> None:
        """Check the input, open the run, load the model, restore the checkpoint if there is one."""
        from verl.workers.model import ActorWorker

        config = self.config
        check_model_folder(config.model.path)
        self.tokenizer = load_tokenizer(config.model)
        dataset = load_sft_dataset(config.data.train_files, config.data, config.model, self.tokenizer)
        total_steps = planned_steps(config, len(dataset))
        self.session = RunSession(config, algorithm="sft", kind="sft", total_steps=total_steps)
        self.loader = SFTLoader(
            dataset,
            config.data.train_batch_size,
            seed=config.training.seed if config.data.seed is None else config.data.seed,
            shuffle=config.data.shuffle,
            prefetch=config.data.prefetch,
            total_steps=total_steps,
        )
        pool = ResourcePool(device=str(resolve_device(config.training.device)))
        spec = WorkerSpec(ActorWorker, {"config": config, "total_updates": total_steps})
        self.actor = LocalRuntime().spawn(pool, {"actor": spec})["actor"]
        if self.session.resume_from is not None:
            self.actor.load(self.session.resume_from / "actor")
            self.loader.load_state_dict(self.session.state["loader"])
            self.global_step = self.session.start_step
            self.session.restore_rng()

    def save(self) -> Path:
        """Write a checkpoint: a Hugging Face model folder with, inside, what exact resume needs."""
        return self.session.save(self.global_step, {"loader": self.loader.state_dict()}, self._write_models)

    def _write_models(self, folder: Path) -> None:
        self.actor.export(folder)
        self.actor.save(folder / "actor")
