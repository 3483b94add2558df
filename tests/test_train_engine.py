"""FSDPEngine at world size 1: outputs and gradients against plain Hugging Face models, and layout invariance."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from models import FAMILIES, save_tiny_model, tiny_model

from verl.config.schema import ModelConfig, OptimizerConfig
from verl.data.batch import TokenBatch
from verl.engines.train.base import LossResult, ModelOutputs
from verl.engines.train.fsdp import FSDPEngine
from verl.observe.metrics import Mean

LENGTHS = [13, 3, 30, 9, 30, 2, 17, 12]
PROMPT = 4


@dataclass(frozen=True)
class TokenLoss:
    """Token mean of -advantage * logprob - 0.1 * entropy."""

    needs_entropy: bool = True

    def count(self, batch: TokenBatch) -> float:
        return float(batch.loss_mask.sum())

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult:
        per_token = -(batch.advantages * outputs.logprobs) - 0.1 * outputs.entropy
        total = (per_token * batch.loss_mask).sum()
        return LossResult(total=total, metrics={"loss": Mean(total.item(), self.count(batch))})


@dataclass(frozen=True)
class ValueLoss:
    """Token mean of (value - 1)^2."""

    needs_entropy: bool = False

    def count(self, batch: TokenBatch) -> float:
        return float(batch.loss_mask.sum())

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult:
        return LossResult(total=((outputs.values - 1).square() * batch.loss_mask).sum(), metrics={})


def make_batch(lengths=LENGTHS, prompt=PROMPT, seed=0) -> TokenBatch:
    """Random tokens; those after the first `prompt` of each sequence are trained on (short sequences have none).
    Every other sequence has the same prompt, as samples of one prompt do."""
    generator = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(3, 128, (sum(lengths),), generator=generator)
    for sequence in ids.split(lengths)[2::2]:
        sequence[:prompt] = ids[: len(sequence[:prompt])]
    batch = TokenBatch(cu, input_ids=ids, advantages=torch.randn(sum(lengths), generator=generator))
    return batch.with_columns(loss_mask=batch.positions() >= prompt)


def make_engine(path, **kwargs) -> FSDPEngine:
    kwargs.setdefault("optimizer", OptimizerConfig(lr=1e-2))
    return FSDPEngine(ModelConfig(path=str(path)), device="cpu", **kwargs)


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.module.named_parameters()}


def padded_loss_and_gradients(model, batch: TokenBatch, temperature=1.0):
    """TokenLoss with right padding, materialised logits and the model's own eager attention."""
    sequences = batch.input_ids.split(batch.lengths.tolist())
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    attention_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    if model.dtype == torch.float64:
        # Transformers' eager mask overflows to NaN in float64; causality keeps right padding out without one.
        attention_mask = None
    log_softmax = (model(ids, attention_mask=attention_mask).logits / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    total = torch.zeros(())
    for i, (mask, advantages) in enumerate(
        zip(batch.loss_mask.split(batch.lengths.tolist()), batch.advantages.split(batch.lengths.tolist()), strict=True)
    ):
        for t in mask.nonzero()[:, 0].tolist():
            total = total - advantages[t] * log_softmax[i, t - 1, ids[i, t]] - 0.1 * entropy[i, t - 1]
    loss = total / batch.loss_mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, tolerance=1e-6):
    """Relative to each gradient's norm, or (for those that are zero but for rounding) to the whole gradient's."""
    assert actual.keys() == expected.keys()
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    for name in expected:
        error = (actual[name] - expected[name]).norm()
        assert error <= tolerance * max(expected[name].norm(), 1e-2 * whole), (name, error, expected[name].norm())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Path of a saved tiny model, by family."""
    return {family: save_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def folder(folders):
    return folders["qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_match_plain_forward(folders, family):
    """Max difference 1e-4 in float32, every token, each sequence alone under the family's eager attention."""
    batch, model = make_batch(), tiny_model(family)
    outputs = make_engine(folders[family], optimizer=None).compute(batch, entropy=True, all_tokens=True)
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist(), strict=False):
        ids = batch.input_ids[start:end]
        with torch.no_grad():
            log_softmax = model(ids[None]).logits[0].log_softmax(-1)[:-1]
        expected = log_softmax.gather(1, ids[1:, None])[:, 0]
        assert outputs.logprobs[start] == 0
        torch.testing.assert_close(outputs.logprobs[start + 1 : end], expected, atol=1e-4, rtol=0)
        expected_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        torch.testing.assert_close(outputs.entropy[start + 1 : end], expected_entropy, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_match_padded_reference(tmp_path, family):
    """Sliding windows (6 of up to 30 tokens), soft caps, tied embeddings and shared prompts included. Matrices are three
    times Hugging Face's initial ones: larger ones amplify the rounding of two float32 computations in different orders."""
    batch = make_batch()
    engine = make_engine(save_tiny_model(tmp_path, family, scale=3.0), temperature=0.8)
    metrics = engine.forward_backward(batch, TokenLoss())
    loss, expected = padded_loss_and_gradients(tiny_model(family, scale=3.0), batch, temperature=0.8)
    assert metrics["loss"].value == pytest.approx(loss, abs=1e-6)  # a mean of terms of size 5 with both signs
    assert_same_gradients(gradients(engine), expected, tolerance=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_double_precision_loss_and_gradients_match_padded_reference(folders, family):
    """In float64 and with large weights; what is left is the reference's RMS norms and rotary tables, float32 always."""
    batch = make_batch()
    engine = make_engine(folders[family])
    engine.module.double()
    metrics = engine.forward_backward(batch, TokenLoss())
    loss, expected = padded_loss_and_gradients(tiny_model(family).double(), batch)
    assert metrics["loss"].value == pytest.approx(loss, abs=1e-6)
    assert_same_gradients(gradients(engine), expected, tolerance=3e-6)


def test_outputs_only_where_the_policy_chose(folder):
    batch = make_batch()
    engine = make_engine(folder, optimizer=None)
    chosen, everywhere = engine.compute(batch), engine.compute(batch, all_tokens=True)
    assert chosen.entropy is None
    assert chosen.values is None
    assert torch.equal(chosen.logprobs != 0, batch.loss_mask)
    assert torch.equal(everywhere.logprobs != 0, batch.positions() > 0)
    torch.testing.assert_close(chosen.logprobs[batch.loss_mask], everywhere.logprobs[batch.loss_mask], atol=2e-6, rtol=0)


@pytest.mark.parametrize("max_tokens", [1, 31, 47, 70])
def test_micro_batches_change_nothing(folder, max_tokens):
    batch = make_batch()
    whole, parts = make_engine(folder), make_engine(folder, max_tokens_per_micro_batch=max_tokens)
    assert len(list(batch.micro_batches(max_tokens))) > 1
    expected = whole.forward_backward(batch, TokenLoss())["loss"].value
    assert parts.forward_backward(batch, TokenLoss())["loss"].value == pytest.approx(expected, abs=1e-6)  # as above
    assert_same_gradients(gradients(parts), gradients(whole))
    torch.testing.assert_close(parts.compute(batch).logprobs, whole.compute(batch).logprobs, atol=5e-6, rtol=0)


def test_ranks_with_the_global_count_add_up_to_the_whole(folder):
    batch = make_batch()
    whole, ranks = make_engine(folder), make_engine(folder)
    whole.forward_backward(batch, TokenLoss())
    for share in batch.split(3):
        ranks.forward_backward(share, TokenLoss(), count=TokenLoss().count(batch))
    assert_same_gradients(gradients(ranks), gradients(whole))


@pytest.mark.parametrize("seed", [1, 2])
def test_order_of_sequences_changes_nothing(folder, seed):
    batch = make_batch()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    plain, shuffled = make_engine(folder), make_engine(folder)
    expected = plain.forward_backward(batch, TokenLoss())["loss"].value
    assert shuffled.forward_backward(batch.select(order), TokenLoss())["loss"].value == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(gradients(shuffled), gradients(plain))
    reordered = batch.with_columns(old_logprobs=plain.compute(batch).logprobs).select(order)
    torch.testing.assert_close(shuffled.compute(batch.select(order)).logprobs, reordered.old_logprobs, atol=5e-6, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_gradient_checkpointing_changes_nothing(folders, family, head):
    batch, loss = make_batch(), TokenLoss() if head == "lm" else ValueLoss()
    plain = make_engine(folders[family], head=head)
    checkpointed = make_engine(folders[family], head=head, gradient_checkpointing=True)
    calls = []
    if head == "value":  # a head of zeros passes nothing on to the body
        for engine in (plain, checkpointed):
            torch.nn.init.ones_(engine.module.value_head.weight)
    layers = (checkpointed.module.body if head == "value" else checkpointed.module.model).layers
    layers[0].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    plain.forward_backward(batch, loss)
    checkpointed.forward_backward(batch, loss)
    assert len(calls) == 2  # once forward, once recomputed
    assert_same_gradients(gradients(checkpointed), gradients(plain))
    assert not checkpointed.module.training


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_sequences_do_not_see_each_other(folders, family):
    batch = make_batch()
    engine = make_engine(folders[family], optimizer=None)
    before = engine.compute(batch, all_tokens=True).logprobs
    start, end = batch.cu_seqlens[2:4].tolist()
    ids = batch.input_ids.clone()
    ids[start:end] = (ids[start:end] + 17) % 128
    after = engine.compute(batch.with_columns(input_ids=ids), all_tokens=True).logprobs
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[end:], after[end:])
    assert not torch.equal(before[start:end], after[start:end])


def test_temperature_divides_the_logits(folder):
    batch = make_batch([10], prompt=1)
    outputs = make_engine(folder, optimizer=None, temperature=2.0).compute(batch, entropy=True)
    with torch.no_grad():
        log_softmax = (tiny_model("qwen3")(batch.input_ids[None]).logits[0, :-1] / 2).log_softmax(-1)
    torch.testing.assert_close(outputs.logprobs[1:], log_softmax.gather(1, batch.input_ids[1:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.entropy[1:], -(log_softmax.exp() * log_softmax).sum(-1), atol=1e-5, rtol=0)


def test_values_come_from_the_state_before_the_token(folder):
    batch = make_batch()
    engine = make_engine(folder, head="value")
    assert torch.equal(engine.compute(batch).values, torch.zeros(batch.num_tokens))
    with torch.no_grad():
        engine.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        engine.module.value_head.bias.fill_(0.25)
    outputs = engine.compute(batch)
    assert outputs.logprobs is None
    assert torch.equal(outputs.values != 0, batch.loss_mask)
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist(), strict=False):
        with torch.no_grad():
            hidden = tiny_model("qwen3").model(batch.input_ids[None, start:end]).last_hidden_state[0]
        expected = (hidden @ engine.module.value_head.weight[0] + 0.25)[PROMPT - 1 : -1]
        torch.testing.assert_close(outputs.values[start + PROMPT : end], expected, atol=2e-5, rtol=1e-5)


def test_value_head_learns(folder):
    batch = make_batch()
    engine = make_engine(folder, head="value")
    for _ in range(60):
        engine.forward_backward(batch, ValueLoss())
        engine.optimizer_step()
    values = engine.compute(batch).values[batch.loss_mask]
    assert (values - 1).abs().mean() < 0.2


def test_training_raises_the_chosen_logprobs(folder):
    batch = make_batch().with_columns(advantages=torch.ones(sum(LENGTHS)))
    engine = make_engine(folder)
    before = engine.compute(batch).logprobs.sum()
    for _ in range(3):
        engine.forward_backward(batch, TokenLoss())
        engine.optimizer_step()
    assert engine.compute(batch).logprobs.sum() > before + 10


def test_nothing_to_train_on_gives_zero_gradients(folder):
    batch = make_batch([3, 2], prompt=8)
    engine = make_engine(folder)
    engine.forward_backward(batch, TokenLoss())
    assert all(not g.any() for g in gradients(engine).values())


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_the_module_remains_an_ordinary_transformers_model(folders, family):
    """`generate`, left-padded or not, and plain forward passes work on the trainer's own module."""
    engine, model = make_engine(folders[family], optimizer=None), tiny_model(family)
    padded, plain = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]]), torch.tensor([[9, 8, 7, 6, 5]])
    for ids in (padded, plain):
        settings = dict(attention_mask=(ids > 0).long(), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(engine.module.generate(ids, **settings), model.generate(ids, **settings))
    with torch.no_grad():
        torch.testing.assert_close(engine.module(plain).logits, model(plain).logits, atol=1e-5, rtol=1e-4)


def test_an_engine_without_optimizer_cannot_train(folder):
    engine = make_engine(folder, optimizer=None)
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(RuntimeError, match="without an optimizer"):
        engine.forward_backward(make_batch(), TokenLoss())
