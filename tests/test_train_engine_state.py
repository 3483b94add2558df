"""FSDPEngine's optimizer, mixed precision, checkpoints, exports, and the errors of bad models."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from models import FAMILIES, save_tiny_model
from safetensors.torch import load_file, save_file
from test_train_engine import TokenLoss, ValueLoss, make_batch, make_engine
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from verl.checkpoint.tensors import read_tensors
from verl.config.schema import ModelConfig, OptimizerConfig
from verl.engines.train.attention import ATTENTION_NAME
from verl.engines.train.fsdp import FSDPEngine
from verl.engines.train.loading import VALUE_HEAD_FILE, check_model_folder, resolve_device, resolve_dtype
from verl.engines.train.optimizer import MasterAdamW, lr_at
from verl.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


def test_what_is_written_in_the_background_is_the_state_at_the_call(folder, tmp_path):
    engine = make_engine(folder, optimizer=OptimizerConfig(lr=1e-2))
    train(engine, 2)
    engine.save(tmp_path / "now")
    engine.export(tmp_path / "model_now")
    writes = [engine.saving(tmp_path / "later", background=True), engine.exporting(tmp_path / "model_later", background=True)]
    train(engine, 2)
    for write in writes:
        write()
    now, later = (read_tensors(tmp_path / name) for name in ("now", "later"))
    assert_equal_weights(later, now)
    assert (tmp_path / "later" / "engine.json").read_text() == (tmp_path / "now" / "engine.json").read_text()
    exported = [load_file(tmp_path / name / "model.safetensors") for name in ("model_now", "model_later")]
    assert_equal_weights(exported[1], exported[0])


def adamw(values: dict[str, list], config: OptimizerConfig, dtype=torch.float32) -> tuple[MasterAdamW, dict[str, nn.Parameter]]:
    parameters = {name: nn.Parameter(torch.tensor(v)) for name, v in values.items()}
    return MasterAdamW(parameters, config, total_steps=None, compute_dtype=dtype), parameters


def train(engine: FSDPEngine, steps: int, loss=None) -> list[float]:
    norms = []
    for step in range(steps):
        engine.forward_backward(make_batch(seed=step), loss or TokenLoss())
        norms.append(engine.optimizer_step()["grad_norm"].value)
    return norms


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def assert_equal_weights(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(actual[n], expected[n])] == []


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # lr 0.8, two warm-up steps, ten in all, floor a quarter: the decay starts at step 2 and lasts 8 steps.
        ("constant", {0: 0.4, 1: 0.8, 2: 0.8, 6: 0.8, 10: 0.8, 50: 0.8}),
        ("linear", {0: 0.4, 1: 0.8, 2: 0.8, 4: 0.65, 6: 0.5, 10: 0.2, 50: 0.2}),
        ("cosine", {0: 0.4, 1: 0.8, 2: 0.8, 4: 0.2 + 0.3 * (1 + math.sqrt(0.5)), 6: 0.5, 10: 0.2, 50: 0.2}),
    ],
)
def test_learning_rate_schedule(schedule, expected):
    config = OptimizerConfig(lr=0.8, lr_schedule=schedule, lr_warmup_steps=2, min_lr_ratio=0.25)
    assert {step: pytest.approx(lr_at(step, config, 10)) for step in expected} == expected


def test_the_engine_follows_the_schedule(folder):
    engine = make_engine(folder, optimizer=OptimizerConfig(lr=1.0, lr_schedule="linear"), total_steps=4)
    rates = []
    for _ in range(3):
        engine.forward_backward(make_batch(), TokenLoss())
        rates.append(engine.optimizer_step()["lr"].value)
    assert rates == [1.0, 0.75, 0.5]


def test_first_adam_step_and_clipping_by_hand():
    # Gradient (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8). Adam's first step moves each weight by
    # lr * g / (|g| + eps); with eps = 0.2 that is lr * (0.75, 0.8). Unclipped it would be lr * (3/3.2, 4/4.2).
    config = OptimizerConfig(lr=0.1, eps=0.2, weight_decay=0.0, gradient_clip=1.0)
    optimizer, parameters = adamw({"w": [[1.0, 1.0]]}, config)
    parameters["w"].grad = torch.tensor([[3.0, 4.0]])
    metrics = optimizer.step()
    assert metrics["grad_norm"].value == pytest.approx(5.0)
    assert parameters["w"].tolist()[0] == pytest.approx([0.925, 0.92])
    assert parameters["w"].grad is None


@pytest.mark.parametrize("clip", [0.0, 10.0])
def test_no_clipping_below_the_limit_or_when_off(clip):
    optimizer, parameters = adamw({"w": [[1.0, 1.0]]}, OptimizerConfig(lr=0.1, eps=0.2, weight_decay=0.0, gradient_clip=clip))
    parameters["w"].grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    assert parameters["w"].tolist()[0] == pytest.approx([1 - 0.1 * 3 / 3.2, 1 - 0.1 * 4 / 4.2])


def test_weight_decay_spares_vectors():
    optimizer, parameters = adamw({"matrix": [[2.0]], "norm": [2.0]}, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameters["matrix"].item() == pytest.approx(2 * (1 - 0.1 * 0.5))
    assert parameters["norm"].item() == 2.0


def test_five_steps_match_torch_adamw():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 7, generator=generator)
    config = OptimizerConfig(lr=3e-2, weight_decay=0.1, beta1=0.8, beta2=0.95, gradient_clip=1.0)
    optimizer, parameters = adamw({"w": start.tolist()}, config)
    reference = nn.Parameter(start.clone())
    reference_optimizer = torch.optim.AdamW([reference], lr=3e-2, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for _ in range(5):
        gradient = torch.randn(5, 7, generator=generator)
        parameters["w"].grad, reference.grad = gradient.clone(), gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([reference], 1.0)
        assert optimizer.step()["grad_norm"].value == pytest.approx(float(norm), rel=1e-6)
        reference_optimizer.step()
    torch.testing.assert_close(parameters["w"], reference, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_gradients_skip_the_step(bad, dtype):
    optimizer, parameters = adamw({"a": [[1.0]], "b": [2.0]}, OptimizerConfig(lr=0.1), dtype)
    (parameters["a"].sum() * bad + parameters["b"].sum()).backward()
    before = {k: v.clone() for k, v in optimizer.state().items()}
    metrics = optimizer.step()
    assert metrics["skipped_steps"].value == 1
    assert "grad_norm" not in metrics
    assert (parameters["a"].item(), parameters["b"].item()) == (1.0, 2.0)
    assert optimizer.state().keys() == before.keys()
    assert all(m.grad is None for m in optimizer.masters.values())
    (parameters["a"].sum() + parameters["b"].sum()).backward()
    assert optimizer.step()["skipped_steps"].value == 0
    assert parameters["a"].item() < 1.0
    assert optimizer.num_steps == 2


def test_bfloat16_masters_keep_updates_that_rounding_would_lose():
    # bfloat16 has a spacing of 2**-7 above 1 (and 2**-8 below): a step of 1e-3 alone rounds back to 1.
    optimizer, parameters = adamw({"w": [[1.0]]}, OptimizerConfig(lr=1e-3, weight_decay=0.0), torch.bfloat16)
    seen = []
    for _ in range(8):
        parameters["w"].float().sum().backward()
        assert parameters["w"].grad is None  # it went to the master, in float32
        optimizer.step()
        seen.append(parameters["w"].item())
    assert seen[0] == 1.0
    assert optimizer.masters["w"].item() == pytest.approx(1 - 8e-3, rel=1e-4)
    assert parameters["w"].item() == 1 - 2**-7


def test_bfloat16_gradients_accumulate_in_float32():
    # In bfloat16, 1 + 2**-9 eight times over would stay at 1.
    optimizer, parameters = adamw({"w": [[1.0]]}, OptimizerConfig(), torch.bfloat16)
    for factor in [1.0] + [2.0**-9] * 8:
        (parameters["w"] * factor).sum().backward()
    optimizer._take_gradients()
    assert optimizer.masters["w"].grad.item() == 1 + 8 * 2**-9


def test_bfloat16_engine_trains_and_stays_near_float32(folder):
    half = FSDPEngine(ModelConfig(path=str(folder), dtype="bfloat16"), optimizer=OptimizerConfig(lr=1e-3), device="cpu")
    full = make_engine(folder, optimizer=OptimizerConfig(lr=1e-3))
    assert {p.dtype for p in half.module.parameters()} == {torch.bfloat16}
    assert {m.dtype for m in half.optimizer.masters.values()} == {torch.float32}
    # Rotary frequencies are buffers and must not be rounded with the parameters.
    assert {b.dtype for b in half.module.buffers()} == {torch.float32}
    assert_equal_weights(dict(half.optimizer.masters), dict(full.optimizer.masters))
    batch = make_batch()
    difference = (half.compute(batch).logprobs - full.compute(batch).logprobs).abs()[batch.loss_mask]
    assert 0 < difference.mean() < 0.3
    before = {n: m.clone() for n, m in half.optimizer.masters.items()}
    half.forward_backward(batch, TokenLoss())
    assert half.optimizer_step()["skipped_steps"].value == 0
    assert all(not torch.equal(before[n], m) for n, m in half.optimizer.masters.items())
    assert_equal_weights(weights(half), {n: m.bfloat16() for n, m in half.optimizer.masters.items()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_resume_is_bitwise(folder, tmp_path, head, dtype):
    loss = TokenLoss() if head == "lm" else ValueLoss()

    def build() -> FSDPEngine:
        optimizer = OptimizerConfig(lr=1e-2, lr_schedule="cosine", lr_warmup_steps=2)
        return FSDPEngine(ModelConfig(path=str(folder), dtype=dtype), head=head, optimizer=optimizer, total_steps=8, device="cpu")

    straight = build()
    train(straight, 3, loss)
    straight.save(tmp_path / "checkpoint")
    resumed = build()
    shared = dict(resumed.named_weights())
    resumed.load(tmp_path / "checkpoint")
    assert_equal_weights(shared, weights(straight))  # loaded in place: a sharer's tensors changed too
    assert train(resumed, 3, loss) == train(straight, 3, loss)
    assert_equal_weights(weights(resumed), weights(straight))
    assert_equal_weights(dict(resumed.optimizer.masters), dict(straight.optimizer.masters))


def test_resume_before_the_first_step(folder, tmp_path):
    straight, resumed = make_engine(folder), make_engine(folder)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    assert train(resumed, 1) == train(straight, 1)


def test_a_checkpoint_that_does_not_fit_is_one_line(folder, tmp_path):
    engine = make_engine(folder)
    engine.save(tmp_path)
    with pytest.raises(UserError, match="do not fit") as error:
        make_engine(save_tiny_model(tmp_path / "other", "qwen3", hidden_size=16)).load(tmp_path)
    assert "\n" not in str(error.value)
    next(tmp_path.glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="not a complete checkpoint"):
        engine.load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_loads_in_transformers_with_identical_logits(tmp_path, family):
    source = save_tiny_model(tmp_path / "source", family, tokenizer=True)
    engine = make_engine(source)
    train(engine, 2)
    engine.export(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation=ATTENTION_NAME)
    ids = torch.tensor([[5, 9, 12, 40, 7, 3, 99, 8, 21]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, engine.module(ids).logits)
    assert model.config.tie_word_embeddings == engine.module.config.tie_word_embeddings
    assert {n for n, _ in engine.named_weights()} == {n for n, _ in model.named_parameters()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer("3 + 12 = 15").input_ids == AutoTokenizer.from_pretrained(source)("3 + 12 = 15").input_ids
    assert tokenizer.chat_template
    modes = {file.stat().st_mode for file in (tmp_path / "export").glob("*.safetensors")}
    assert modes == {(tmp_path / "export" / "config.json").stat().st_mode}


def test_value_model_export_loads_again(folder, tmp_path):
    engine = make_engine(folder, head="value")
    train(engine, 2, ValueLoss())
    engine.export(tmp_path)
    batch = make_batch()
    again = make_engine(tmp_path, head="value")
    assert torch.equal(again.compute(batch).values, engine.compute(batch).values)
    assert load_file(tmp_path / VALUE_HEAD_FILE).keys() == {"weight", "bias"}
    body = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body.embed_tokens.weight, engine.module.body.embed_tokens.weight)


def test_bad_model_folders_are_one_line_errors(folder, tmp_path):
    def broken(name: str, spoil) -> str:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        spoil(copy)
        return str(copy)

    def set_type(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))

    cases = {
        "": "empty",
        str(tmp_path / "absent"): "no such folder",
        "a/b/c": "no such folder",
        broken("no_config", lambda p: (p / "config.json").unlink()): "no config.json",
        broken("no_weights", lambda p: (p / "model.safetensors").unlink()): "no weights",
        broken("bad_json", lambda p: (p / "config.json").write_text("{")): "not a JSON object",
        broken("unknown", set_type): "'t5' is not supported",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            check_model_folder(path)
        assert "\n" not in str(error.value)
    check_model_folder(str(folder))
    check_model_folder("owner/name")


def test_weights_that_are_incomplete_or_garbage_are_one_line_errors(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "partial")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing from the files, model\.layers\.1\.mlp\.up_proj\.weight"):
        make_engine(tmp_path / "partial")
    shutil.copytree(folder, tmp_path / "garbage")
    (tmp_path / "garbage" / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(UserError, match="cannot be loaded") as error:
        make_engine(tmp_path / "garbage")
    assert "\n" not in str(error.value)


def test_bad_settings_are_config_errors(folder):
    with pytest.raises(ConfigError, match="lr_schedule='step'"):
        make_engine(folder, optimizer=OptimizerConfig(lr_schedule="step"))
    with pytest.raises(ConfigError, match="total_steps"):
        make_engine(folder, optimizer=OptimizerConfig(lr_schedule="cosine"))
    with pytest.raises(ConfigError, match=r"model\.dtype='float8'"):
        resolve_dtype("float8", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"training\.device='tpu'"):
        resolve_device("tpu")
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
