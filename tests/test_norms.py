"""The training engine's RMSNorm against Hugging Face's, autograd and a hand-computed value."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from verl.engines.train.norms import install, rms_norm


def test_hand_computed():
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.5)
    scale = 1 / math.sqrt(12.5 + 0.5)
    torch.testing.assert_close(y, torch.tensor([[3 * scale, 8 * scale]]))


def test_gradients_against_finite_differences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    weight.requires_grad_(False)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight, 1e-3), (x,))


@pytest.mark.parametrize("norm_class", [Qwen3RMSNorm, Gemma2RMSNorm])
def test_installed_norm_is_the_models_own(norm_class):
    torch.manual_seed(0)
    theirs = norm_class(16, eps=1e-6)
    torch.nn.init.normal_(theirs.weight)
    ours = copy.deepcopy(theirs)
    install(torch.nn.Sequential(ours))
    x = torch.randn(7, 4, 16)
    grad = torch.randn(7, 4, 16)
    results = []
    for norm in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        results.append((y, *torch.autograd.grad(y, (leaf, norm.weight), grad)))
    assert ours.forward.__func__.__module__ == "verl.engines.train.norms"
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_other_precisions_keep_the_models_own():
    norm = Qwen3RMSNorm(16).to(torch.bfloat16)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    expected = norm(x)
    install(torch.nn.Sequential(norm))
    assert norm(x).equal(expected)
