"""The worker that generates: a rollout engine and the episode loop over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl.config.schema import Config
from verl.controller import Worker, WorkerContext, all_ranks, data_parallel, register
from verl.data.tokenizer import load_tokenizer
from verl.data.types import Trajectory
from verl.engines.hybrid import check_arrival, sync_weights
from verl.engines.rollout.base import RolloutEngine, SamplingParams
from verl.engines.rollout.build import chosen_engine, native_engine, vllm_engine
from verl.engines.train.loading import resolve_device
from verl.engines.weight_link import LinkAddress, WeightReceiver
from verl.environments.single_turn import RolloutTask, answer_prompts
from verl.observe.console import progress


class RolloutWorker(Worker):
    """Generates with the actor's own parameters where they are whole, in this process, and the engine is the native one;
    else with a model of its own, which every rank holds whole.

    Its weights come from the actor beside it, or from one in another pool, at `source`; with neither they stay as loaded.
    """

    def __init__(self, context: WorkerContext, *, config: Config, source: LinkAddress | None = None) -> None:
        super().__init__(context)
        actor: Any = context.peers.get("actor")
        self._actor_engine: Any = actor.engine if actor else None
        device = resolve_device(context.device)
        native = chosen_engine(config) == "native"
        self._shares_weights = native and bool(actor) and not self._actor_engine.is_sharded
        self.tokenizer = load_tokenizer(config.model)
        if native:
            module = self._actor_engine.module if self._shares_weights else None
            self.engine: RolloutEngine = native_engine(config, self.tokenizer, device, module=module)
        else:
            self.engine = vllm_engine(config, self.tokenizer, device, can_sleep=bool(actor))
        self._link: WeightReceiver | None = None
        if source is not None:
            self._link = WeightReceiver(source, context.rank, device, self.engine.weight_dtype)

    @register(dispatch=data_parallel)
    def generate(self, tasks: Sequence[RolloutTask], sampling: SamplingParams) -> list[tuple[Trajectory, ...]]:
        """One group of `sampling.n` trajectories a task."""
        total = len(tasks) * sampling.n
        with self._weights(), self._cache(), progress("generating", total=total) as bar:
            return answer_prompts(self.engine, self._decode, tasks, sampling, on_finished=bar.advance)

    @register(dispatch=all_ranks, blocking=False)
    def sync_weights(self, version: int) -> None:
        """Take the actor's weights as policy `version`."""
        if self._link is not None:
            self.engine.load_weights(self._link.receive(version), version)
            check_arrival(self._link.fingerprints, self.engine, version)
            return
        with self._actor_engine.resident():
            sync_weights(self._actor_engine, self.engine, version=version, shared=self._shares_weights)

    @contextmanager
    def _cache(self) -> Iterator[None]:
        """A key-value cache; where the device also trains, for as long as it generates and no longer."""
        self.engine.wake()
        yield  # not in a `try`: an engine cut off while it generates cannot sleep, which would hide what happened
        if self._link is None:
            self.engine.sleep()

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """The weights on the device; those that have been away are taken anew."""
        engine = self._actor_engine
        if not self._shares_weights:
            if self.engine.needs_weights:
                with engine.resident():
                    sync_weights(engine, self.engine, version=self.engine.policy_version, shared=False)
            yield
            return
        has_moved = engine.parameters_are_away
        with engine.resident():
            if has_moved:
                self.engine.load_weights((), self.engine.policy_version)
            yield

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)
