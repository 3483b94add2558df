"""Sampling: distributions, log-probs, truncation, and streams of random numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import VOCAB, logprob_error, make_engine, prompts, reference_logits, requests_of, tiny_model
from torch import Tensor

from verl.engines.rollout.base import SamplingParams
from verl.engines.rollout.native.sampler import SamplingPlan, mix, sample, stream_key, suppress, truncate, uniforms

PLAN = SamplingPlan(any_greedy=False, all_greedy=False, any_temperature=False, any_truncation=False)


def draw(logits: Tensor, rows: int, plan: SamplingPlan = PLAN, **limits: float) -> tuple[Tensor, Tensor]:
    """`rows` independent draws from one row of logits [V]."""
    keys = torch.tensor([stream_key(7, i) for i in range(rows)])
    values = {"temperature": 1.0, "top_k": logits.numel(), "top_p": 1.0, "min_p": 0.0, **limits}
    parameters = {name: torch.full((rows,), value) for name, value in values.items()}
    noise = uniforms(keys, torch.zeros(rows, dtype=torch.int64))
    return sample(logits.repeat(rows, 1), noise, plan, **parameters)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs.double() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def naive_kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Tokens that survive, by the definitions, one at a time in double precision."""
    probs = logits.double().softmax(-1)
    order = sorted(range(logits.numel()), key=lambda i: (-probs[i].item(), i))[:top_k]
    mass = sum(probs[i].item() for i in order)
    kept, cumulative = [], 0.0
    for i in order:
        if kept and top_p < 1 and cumulative >= top_p * mass:
            break
        kept.append(i)
        cumulative += probs[i].item()
    return [i for i in kept if probs[i] >= min_p * probs[order[0]]]


def test_mix_is_splitmix64() -> None:
    # First outputs of SplitMix64 seeded with 0, from the published reference implementation.
    gamma = 0x9E3779B97F4A7C15
    assert [mix(gamma * i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_equal_the_host_hash() -> None:
    keys = [0, 1, -5, 2**62, -(2**63)]
    counts = [0, 3, 17, 1000, 2**31]
    gamma = 0x9E3779B97F4A7C15
    expected = [((mix(k + (c + 1) * gamma) >> 41) + 0.5) * 2.0**-23 for k, c in zip(keys, counts, strict=True)]
    assert uniforms(torch.tensor(keys), torch.tensor(counts)).tolist() == expected


def test_uniforms_are_uniform_within_and_across_streams() -> None:
    within = uniforms(torch.full((40_000,), stream_key(3, 0)), torch.arange(40_000))
    across = uniforms(
        torch.tensor([stream_key(s, i) for s in range(200) for i in range(200)]), torch.zeros(40_000, dtype=torch.int64)
    )
    for values in (within, across):
        # 99.99 % quantile of chi-square with 99 degrees of freedom is 159.
        assert chi_square(torch.histc(values, 100, 0, 1), torch.full((100,), 0.01)) < 159
        # Neighbours are uncorrelated: standard error 1 / sqrt(40,000) = 0.005.
        assert abs(torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1].item()) < 0.02
    assert within.min() >= 0 and within.max() < 1


def test_samples_follow_the_distribution() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    ids, logprobs = draw(logits, 50_000)
    # 99.99 % quantile of chi-square with 19 degrees of freedom is 54.
    assert chi_square(torch.bincount(ids, minlength=20), logits.softmax(-1)) < 54
    assert torch.allclose(logprobs, logits.log_softmax(-1)[ids], atol=1e-6)


def test_truncated_samples_follow_the_renormalised_distribution() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
    plan = SamplingPlan(any_greedy=False, all_greedy=False, any_temperature=True, any_truncation=True)
    ids, logprobs = draw(logits, 30_000, plan, temperature=0.7, top_k=8, top_p=0.8, min_p=0.05)
    scaled = logits / 0.7
    kept = naive_kept(scaled, 8, 0.8, 0.05)
    assert 2 <= len(kept) < 8
    target = torch.full_like(scaled, -torch.inf)
    target[kept] = scaled[kept]
    target = target.log_softmax(-1)
    assert set(ids.tolist()) == set(kept)
    assert chi_square(torch.bincount(ids, minlength=20)[kept], target.exp()[kept]) < 30
    assert torch.allclose(logprobs, target[ids], atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 30),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    ties=st.booleans(),
)
def test_truncation_equals_the_naive_reference(seed: int, top_k: int, top_p: float, min_p: float, ties: bool) -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(seed)) * 2
    if ties:
        logits = logits.round()
        # Ties make mass comparisons exact equalities in theory, rounding decides them in practice.
        top_p = 1.0
    expected = [sorted(naive_kept(row, top_k, top_p, min_p)) for row in logits]
    truncate(logits, torch.full((3,), top_k), torch.full((3,), top_p), torch.full((3,), min_p))
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in logits] == expected


