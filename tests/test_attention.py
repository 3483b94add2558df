"""Packed attention against plain softmax attention, one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from verl.engines.train.attention import packed_attention
from verl.engines.train.packing import Packing

LAYOUTS = {"ragged": [3, 17, 9, 17, 1, 40, 12], "uniform": [11, 11, 11], "single": [23], "ones": [1, 1, 1]}


def reference(q, k, v, lengths, scale, window=None, softcap=None):
    """Softmax attention written out, sequence by sequence: q [T, Hq, D], k and v [T, Hkv, D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    outputs = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(len(qs))[:, None], torch.arange(len(qs))
        hidden = (j > i) if window is None else (j > i) | (j <= i - window)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), vs))
    return torch.cat(outputs)


def random_qkv(lengths, num_kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    heads = (4, num_kv_heads, num_kv_heads)
    return [torch.randn(total, h, 8, generator=generator, dtype=dtype).requires_grad_() for h in heads]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_match_plain_attention(layout, num_kv_heads, window, softcap):
    lengths = LAYOUTS[layout]
    qkv = random_qkv(lengths, num_kv_heads)
    weight = torch.randn(sum(lengths), 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(attend):
        out = attend(*qkv)
        return out, torch.autograd.grad((out * weight).sum(), qkv)

    out, grads = run(
        lambda q, k, v: packed_attention(q, k, v, Packing(lengths, "cpu"), scale=0.5, window=window, softcap=softcap)
    )
    expected, expected_grads = run(lambda q, k, v: reference(q, k, v, lengths, 0.5, window, softcap))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_non_finite_sequence_harms_no_other(softcap):
    lengths = LAYOUTS["ragged"]
    q, k, v = (x.detach() for x in random_qkv(lengths))
    packing = Packing(lengths, "cpu")
    clean = packed_attention(q, k, v, packing, scale=0.5, softcap=softcap)
    k, v = k.clone(), v.clone()
    k[3:20], v[3:20] = float("nan"), float("inf")
    spoiled = packed_attention(q, k, v, packing, scale=0.5, softcap=softcap)
    assert not spoiled[3:20].isfinite().any()
    assert torch.equal(spoiled[:3], clean[:3])
    assert torch.equal(spoiled[20:], clean[20:])


def test_packing_knows_positions_and_boundaries():
    packing = Packing([2, 3, 1], "cpu")
    assert packing.cu_seqlens.tolist() == [0, 2, 5, 6]
    assert packing.position_ids.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert packing.max_length == 3


def test_padding_maps_send_every_token_there_and_back():
    lengths = [5, 100, 40, 6, 90, 1]
    packing = Packing(lengths, "cpu")
    pad, unpad = packing.padded_queries.index, packing.padded_queries.own
    tokens = torch.arange(sum(lengths))
    assert torch.equal(tokens[pad][unpad], tokens)
    assert sum(g.count for g in packing.groups) == len(lengths)
    assert pad.numel() == sum(g.count * g.length for g in packing.groups)
    # Groups are by length, so padding is bounded: 100 and 90 together, 40, then 6 and 5, then 1.
    assert [(g.count, g.length) for g in packing.groups] == [(2, 100), (1, 40), (2, 6), (1, 1)]


def test_long_sequences_are_grouped_within_the_score_limit():
    packing = Packing([6000, 6000, 3000], "cpu")
    assert [(g.count, g.length) for g in packing.groups] == [(1, 6000), (1, 6000), (1, 3000)]
    assert not Packing([6000, 6000], "cpu").is_uniform


# Pieces (lengths, contexts): two shared prompts with 3 and 2 continuations, two whole sequences, one lone continuation.
SHARED = ([4, 7, 2, 6, 5, 9, 3, 3, 20, 8], [-1, 0, 0, 0, -1, -1, 5, 5, -1, 4])


def written_out(x, lengths, contexts):
    """Every piece as a whole sequence, with a copy of its context: tokens, lengths, which of them are the piece's own."""
    parts = x.split(lengths)
    whole = [parts[i] if c < 0 else torch.cat((parts[c], parts[i])) for i, c in enumerate(contexts)]
    own = torch.cat([torch.arange(len(w)) >= len(w) - n for w, n in zip(whole, lengths, strict=True)])
    return torch.cat(whole), [len(w) for w in whole], own


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_shared_context_is_as_good_as_copies(window, softcap):
    lengths, contexts = SHARED
    qkv = random_qkv(lengths)
    weight = torch.randn(sum(lengths), 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = packed_attention(*qkv, Packing(lengths, "cpu", contexts), scale=0.5, window=window, softcap=softcap)
    wholes = [written_out(x, lengths, contexts) for x in qkv]
    expected = reference(*(w[0] for w in wholes), wholes[0][1], 0.5, window, softcap)[wholes[0][2]]
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    grads = torch.autograd.grad((out * weight).sum(), qkv)
    for grad, expected_grad in zip(grads, torch.autograd.grad((expected * weight).sum(), qkv), strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=0)


def test_positions_count_on_from_a_context():
    packing = Packing([2, 3, 1, 2], "cpu", [-1, 0, -1, 0])
    assert packing.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 2, 3]]
    assert packing.key_cu_seqlens.tolist() == [0, 2, 7, 8, 12]
    assert packing.flat_keys.index.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 6, 7]
    assert packing.flat_keys.own.tolist() == [0, 1, 4, 5, 6, 7, 10, 11]
    ((tokens, places),) = packing.flat_keys.copies
    assert (tokens.tolist(), places.tolist()) == ([0, 1], [[2, 8], [3, 9]])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_cuda_kernel_matches_plain_attention(num_kv_heads, window):
    lengths = LAYOUTS["ragged"]
    qkv = [x.detach().repeat(1, 1, 8).cuda().requires_grad_() for x in random_qkv(lengths, num_kv_heads)]
    half = [x.detach().bfloat16().requires_grad_() for x in qkv]
    out = packed_attention(*half, Packing(lengths, "cuda"), scale=0.1, window=window)
    expected = reference(*(x.cpu() for x in qkv), lengths, 0.1, window)
    torch.testing.assert_close(out.cpu().double(), expected, atol=3e-2, rtol=0)
    grads = torch.autograd.grad(out.float().square().sum(), half)
    expected_grads = torch.autograd.grad(expected.square().sum(), qkv)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        error = (grad.double() - expected_grad).norm() / expected_grad.norm()
        assert error < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
def test_cuda_kernel_with_shared_contexts(window):
    lengths, contexts = SHARED
    qkv = [x.detach().repeat(1, 1, 8).cuda().requires_grad_() for x in random_qkv(lengths)]
    half = [x.detach().bfloat16().requires_grad_() for x in qkv]
    out = packed_attention(*half, Packing(lengths, "cuda", contexts), scale=0.1, window=window)
    expected = packed_attention(*qkv, Packing(lengths, "cuda", contexts), scale=0.1, window=window)
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=0)
    grads = torch.autograd.grad(out.float().square().sum(), half)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected.square().sum(), qkv), strict=True):
        assert (grad.double() - expected_grad).norm() / expected_grad.norm() < 2e-2
