"""How many processes a run gets, and what cannot be."""

import pytest
import torch

from verl.config import load_config
from verl.errors import ConfigError
from verl.trainer import roles


def config(device: str = "cuda", **parallel):
    overrides = [f"parallel.{key}={value}" for key, value in parallel.items()]
    base = ["model.path=m", "data.train_files=t.parquet", "training.eval_interval=0", "training.runtime=ray"]
    return load_config(None, [*base, f"training.device={device}", *overrides], printer=[].append)


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    monkeypatch.setattr(roles, "resolve_device", torch.device)
    monkeypatch.setattr(roles, "_gpus_here", lambda: 8)


@pytest.mark.parametrize(
    "parallel, ranks",
    [
        ({}, 8),
        ({"n_gpus_per_node": 4}, 4),
        ({"nnodes": 2}, 16),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8),
        ({"tensor_model_parallel_size": 2, "data_parallel_size": 4}, 8),
        ({"rollout_devices": 2}, 6),
        ({"nnodes": 2, "rollout_devices": 4, "tensor_model_parallel_size": 4, "data_parallel_size": 3}, 12),
    ],
)
def test_ranks_on_gpus(parallel, ranks):
    assert roles.count_ranks(config(**parallel)) == ranks
    pool = roles.rollout_pool(config(**parallel))
    assert (0 if pool is None else pool.num_workers) == parallel.get("rollout_devices", 0)


@pytest.mark.parametrize(
    "parallel, ranks",
    [
        ({}, 1),
        ({"data_parallel_size": 2, "tensor_model_parallel_size": 2}, 4),
        ({"rollout_devices": 2}, 1),
    ],
)
def test_ranks_on_cpus(parallel, ranks):
    assert roles.count_ranks(config("cpu", **parallel)) == ranks


@pytest.mark.parametrize(
    "parallel, arithmetic",
    [
        ({"data_parallel_size": 3}, "= 3 x 1 does not give nnodes x n_gpus_per_node = 1 x 8 = 8 devices"),
        ({"tensor_model_parallel_size": 3}, "= data x 3 does not give nnodes x n_gpus_per_node = 1 x 8 = 8 devices"),
        (
            {"nnodes": 2, "n_gpus_per_node": 4, "data_parallel_size": 2, "pipeline_model_parallel_size": 2},
            "= 2 x 2 does not give nnodes x n_gpus_per_node = 2 x 4 = 8 devices",
        ),
        (
            {"rollout_devices": 2, "data_parallel_size": 8},
            "= 8 x 1 does not give nnodes x n_gpus_per_node - rollout_devices = 1 x 8 - 2 = 6 devices",
        ),
        ({"rollout_devices": 8}, "parallel.rollout_devices=8 of 8 devices (nnodes x n_gpus_per_node) leaves none to train on"),
    ],
)
def test_impossible_products_show_the_arithmetic(parallel, arithmetic):
    with pytest.raises(ConfigError) as error:
        roles.count_ranks(config(**parallel))
    assert arithmetic in str(error.value)


def test_several_processes_need_ray():
    given = ["model.path=m", "data.train_files=t", "training.eval_interval=0", "training.runtime=local"]
    with pytest.raises(ConfigError, match=r"parallel asks for 3 processes, and training\.runtime=local is one"):
        load_config(None, [*given, "parallel.rollout_devices=2"], printer=[].append)