def test_truncation_off_in_a_row_changes_nothing_in_it() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 8
    before = logits.clone()
    truncate(logits, torch.tensor([5000, 3]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0]))
    assert torch.equal(logits[0], before[0])
    assert logits[1].isfinite().sum() == 3


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((8,), -torch.inf)
    logits[[2, 5]] = torch.tensor([0.0, 1.0])
    noise = torch.tensor([0.0, 0.2689, 0.27, 1 - 2.0**-23])
    one = torch.ones(4)
    ids, logprobs = sample(logits.repeat(4, 1), noise, PLAN, temperature=one, top_k=one.long() * 8, top_p=one, min_p=one * 0)
    assert ids.tolist() == [2, 2, 5, 5]
    assert torch.allclose(logprobs, torch.tensor([-1.31326, -1.31326, -0.31326, -0.31326]), atol=1e-4)


def test_suppress_by_hand() -> None:
    logits = torch.zeros(4, 6)
    suppress(logits, torch.tensor([[1, 3], [2, -1], [-1, -1], [0, 5]]), torch.tensor([True, True, True, False]))
    hidden = [row.isinf().nonzero()[:, 0].tolist() for row in logits]
    assert hidden == [[1, 3], [2], [], []]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_engine_logprobs_at_a_temperature(temperature: float) -> None:
    model = tiny_model()
    asked = prompts(6, 9)
    engine = make_engine(model)
    for c in engine.generate(requests_of(asked, SamplingParams(max_tokens=12, n=3, temperature=temperature, ignore_eos=True))):
        assert logprob_error(model, asked[c.request_id], c, temperature) < 1e-4


def test_engine_respects_truncation_and_reports_its_logprobs() -> None:
    model = tiny_model()
    asked = prompts(6, 9)
    params = SamplingParams(max_tokens=12, n=4, temperature=1.3, top_k=9, top_p=0.8, min_p=0.03, ignore_eos=True)
    for c in make_engine(model).generate(requests_of(asked, params)):
        for row, token, logprob in zip(
            reference_logits(model, asked[c.request_id], c.token_ids), c.token_ids, c.logprobs, strict=True
        ):
            scaled = row / 1.3
            kept = naive_kept(scaled, 9, 0.8, 0.03)
            assert token in kept
            assert abs(logprob - (scaled[token] - scaled[kept].logsumexp(-1)).item()) < 1e-4


def test_engine_first_tokens_follow_the_model() -> None:
    model = tiny_model()
    (prompt,) = prompts(6)
    engine = make_engine(model, max_num_seqs=500)
    completions = engine.generate(requests_of([prompt], SamplingParams(max_tokens=1, n=4000, ignore_eos=True, temperature=3.0)))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB)
    probs = (reference_logits(model, prompt, [0])[0] / 3).softmax(-1)
    # Every expected count is large enough for the chi-square approximation; 60 degrees of freedom, 99.99 % quantile 107.
    assert probs.min() > 5 / 4000
    assert chi_square(counts, probs) < 107
