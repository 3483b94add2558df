"""The fused projection -> log-prob + entropy against `log_softmax` of materialised logits."""

from __future__ import annotations

import math

import pytest
import torch

from verl.engines.train.logprobs import token_logprobs

T, V, D = 13, 11, 6
ROWS = torch.tensor([1, 2, 3, 6, 7, 12])


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def naive(hidden, weight, input_ids, temperature, softcap):
    """All positions at once with the logits in memory; 0 outside ROWS."""
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_softmax = (logits / temperature).log_softmax(-1)[ROWS - 1]
    zeros = torch.zeros(T, dtype=hidden.dtype)
    logprobs = zeros.index_copy(0, ROWS, log_softmax.gather(1, input_ids[ROWS, None])[:, 0])
    return logprobs, zeros.index_copy(0, ROWS, -(log_softmax.exp() * log_softmax).sum(-1))


@pytest.mark.parametrize("chunk_elements", [1, 2 * V, 4 * V, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_match_log_softmax(temperature, softcap, chunk_elements):
    hidden, weight, input_ids = inputs()
    settings = dict(temperature=temperature, softcap=softcap, entropy=True, chunk_elements=chunk_elements)
    logprobs, entropy = token_logprobs(hidden, weight, input_ids, ROWS, **settings)
    expected_logprobs, expected_entropy = naive(hidden, weight, input_ids, temperature, softcap)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    scale = torch.linspace(-1, 2, T, dtype=torch.float64)
    for total, expected in [
        ((logprobs * scale).sum(), (expected_logprobs * scale).sum()),
        ((entropy * scale).sum(), (expected_entropy * scale).sum()),
        ((logprobs * scale + entropy.square()).sum(), (expected_logprobs * scale + expected_entropy.square()).sum()),
    ]:
        grads = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
        expected_grads = torch.autograd.grad(expected, (hidden, weight), retain_graph=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk_elements", [2 * V, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(softcap, chunk_elements):
    hidden, weight, input_ids = inputs()

    def function(hidden, weight):
        return token_logprobs(
            hidden, weight, input_ids, ROWS, temperature=1.3, softcap=softcap, entropy=True, chunk_elements=chunk_elements
        )

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_hand_computed():
    # Logits of position 0 are (0, ln 3): probabilities 1/4 and 3/4.
    hidden, weight = torch.tensor([[1.0], [5.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 1]), torch.tensor([1]), entropy=True)
    assert logprobs.tolist() == pytest.approx([0.0, math.log(0.75)])
    assert entropy.tolist() == pytest.approx([0.0, 0.25 * math.log(4) + 0.75 * math.log(4 / 3)])


def test_no_rows_give_zeros_and_zero_gradients():
    hidden, weight, input_ids = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, input_ids, torch.empty(0, dtype=torch.int64))
    assert entropy is None
    assert logprobs.tolist() == [0.0] * T
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_bfloat16_operands_keep_float32_logits():
    hidden, weight, input_ids = inputs(torch.bfloat16)
    hidden, weight = (hidden.detach() * 4).requires_grad_(), (weight.detach() * 4).requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, input_ids, ROWS)
    expected, _ = naive(hidden.double(), weight.double(), input_ids, 1.0, None)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    expected_grads = torch.autograd.grad(expected.sum(), (hidden, weight))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - expected_grad.double()).norm() < 1e-2 * expected_grad.double().norm()


def test_logits_of_all_tokens_never_exist_at_once():
    """With 4096 tokens, 4096 words and chunks of 2**16 logits, no tensor the function makes is larger than 2**20."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight = torch.randn(4096, 8).requires_grad_(), torch.randn(4096, 8).requires_grad_()
    with Watch():
        logprobs, _ = token_logprobs(
            hidden, weight, torch.zeros(4096, dtype=torch.int64), torch.arange(1, 4096), chunk_elements=2**16
        )
        logprobs.sum().backward()
    assert largest == 2**16
    assert hidden.grad is not None
