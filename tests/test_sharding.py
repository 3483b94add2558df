"""A model in slices: the same losses, gradients and weights as whole, sizes that do not divide, weights put together again."""

import functools
import os
from pathlib import Path

import pytest
import torch
from models import save_tiny_model
from safetensors.torch import save_file

from verl.algorithms.losses import SFTLoss, ValueLoss
from verl.config.schema import ModelConfig, OptimizerConfig
from verl.controller import DispatchPlan, ResourcePool, Worker, WorkerSpec, all_ranks, data_parallel, one_to_all, register
from verl.data.batch import TokenBatch
from verl.engines.hybrid import fingerprint
from verl.engines.train.fsdp import FSDPEngine
from verl.engines.train.gathering import whole_weights
from verl.engines.train.mesh import Parallelism
from verl.engines.train.sharding import like
from verl.errors import ConfigError

pytestmark = pytest.mark.xdist_group("ray")

ODD = {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 101, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Sizes that no number of ranks divides."""


def gathered(layout, args, kwargs):
    """As data_parallel, with the dicts of all ranks as one."""
    plan = data_parallel(layout, args, kwargs)
    return DispatchPlan(plan.calls, lambda results: {name: x for rank in results.values() for name, x in rank.items()})


class EngineWorker(Worker):
    """Holds one engine after the other: a process takes seconds to start."""

    @register(dispatch=all_ranks)
    def build(self, folder, parallelism=None, head="lm", checkpointing=False):
        self.engine = FSDPEngine(
            ModelConfig(path=folder),
            head=head,
            optimizer=OptimizerConfig(lr=1e-2),
            max_tokens_per_micro_batch=24,
            device="cpu",
            parallelism=parallelism,
            gradient_checkpointing=checkpointing,
        )

    @register(dispatch=data_parallel)
    def update(self, batch, loss, count):
        return self.engine.forward_backward(batch, loss, count=count) | self.engine.optimizer_step()

    @register(dispatch=gathered)
    def gradients(self, batch, loss, count):
        """Name -> whole gradient, of the parameters on this rank's stage."""
        self.engine.forward_backward(batch, loss, count=count)
        optimizer = self.engine.optimizer
        optimizer._take_gradients()
        masters = optimizer.masters.items()
        sliced = [(name, like(master.grad, optimizer._parameters[name])) for name, master in masters]
        whole = {name: gradient.numpy().copy() for name, gradient in whole_weights(sliced, torch.float32)}
        optimizer._adam.zero_grad()
        return whole

    @register(dispatch=data_parallel)
    def logprobs(self, batch):
        return self.engine.compute(batch).logprobs

    @register(dispatch=data_parallel)
    def outputs(self, batch):
        return self.engine.compute(batch, entropy=self.engine.head == "lm", all_tokens=True)

    @register(dispatch=one_to_all)
    def weights(self, bucket_bytes):
        return {n: t.numpy().copy() for n, t in self.engine.whole_weights(torch.float32, bucket_bytes)}

    @register(dispatch=all_ranks)
    def save(self, folder):
        self.engine.save(folder)

    @register(dispatch=all_ranks)
    def load(self, folder):
        self.engine.load(folder)

    @register(dispatch=all_ranks)
    def export(self, folder):
        self.engine.export(folder)


def batch(lengths):
    generator = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    tokens = int(cu[-1])
    return TokenBatch(cu, input_ids=torch.randint(3, 100, (tokens,), generator=generator), loss_mask=torch.arange(tokens) % 3 > 0)


@pytest.fixture(scope="module")
def groups():
    """Number of ranks -> a group of that many, each started once."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=9, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    from verl.controller.ray import RayRuntime

    with RayRuntime(timeout_s=60) as runtime:
        made = functools.cache(lambda ranks: runtime.spawn(ResourcePool(num_workers=ranks), {"e": WorkerSpec(EngineWorker)})["e"])
        yield made
    ray.shutdown()


WAYS = {
    "slices of 3": (3, Parallelism(), "qwen3", ODD),
    "hsdp": (4, Parallelism(fsdp_size=2), "gemma2", ODD),
    "slices of 2": (2, Parallelism(), "llama", ODD),
    "tensor 2": (2, Parallelism(tensor=2), "qwen3", {}),
    "tensor 2, biases": (2, Parallelism(tensor=2), "llama", {"attention_bias": True, "mlp_bias": True}),
    "tensor 2, slices": (4, Parallelism(tensor=2), "gemma3", {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 101}),
    "stages 2": (2, Parallelism(pipeline=2), "qwen3", {"num_hidden_layers": 3}),
    "stages 3": (3, Parallelism(pipeline=3), "gemma2", {"num_hidden_layers": 4}),
    "stages 2, slices": (4, Parallelism(pipeline=2), "qwen2", {"hidden_size": 40, "vocab_size": 101}),
    "sequence 2": (2, Parallelism(sequence=2), "smollm3", {}),
    "sequence 4, few heads": (4, Parallelism(sequence=4), "gemma2", {}),
    "sequence 2, tensor 2": (4, Parallelism(sequence=2, tensor=2), "qwen3", {}),
    "stages 2, tensor 2": (4, Parallelism(pipeline=2, tensor=2), "gemma", {}),
    "stages 2, sequence 2": (4, Parallelism(pipeline=2, sequence=2), "mistral", {}),
}
"""Ranks, how they share the model, its family and sizes."""


def built(groups, ranks, folder, parallelism, **options):
    """A group of ranks that share an engine."""
    group = groups(ranks)
    group.layout = parallelism.layout(ranks)
    group.build(folder, parallelism, **options)
    return group


def engines(groups, folder, way, **options):
    """The engine in one piece, and a group of ranks that share it."""
    ranks, parallelism, _, _ = WAYS[way]
    whole = EngineWorker(None)
    EngineWorker.build(whole, folder, **options)
    return whole, built(groups, ranks, folder, parallelism, **options)


def assert_gradients_alike(group, whole, given, loss):
    mine = EngineWorker.gradients(whole, given, loss, loss.count(given))
    theirs = group.gradients(given, loss, loss.count(given))
    assert theirs.keys() == mine.keys()
    for name, gradient in mine.items():
        assert abs(theirs[name] - gradient).max() < 1e-5 * abs(gradient).max(), name


@pytest.mark.parametrize("way", WAYS)
def test_parts_train_like_the_whole(way, groups, tmp_path):
    _, _, family, sizes = WAYS[way]
    folder = str(save_tiny_model(tmp_path / "model", family, tokenizer=True, **sizes))
    whole, group = engines(groups, folder, way)
    loss = SFTLoss()
    assert_gradients_alike(group, whole, batch([20, 5, 5, 17, 9, 3, 22, 8]), loss)
    # Many micro-batches on some ranks and few on others; fewer sequences than ranks; nothing to train on.
    for lengths in ([20, 5, 5, 17, 9, 3, 22, 8], [7], [2, 2]):
        given = batch(lengths)
        mine = EngineWorker.update(whole, given, loss, loss.count(given))
        theirs = group.update(given, loss, loss.count(given))
        assert theirs["sft/loss"].value == pytest.approx(mine["sft/loss"].value, rel=1e-5)
        assert theirs["grad_norm"].value == pytest.approx(mine["grad_norm"].value, rel=1e-4)
    given = batch([9, 4, 12])
    assert torch.allclose(group.logprobs(given), EngineWorker.logprobs(whole, given), atol=2e-4)
    mine, theirs = EngineWorker.outputs(whole, given), group.outputs(given)
    assert torch.allclose(theirs.logprobs, mine.logprobs, atol=2e-4)
    assert torch.allclose(theirs.entropy, mine.entropy, atol=2e-4)
    expected = {name: tensor for name, tensor in whole.engine.named_weights()}
    for bucket_bytes in (1, 4000, 2**30):
        for weights in group.weights(bucket_bytes):  # every rank has all of them, whole
            assert weights.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.allclose(torch.from_numpy(weights[name]), tensor, atol=2e-4), name


@pytest.mark.parametrize("way", ["hsdp", "tensor 2, slices", "stages 2, tensor 2", "sequence 2, tensor 2"])
def test_gathered_and_exported_weights_are_exact(way, groups, tmp_path):
    from transformers import AutoModelForCausalLM

    _, _, family, sizes = WAYS[way]
    folder = str(save_tiny_model(tmp_path / "model", family, tokenizer=True, **sizes))
    _, group = engines(groups, folder, way)
    group.export(tmp_path / "out")
    source, exported = (dict(AutoModelForCausalLM.from_pretrained(f).named_parameters()) for f in (folder, tmp_path / "out"))
    gathered = group.weights(5000)[0]
    for name, tensor in source.items():
        assert torch.equal(tensor, exported[name]) and torch.equal(tensor, torch.from_numpy(gathered[name])), name


def test_a_checkpoint_goes_from_any_layout_to_any_other(groups, tmp_path):
    folder = str(save_tiny_model(tmp_path / "model", "qwen3", tokenizer=True, num_hidden_layers=3, intermediate_size=50))
    loss, given = SFTLoss(), batch([20, 5, 5, 17, 9])
    before, after = None, None
    for ranks, parallelism in (
        (4, Parallelism()),
        (4, Parallelism(tensor=2)),
        (2, Parallelism(tensor=2)),
        (4, Parallelism(pipeline=2, tensor=2)),
        (3, Parallelism(pipeline=3)),
        (2, Parallelism(sequence=2)),
        (4, Parallelism(tensor=2, fsdp_size=1)),
    ):
        group = built(groups, ranks, folder, parallelism)
        if before is None:
            group.update(given, loss, loss.count(given))  # so that there are moments
            group.save(tmp_path / "saved")
            before = group.weights(1000)[0]
            group.update(given, loss, loss.count(given))
            after = group.weights(1000)[0]
        else:
            group.load(tmp_path / "saved")
            for name, weights in group.weights(1000)[0].items():
                assert (weights == before[name]).all(), (parallelism, name)
            group.save(tmp_path / "saved")  # the next layout reads what this one wrote
            group.update(given, loss, loss.count(given))
            for name, weights in group.weights(1000)[0].items():
                assert weights == pytest.approx(after[name], abs=3e-4), (parallelism, name)


@pytest.mark.parametrize("way", ["tensor 2", "stages 2", "sequence 2", "slices of 3"])
def test_a_critic_with_checkpointing_trains_alike_in_parts(way, groups, tmp_path):
    _, _, family, sizes = WAYS[way]
    folder = str(save_tiny_model(tmp_path / "model", family, tokenizer=True, **sizes))
    generator = torch.Generator().manual_seed(0)
    width = sizes.get("hidden_size", 32)
    head = {"weight": torch.randn(1, width, generator=generator), "bias": torch.randn(1, generator=generator)}
    save_file(head, Path(folder) / "value_head.safetensors")
    whole, group = engines(groups, folder, way, head="value", checkpointing=True)
    given = batch([20, 5, 5, 17, 9])
    given = given.with_columns(returns=torch.linspace(-1, 1, given.num_tokens), values=torch.zeros(given.num_tokens))
    assert_gradients_alike(group, whole, given, ValueLoss(value_clip=None))
    assert torch.allclose(group.outputs(given).values, EngineWorker.outputs(whole, given).values, atol=1e-4)


@pytest.mark.parametrize(
    ("parallelism", "ranks", "named"),
    [
        (Parallelism(tensor=3), 3, "tensor_model_parallel_size=3 does not divide the model's num_attention_heads=4"),
        (Parallelism(pipeline=3), 3, "pipeline_model_parallel_size=3: the model has only 2 layers"),
        (Parallelism(sequence=3), 3, "sequence_parallel_size=3 does not fit 4 query and 2 key-value heads"),
        (Parallelism(fsdp_size=2), 3, "fsdp_size=2 does not divide the 3 ranks; use one of 1, 3"),
        (Parallelism(fsdp_size=4), 2, "fsdp_size=4 does not divide the 2 ranks; use one of 1, 2"),
        (Parallelism(tensor=2), 3, "tensor 2 x pipeline 1 x sequence 1 = 2 ranks a replica do not divide 3 ranks"),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused(parallelism, ranks, named, groups, tmp_path):
    folder = str(save_tiny_model(tmp_path / "model", "qwen3", tokenizer=True))
    with pytest.raises(ConfigError, match=named):
        built(groups, ranks, folder, parallelism)


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
