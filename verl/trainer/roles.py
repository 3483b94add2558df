"""Which workers a run needs and where they live."""

from __future__ import annotations

from verl.algorithms.spec import Algorithm
from verl.config.schema import Config
from verl.controller import LocalRuntime, ResourcePool, WorkerGroup, WorkerSpec
from verl.engines.train.loading import resolve_device


def spawn_workers(config: Config, algorithm: Algorithm, total_steps: int) -> dict[str, WorkerGroup]:
    """The groups actor, critic and reference (as the algorithm needs them) and rollout, colocated on one pool."""
    from verl.workers.model import ActorWorker, CriticWorker, ReferenceWorker
    from verl.workers.rollout import RolloutWorker

    prompts = config.data.train_batch_size
    actor_updates = total_steps * algorithm.actor_updates.updates_per_step(prompts)
    roles = {"actor": WorkerSpec(ActorWorker, {"config": config, "total_updates": actor_updates})}
    if algorithm.uses_reference:
        roles["reference"] = WorkerSpec(ReferenceWorker, {"config": config})
    if algorithm.uses_critic:
        critic_updates = total_steps * algorithm.critic_updates.updates_per_step(prompts)
        roles["critic"] = WorkerSpec(CriticWorker, {"config": config, "total_updates": critic_updates})
    roles["rollout"] = WorkerSpec(RolloutWorker, {"config": config})
    return LocalRuntime().spawn(ResourcePool(device=str(resolve_device(config.training.device))), roles)
