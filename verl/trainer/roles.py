"""Which workers a run needs, on how many ranks, and what carries them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from verl.algorithms.spec import Algorithm
from verl.config.checks import processes_asked_for, replica_size
from verl.config.schema import Config
from verl.controller import LocalRuntime, ResourcePool, Runtime, WorkerGroup, WorkerSpec, wait_for
from verl.engines.train.loading import resolve_device
from verl.errors import ConfigError


def spawn_workers(config: Config, algorithm: Algorithm, total_steps: int, runtime: Runtime) -> dict[str, WorkerGroup]:
    """The groups actor, critic and reference (as the algorithm needs them) and rollout: colocated on one pool, or the last
    on a pool of its own."""
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
    generators = rollout_pool(config)
    if generators is None:
        roles["rollout"] = WorkerSpec(RolloutWorker, {"config": config})
        return runtime.spawn(resource_pool(config), roles)
    groups = runtime.spawn(resource_pool(config), roles)
    source = groups["actor"].open_link(generators.num_workers, config.training.worker_timeout_s)
    return groups | runtime.spawn(generators, {"rollout": WorkerSpec(RolloutWorker, {"config": config, "source": source})})


def sync_weights(config: Config, actor: WorkerGroup, rollout: WorkerGroup, version: int) -> None:
    """Give the generator the actor's weights, as policy `version`."""
    if config.parallel.rollout_devices is None:
        wait_for(rollout.sync_weights(version))
    else:
        wait_for(actor.send_weights(version), rollout.sync_weights(version))


def start_runtime(config: Config) -> Runtime:
    """What `training.runtime` names; a Ray cluster is joined or started."""
    if not _uses_ray(config):
        return LocalRuntime()
    from verl.controller.ray import RayRuntime

    ranks = count_ranks(config) + (config.parallel.rollout_devices or 0)
    return RayRuntime(timeout_s=config.training.worker_timeout_s, num_cpus=max(count_cpus(), ranks))


@contextmanager
def closing_runtime(runtime: Runtime) -> Iterator[None]:
    """End the workers of a run with it: those of a cluster would go on holding their devices."""
    try:
        yield
    finally:
        runtime.shutdown()


def resource_pool(config: Config) -> ResourcePool:
    """The pool that all roles of a run share, or with parallel.rollout_devices all that do not generate."""
    return ResourcePool(num_workers=count_ranks(config), device=str(resolve_device(config.training.device)))


def rollout_pool(config: Config) -> ResourcePool | None:
    """The pool that only generates, if there is one."""
    if config.parallel.rollout_devices is None:
        return None
    device = str(resolve_device(config.training.device))
    return ResourcePool(name="rollout", num_workers=config.parallel.rollout_devices, device=device)


def count_ranks(config: Config) -> int:
    """Processes of the run that train: the devices named or found, less those that only generate, or on CPUs the product of
    the parallel sizes.

    Raises:
        ConfigError: the sizes do not multiply to the devices, with the arithmetic.
    """
    parallel = config.parallel
    if not _uses_ray(config):
        return 1
    data, replica = parallel.data_parallel_size, replica_size(config)
    if resolve_device(config.training.device).type == "cpu":
        for name, value, unset in (("n_gpus_per_node", parallel.n_gpus_per_node, None), ("nnodes", parallel.nnodes, 1)):
            if value != unset:
                raise ConfigError(
                    f"parallel.{name}={value}, but this runs on CPUs: there parallel.data_parallel_size gives the number "
                    "of processes"
                )
        return (data or 1) * replica
    all_devices, generators = parallel.nnodes * (parallel.n_gpus_per_node or _gpus_here()), parallel.rollout_devices or 0
    devices = all_devices - generators
    if devices < 1:
        raise ConfigError(
            f"parallel.rollout_devices={generators} of {all_devices} devices (nnodes x n_gpus_per_node) leaves none to train on; "
            "lower it"
        )
    if data is None and devices % replica == 0:
        return devices
    if data is None or data * replica != devices:
        product = f"{data if data is not None else 'data'} x {replica}"
        raise ConfigError(
            f"parallel: data_parallel_size x (tensor_model_parallel_size x pipeline_model_parallel_size x "
            f"sequence_parallel_size) = {product} does not give nnodes x n_gpus_per_node"
            f"{' - rollout_devices' if generators else ''} = {parallel.nnodes} x {all_devices // parallel.nnodes}"
            f"{f' - {generators}' if generators else ''} = {devices} devices"
        )
    return devices


def check_layout(config: Config) -> None:
    """Before any process is started: can the run's models be spread over its ranks? Of a model its config.json is read.

    Raises:
        ConfigError: the parallel sizes do not multiply to the devices, or do not divide a model.
    """
    from verl.engines.train.loading import read_config
    from verl.engines.train.pipeline import StagePlan
    from verl.engines.train.tensor_parallel import check_divisible
    from verl.workers.model import parallelism

    parallel = parallelism(config)
    parallel.layout(count_ranks(config))
    if parallel.replica_size == 1:
        return
    critic = config.critic.path if config.algorithm.adv_estimator == "gae" else None
    for path in {config.model.path, critic or config.model.path}:
        body = read_config(replace(config.model, path=path)).get_text_config()
        check_divisible(body, tensor=parallel.tensor, sequence=parallel.sequence)
        StagePlan.even(body.num_hidden_layers, parallel.pipeline)


def _uses_ray(config: Config) -> bool:
    runtime = config.training.runtime
    return runtime == "ray" or (runtime == "auto" and processes_asked_for(config) > 1)


def count_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
