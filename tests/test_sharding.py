"""A model in slices: the same losses, gradients and weights as whole, sizes that do not divide, weights put together again."""

import os

import pytest
import torch
from models import save_tiny_model

from verl.algorithms.losses import SFTLoss
from verl.config.schema import ModelConfig, OptimizerConfig
from verl.controller import ResourcePool, Worker, WorkerSpec, all_ranks, data_parallel, one_to_all, register
from verl.data.batch import TokenBatch
from verl.engines.hybrid import fingerprint, whole_weights
from verl.engines.train.fsdp import FSDPEngine

pytestmark = pytest.mark.xdist_group("ray")

ODD = {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 101, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Sizes that no number of ranks divides."""


class EngineWorker(Worker):
    def __init__(self, context, *, folder, head="lm", fsdp_size=None):
        super().__init__(context)
        self.engine = FSDPEngine(
            ModelConfig(path=folder),
            head=head,
            optimizer=OptimizerConfig(lr=1e-2),
            max_tokens_per_micro_batch=24,
            device="cpu",
            fsdp_size=fsdp_size,
        )

    @register(dispatch=data_parallel)
    def update(self, batch, loss, count):
        return self.engine.forward_backward(batch, loss, count=count) | self.engine.optimizer_step()

    @register(dispatch=data_parallel)
    def logprobs(self, batch):
        return self.engine.compute(batch).logprobs

    @register(dispatch=one_to_all)
    def weights(self, bucket_bytes):
        whole = whole_weights(self.engine.named_weights(), torch.float32, bucket_bytes)
        return {name: tensor.numpy().copy() for name, tensor in whole}

    @register(dispatch=all_ranks)
    def export(self, folder):
        self.engine.export(folder)


def batch(lengths):
    generator = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    tokens = int(cu[-1])
    return TokenBatch(cu, input_ids=torch.randint(3, 100, (tokens,), generator=generator), loss_mask=torch.arange(tokens) % 3 > 0)


@pytest.fixture(scope="module")
def runtime():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    from verl.controller.ray import RayRuntime

    yield RayRuntime(timeout_s=60)
    ray.shutdown()


@pytest.mark.parametrize(("ranks", "fsdp_size", "family"), [(3, None, "qwen3"), (4, 2, "gemma2"), (2, None, "llama")])
def test_slices_train_like_the_whole(ranks, fsdp_size, family, runtime, tmp_path):
    folder = str(save_tiny_model(tmp_path / "model", family, tokenizer=True, **ODD))
    whole = EngineWorker.__new__(EngineWorker)
    whole.engine = FSDPEngine(
        ModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-2), max_tokens_per_micro_batch=24, device="cpu"
    )
    spec = WorkerSpec(EngineWorker, {"folder": folder, "fsdp_size": fsdp_size})
    group = runtime.spawn(ResourcePool(num_workers=ranks), {"e": spec})["e"]
    loss = SFTLoss()
    # Many micro-batches on some ranks and few on others; fewer sequences than ranks; nothing to train on.
    for lengths in ([20, 5, 5, 17, 9, 3, 22, 8], [7], [2, 2]):
        given = batch(lengths)
        mine = EngineWorker.update(whole, given, loss, loss.count(given))
        theirs = group.update(given, loss, loss.count(given))
        assert theirs["sft/loss"].value == pytest.approx(mine["sft/loss"].value, rel=1e-5)
        assert theirs["grad_norm"].value == pytest.approx(mine["grad_norm"].value, rel=1e-4)
    given = batch([9, 4, 12])
    assert torch.allclose(group.logprobs(given), EngineWorker.logprobs(whole, given), atol=2e-4)
    expected = {name: tensor for name, tensor in whole.engine.named_weights()}
    for bucket_bytes in (1, 4000, 2**30):
        for weights in group.weights(bucket_bytes):  # every rank has all of them, whole
            assert weights.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.allclose(torch.from_numpy(weights[name]), tensor, atol=2e-4), name
    runtime.shutdown()


def test_gathered_and_exported_weights_are_exact(runtime, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = str(save_tiny_model(tmp_path / "model", "qwen3", tokenizer=True, **ODD))
    group = runtime.spawn(ResourcePool(num_workers=4), {"e": WorkerSpec(EngineWorker, {"folder": folder})})["e"]
    group.export(tmp_path / "out")
    source, exported = (dict(AutoModelForCausalLM.from_pretrained(f).named_parameters()) for f in (folder, tmp_path / "out"))
    gathered = group.weights(5000)[0]
    for name, tensor in source.items():
        assert torch.equal(tensor, exported[name]) and torch.equal(tensor, torch.from_numpy(gathered[name])), name
    runtime.shutdown()


def test_fingerprints_tell_tensors_apart():
    x = torch.randn(7, 5)
    assert int(fingerprint(x)) == int(fingerprint(x.clone()))
    swapped = x.clone()
    swapped[[0, 1]] = x[[1, 0]]
    zeroed = x.clone()
    zeroed[3, 3] = 0
    seen = {int(fingerprint(t)) for t in (x, x.t().contiguous(), swapped, zeroed, torch.nextafter(x, x + 1), torch.zeros(7, 5))}
    assert len(seen) == 6
    assert int(fingerprint(x.bfloat16())) == int(fingerprint(x.bfloat16().clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["never", "always"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offloading_changes_nothing(sharding, dtype, tmp_path):
    import torch.distributed as dist

    if sharding == "always" and not dist.is_initialized():
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1"})
        dist.init_process_group("cpu:gloo,cuda:nccl")
    folder = str(save_tiny_model(tmp_path / "model", "qwen3", tokenizer=True))
    engines = [
        FSDPEngine(
            ModelConfig(path=folder, dtype=dtype),
            optimizer=OptimizerConfig(lr=1e-2),
            device="cuda",
            sharding=sharding,
            param_offload=offload,
            optimizer_offload=offload,
        )
        for offload in (False, True)
    ]
    loss, given = SFTLoss(), batch([20, 5, 17, 9])
    for _ in range(3):
        results = []
        for engine in engines:
            with engine.resident():
                metrics = engine.forward_backward(given, loss)
                with engine.resident(optimizer=True):
                    metrics |= engine.optimizer_step()
                results.append((metrics["sft/loss"].value, metrics["grad_norm"].value, engine.compute(given).logprobs))
        assert results[0][:2] == results[1][:2] and torch.equal(results[0][2], results[1][2])
    assert all(p.device.type == "cpu" for p in engines[1].module.parameters())
    for engine in engines:
        with engine.resident(optimizer=True):
            engine.save(tmp_path / "saved")
            engine.load(tmp_path / "saved")
