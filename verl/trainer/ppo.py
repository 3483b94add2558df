"""`RLTrainer`: the driver of every RL run, and `PPOTrainer`, PPO by default.

The driver holds worker groups and an algorithm and says what happens in a step; it knows nothing of devices.
PPO: Schulman et al. 2017, with a critic (GAE, Schulman et al. 2016); dataflow: HybridFlow, Sheng et al. 2024.
"""

from __future__ import annotations

from verl.trainer.startup import gc_paused  # isort: skip

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.algorithms.kl import KLController
from verl.algorithms.select import build_algorithm
from verl.algorithms.spec import REWARD_KL_METRIC, Algorithm
from verl.config.schema import Config
from verl.controller import WorkerGroup
from verl.data.batch import TokenBatch
from verl.data.loader import PromptLoader
from verl.data.types import EncodedPrompt
from verl.engines.train.base import Loss
from verl.errors import ConfigError, UserError
from verl.observe.console import plural
from verl.observe.metrics import Last, Metrics, merge_metrics, metric_values
from verl.observe.timing import Timer
from verl.trainer.configure import configure
from verl.trainer.inputs import RLInputs, load_rl_inputs, planned_steps, resolve_models
from verl.trainer.restarts import with_restarts
from verl.trainer.roles import closing_runtime, spawn_workers, start_runtime, sync_weights
from verl.trainer.rollouts import derive_seed, generate, training_sampling
from verl.trainer.session import RunResult, RunSession, plan_session
from verl.trainer.stats import batch_metrics, policy_kl_sample
from verl.trainer.validation import validate


class RLTrainer:
    """Runs an algorithm's dataflow. `fit()` does a whole run; `step(prompts)` is one training step.

    Nothing is loaded until `fit` (or `prepare`), and `prepare` checks all input before it loads a model.
    """

    actor: WorkerGroup
    rollout: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None

    def __init__(self, config: Config, *, algorithm: Algorithm | None = None) -> None:
        self.config = config = resolve_models(config)
        self.algorithm = algorithm or build_algorithm(config)
        self.timer = Timer()
        self.global_step = 0
        self.policy_version = 0
        self.kl_controller: KLController | None = self.algorithm.kl_controller

    def fit(self) -> RunResult:
        """Train to the end, or on from the last checkpoint; returns where everything was written."""
        return with_restarts(self)

    def run(self) -> RunResult:
        """`fit`, once: a worker that is lost ends it."""
        self.prepare()
        session = self.session
        checkpoint: Path | None = session.resume_from
        metrics: Metrics = {}
        with closing_runtime(self.runtime), session, session.logger as logger, self.inputs.reward, self.loader as batches:
            if self.global_step == 0 and self.config.training.eval_before_training and self.config.training.eval_interval != 0:
                self.validate()
            for prompts in batches:
                try:
                    metrics = self.step(prompts)
                except UserError:  # raised before any weight has moved
                    session.save_before_leaving(self.global_step, self.save)
                    raise
                self._position = self.loader.state_dict()
                logger.log(self.global_step, metrics)
                if session.due(self.global_step, self.config.training.eval_interval):
                    self.validate()
                if session.due(self.global_step, self.config.training.save_interval):
                    checkpoint = self.save()
                session.after_step(self.global_step, self.save)
        return RunResult(run_dir=session.run_dir, step=self.global_step, metrics=metric_values(metrics), checkpoint=checkpoint)

    def step(self, prompts: list[EncodedPrompt]) -> Metrics:
        """One training step: generate, score, estimate advantages, update, hand the new weights to the generator."""
        timer, algorithm = self.timer, self.algorithm
        parts: list[Metrics] = []
        with timer("step"):
            with timer("gen"):
                trajectories = self.generate(prompts)
            with timer("reward"):
                trajectories, reward_metrics = self.inputs.reward.score(trajectories)
            batch = TokenBatch.from_trajectories(trajectories)
            if algorithm.needs_old_logprobs:
                with timer("old_log_prob"):
                    batch = batch.with_columns(old_logprobs=self.actor.compute_log_probs(batch))
            if self.reference is not None:
                with timer("ref"):
                    batch = batch.with_columns(ref_logprobs=self.reference.compute_log_probs(batch))
            if self.critic is not None:
                with timer("values"):
                    batch = batch.with_columns(values=self.critic.compute_values(batch))
            with timer("adv"):
                batch, advantage_metrics = algorithm.advantages(batch, self._kl_coef())
            if self.critic is not None and algorithm.value_loss is not None:
                with timer("update_critic"):
                    parts += self._updates(
                        self.critic, algorithm.critic_minibatches(batch, self._step_seed()), algorithm.value_loss
                    )
            if self.global_step >= self.config.critic.warmup_steps or self.critic is None:
                with timer("update_actor"):
                    parts += self._updates(self.actor, algorithm.minibatches(batch, self._step_seed()), algorithm.policy_loss)
                    parts.append(policy_kl_sample(self.actor, batch, self.config))
                with timer("update_weights"):
                    self.policy_version += 1
                    sync_weights(self.config, self.actor, self.rollout, self.policy_version)
        self.global_step += 1
        self._adapt_kl(advantage_metrics, batch.num_sequences)
        self.session.logger.log_samples(self.global_step, trajectories)
        seconds = timer.seconds("step")
        return merge_metrics(
            [*parts, reward_metrics, advantage_metrics, batch_metrics(batch, seconds), timer.metrics(), self._progress()]
        )

    def generate(self, prompts: list[EncodedPrompt]):
        """`rollout.n` trajectories for each prompt."""
        return generate(
            self.rollout, prompts, training_sampling(self.config), seed=self.config.training.seed, step=self.global_step
        )

    def _updates(self, worker: WorkerGroup, minibatches: Iterator[TokenBatch], loss: Loss) -> list[Metrics]:
        """One optimizer step a mini-batch; the loss is divided by its count over the whole mini-batch."""
        return [worker.update(minibatch, loss, loss.count(minibatch)) for minibatch in minibatches]

    def _kl_coef(self) -> float | None:
        return None if self.kl_controller is None else self.kl_controller.coef

    def _adapt_kl(self, metrics: Metrics, num_sequences: int) -> None:
        if self.kl_controller is not None:
            self.kl_controller = self.kl_controller.updated(metrics[REWARD_KL_METRIC].value, num_sequences)

    def _step_seed(self) -> int:
        return derive_seed(self.config.training.seed, self.global_step)

    def _progress(self) -> Metrics:
        return {"training/epoch": Last(self.loader.epoch), "training/policy_version": Last(self.policy_version)}

    def validate(self) -> dict[str, float]:
        """Accuracy and the like on the held-out rows; logged, and returned."""
        if self.inputs.validation is None:
            return {}
        values, trajectories = validate(self.rollout, self.inputs.validation, self.inputs.reward, self.config)
        self.session.logger.log(self.global_step, values, kind="val")
        self.session.logger.log_samples(self.global_step, trajectories, kind="val")
        self.session.validated(self.global_step, values)
        return values

    def check(self) -> str:
        """Find everything that can be wrong with the input, without loading a model; returns what would be done."""
        config = self.config
        self.inputs: RLInputs = load_rl_inputs(config)
        self.total_steps = planned_steps(config, len(self.inputs.train))
        warmup = config.critic.warmup_steps if self.algorithm.value_loss is not None else 0
        if warmup >= self.total_steps:
            raise ConfigError(
                f"critic.warmup_steps={warmup} of {self.total_steps} steps: the policy would never be trained; lower it"
            )
        plan_session(config, algorithm=self.algorithm.name, kind="train", total_steps=self.total_steps)
        updates = self.algorithm.updates_per_step(config.data.train_batch_size)
        return (
            f"{self.algorithm.name} on {config.model.path}: {plural(len(self.inputs.train), 'training prompt')}, "
            f"{plural(self.total_steps, 'step')} of {plural(config.data.train_batch_size, 'prompt')} x "
            f"{plural(config.rollout.n, 'sample')}, {plural(updates, 'update')} a step"
            + (f", the first {plural(warmup, 'step')} for the critic alone" if warmup else "")
        )

    def dry_run(self) -> str:
        """`check`, and one call of the reward; loads no model and writes nothing."""
        lines = [self.check()]
        with self.inputs.reward as reward:
            answer, outcome = reward.try_once(self.inputs.train.prompts[0])
        lines.append(f"reward of the answer {answer!r} to the first prompt: {outcome:g}")
        return "\n".join(lines)

    @gc_paused()
    def prepare(self) -> None:
        """Check the input, open the run, create the workers, restore the checkpoint if there is one. Idempotent."""
        if hasattr(self, "session"):
            return
        config = self.config
        self.global_step, self.policy_version, self.kl_controller = 0, 0, self.algorithm.kl_controller
        print(self.check())
        total_steps = self.total_steps
        session = RunSession(config, algorithm=self.algorithm.name, kind="train", total_steps=total_steps)
        self.loader = PromptLoader(
            self.inputs.train,
            config.data.train_batch_size,
            seed=config.training.seed if config.data.seed is None else config.data.seed,
            shuffle=config.data.shuffle,
            prefetch=config.data.prefetch,
            total_steps=total_steps,
        )
        self._position = self.loader.state_dict()  # of the batches whose step is done
        with ExitStack() as undo:
            undo.callback(session.release)
            undo.push(session.logger)
            self.runtime = start_runtime(config)
            undo.callback(self.runtime.shutdown)
            groups = spawn_workers(config, self.algorithm, total_steps, self.runtime)
            self.actor, self.rollout = groups["actor"], groups["rollout"]
            self.critic, self.reference = groups.get("critic"), groups.get("reference")
            if session.resume_from is not None:
                self._restore(session.resume_from, session.state)
            session.restore_rng()
            undo.pop_all()  # only what fails here is undone here: `run` ends the rest
        self.session = session  # last: a trainer that has one is ready

    def save(self) -> Path:
        """Write a checkpoint: a Hugging Face model folder with, inside, what exact resume needs."""
        state = {
            "policy_version": self.policy_version,
            "loader": self._position,
            "kl_controller": None if self.kl_controller is None else asdict(self.kl_controller),
        }
        return self.session.save(self.global_step, state, self._write_models, self._written)

    def _write_models(self, folder: Path) -> None:
        background = self.config.training.async_save
        self.actor.export(folder, background)
        self.actor.save(folder / "actor", background)
        if self.critic is not None:
            self.critic.save(folder / "critic", background)

    def _written(self, wait: bool) -> bool:
        return all(all(group.written(wait)) for group in (self.actor, self.critic) if group is not None)

    def _restore(self, folder: Path, state: dict[str, Any]) -> None:
        self.actor.load(folder / "actor")
        if self.critic is not None:
            self.critic.load(folder / "critic")
        self.loader.load_state_dict(state["loader"])
        self._position = state["loader"]
        self.global_step, self.policy_version = state["step"], state["policy_version"]
        if state["kl_controller"] is not None:
            self.kl_controller = KLController(**state["kl_controller"])
        sync_weights(self.config, self.actor, self.rollout, self.policy_version)


class PPOTrainer(RLTrainer):
    """PPO: GAE over a learned critic."""

    def __init__(self, model_config: Any, *, clip_epsilon: float | None = None, **options: Any) -> None:
        """`model_config`: a Config, a model folder or hub id, a `model` section, or a dict of sections.

        `clip_epsilon` sets both clip bounds. `options`: see `verl.trainer.configure.configure`.
        """
        given = {"algorithm.adv_estimator": "gae"}
        if clip_epsilon is not None:
            given |= {"actor.clip_low": clip_epsilon, "actor.clip_high": clip_epsilon}
        super().__init__(configure(model_config, given, **options))
