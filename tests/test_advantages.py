"""Advantage estimators against constants derived by hand, naive NumPy loops, and what must not change them."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import broadcast_to_tokens, gae, grpo, outcome_to_tokens, whiten, zero_std_groups

T, F = True, False


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def assert_close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


# One answer of three tokens after a prompt of one: gamma 0.9, lambda 0.5, so gamma * lambda = 0.45.
#   delta_3 = 1 - 0.6               = 0.4     A_3 = 0.4                         R_3 = 0.4   + 0.6 = 1
#   delta_2 = 0 + 0.9 * 0.6 - 0.4   = 0.14    A_2 = 0.14 + 0.45 * 0.4   = 0.32  R_2 = 0.32  + 0.4 = 0.72
#   delta_1 = 0 + 0.9 * 0.4 - 0.2   = 0.16    A_1 = 0.16 + 0.45 * 0.32  = 0.304 R_1 = 0.304 + 0.2 = 0.504
ADVANTAGES = (0.304, 0.32, 0.4)
RETURNS = (0.504, 0.72, 1.0)


def test_gae_by_hand():
    advantages, returns = gae(
        torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.0, 0.2, 0.4, 0.6]), bools(F, T, T, T), torch.tensor([0, 4]), 0.9, 0.5
    )
    assert_close(advantages, (0, *ADVANTAGES))
    assert_close(returns, (0, *RETURNS))


def test_gae_skips_tool_tokens_as_if_absent():
    # The same answer with a tool's three tokens after its first and one more at the end. What stands there counts for nothing:
    # not the values (7, nan), not a reward (5).
    mask = bools(F, T, F, F, F, T, T, F)
    rewards = torch.tensor([0.0, 0, 0, 5, 0, 0, 1, 5])
    values = torch.tensor([9, 0.2, 7, torch.nan, 7, 0.4, 0.6, 7])
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 8]), 0.9, 0.5)
    assert_close(advantages, (0, ADVANTAGES[0], 0, 0, 0, *ADVANTAGES[1:], 0))
    assert_close(returns, (0, RETURNS[0], 0, 0, 0, *RETURNS[1:], 0))


def test_gae_keeps_sequences_apart():
    # Three sequences: the answer above, one without trained tokens, one of a single trained token with value 3 and reward 1.
    mask = bools(F, T, T, T, F, F, F, T)
    rewards = torch.tensor([0.0, 0, 0, 1, 0, 0, 0, 1])
    values = torch.tensor([0.0, 0.2, 0.4, 0.6, 8, 8, 8, 3])
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 4, 6, 8]), 0.9, 0.5)
    assert_close(advantages, (0, *ADVANTAGES, 0, 0, 0, -2))
    assert_close(returns, (0, *RETURNS, 0, 0, 0, 1))


def test_gae_with_gamma_and_lambda_one_is_reward_to_go_minus_value():
    # Rewards 0.5, 0, 1: to go 1.5, 1, 1.
    values = torch.tensor([0.2, 0.4, 0.6])
    advantages, returns = gae(torch.tensor([0.5, 0, 1]), values, bools(T, T, T), torch.tensor([0, 3]), 1.0, 1.0)
    assert_close(returns, (1.5, 1, 1))
    assert_close(advantages, (1.3, 0.6, 0.4))


def test_gae_with_lambda_zero_is_the_one_step_error():
    # delta = r + 0.5 * V_next - V: 0.5 * 0.4 - 0.2, 0.5 * 0.6 - 0.4, 1 - 0.6
    advantages, _ = gae(torch.tensor([0.0, 0, 1]), torch.tensor([0.2, 0.4, 0.6]), bools(T, T, T), torch.tensor([0, 3]), 0.5, 0.0)
    assert_close(advantages, (0.0, -0.1, 0.4))


def test_gae_of_a_batch_that_trains_nothing_is_zero():
    advantages, returns = gae(torch.ones(3), torch.ones(3), bools(F, F, F), torch.tensor([0, 2, 3]), 1.0, 1.0)
    assert_close(advantages, (0, 0, 0))
    assert_close(returns, (0, 0, 0))


def naive_gae(rewards, values, mask, cu, gamma, lam):
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for start, end in pairwise(cu):
        next_value = running = 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                running = rewards[t] + gamma * next_value - values[t] + gamma * lam * running
                next_value = values[t]
                advantages[t], returns[t] = running, running + values[t]
    return advantages, returns


def ragged(seed, num_sequences=7, longest=40):
    """Random lengths, masks (some sequences without a trained token), rewards, values."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, num_sequences)
    cu = np.concatenate([[0], lengths.cumsum()])
    mask = rng.random(cu[-1]) < np.repeat(rng.choice([0.0, 0.5, 0.9, 1.0], num_sequences), lengths)
    return cu, mask, rng.normal(size=cu[-1]), rng.normal(size=cu[-1])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_equals_a_naive_loop(seed, gamma, lam):
    cu, mask, rewards, values = ragged(seed)
    advantages, returns = gae(*map(torch.from_numpy, (rewards, values, mask, cu)), gamma, lam)
    expected_advantages, expected_returns = naive_gae(rewards, values, mask, cu, gamma, lam)
    assert_close(advantages, expected_advantages, 1e-5)
    assert_close(returns, expected_returns, 1e-5)


def test_gae_of_a_sequence_does_not_depend_on_its_batch():
    cu, mask, rewards, values = ragged(3)
    tensors = [torch.from_numpy(x) for x in (rewards, values, mask)]
    together, _ = gae(*tensors, torch.from_numpy(cu), 0.99, 0.95)
    alone = [gae(*(x[a:b] for x in tensors), torch.tensor([0, b - a]), 0.99, 0.95)[0] for a, b in pairwise(cu)]
    assert torch.equal(together, torch.cat(alone))


def test_gae_is_fast_enough_to_forget():
    # 512 answers of 1024 tokens. 20-40 ms on the machine this was written on; a Python loop over tokens takes seconds.
    cu = torch.arange(513) * 1024
    mask, rewards, values = torch.rand(512 * 1024) > 0.1, torch.randn(512 * 1024), torch.randn(512 * 1024)
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        gae(rewards, values, mask, cu, 0.99, 0.95)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.2


def test_outcome_is_paid_at_the_last_trained_token():
    # Ends with a tool's token; trains nothing; ends with the policy's token.
    mask = bools(F, T, T, F, F, F, F, T)
    paid = outcome_to_tokens(torch.tensor([2.0, 3.0, 4.0]), mask, torch.tensor([0, 4, 6, 8]))
    assert_close(paid, (0, 0, 2, 0, 0, 0, 0, 4))


def test_broadcast_reaches_trained_tokens_only():
    spread = broadcast_to_tokens(torch.tensor([2.0, -1.0]), bools(F, T, F, T, F, T), torch.tensor([0, 4, 6]))
    assert_close(spread, (0, 2, 0, 2, 0, -1))


def test_whiten_uses_masked_tokens_alone():
    # Masked: 1, 2, 3. Mean 2, unbiased variance 1. The 100 counts for nothing and becomes 0.
    assert_close(whiten(torch.tensor([1.0, 100, 2, 3]), bools(T, F, T, T)), (-1, 0, 0, 1))
    # Masked: 0, 4. Mean 2, unbiased variance (4 + 4) / 1 = 8, so +-2 / sqrt(8).
    assert_close(whiten(torch.tensor([0.0, 4, 9]), bools(T, T, F)), (-0.70710678, 0.70710678, 0))


def test_whiten_of_one_token_or_none_is_zero():
    assert_close(whiten(torch.tensor([5.0, 7]), bools(T, F)), (0, 0))
    assert_close(whiten(torch.tensor([5.0, 7]), bools(F, F)), (0, 0))


def test_grpo_by_hand():
    # Mean 0.5; unbiased variance 4 * 0.25 / 3 = 1/3, std 0.577350; +-0.5 / (0.577350 + 0.000001) = +-0.866024.
    advantages = grpo(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64))
    assert_close(advantages, (0.8660239, -0.8660239, -0.8660239, 0.8660239))


def test_grpo_with_interleaved_unequal_groups():
    # Group 7: 1, 0, 0.5: mean 0.5, unbiased std 0.5, so +-1 / (1 + 2e-6) and 0. Group 3: 2, 2. Group 9 is alone.
    rewards, groups = torch.tensor([1, 2, 0, 5, 2, 0.5]), torch.tensor([7, 3, 7, 9, 3, 7])
    advantages = grpo(rewards, groups)
    assert_close(advantages, (0.999998, 0, -0.999998, 0, 0, 0))
    assert advantages[[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert zero_std_groups(rewards, groups) == (1, 2)


def test_grpo_without_the_standard_deviation():
    rewards, groups = torch.tensor([1, 2, 0, 5, 2, 0.5]), torch.tensor([7, 3, 7, 9, 3, 7])
    assert_close(grpo(rewards, groups, norm_by_std=False), (0.5, 0, -0.5, 0, 0, 0))


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3, 1e6])
def test_grpo_of_equal_rewards_is_exactly_zero(reward, dtype, norm_by_std):
    # In float64 the mean of three times 0.1 is not 0.1, and the difference over a tiny std would be no small number.
    rewards = torch.full((7,), reward, dtype=dtype)
    advantages = grpo(rewards, torch.tensor([0, 0, 0, 1, 1, 1, 2]), norm_by_std)
    assert advantages.tolist() == [0.0] * 7


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0, -2.0]), st.integers(0, 4)), min_size=1, max_size=30),
    norm_by_std=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_grpo_equals_a_naive_loop_in_any_order(rows, norm_by_std, seed):
    rewards, groups = np.array([r for r, _ in rows]), np.array([g for _, g in rows])
    expected = np.zeros(len(rows))
    for group in set(groups):
        members = np.flatnonzero(groups == group)
        if len(members) > 1:
            std = rewards[members].std(ddof=1) + 1e-6 if norm_by_std else 1.0
            expected[members] = (rewards[members] - rewards[members].mean()) / std
    order = np.random.default_rng(seed).permutation(len(rows))
    actual = grpo(torch.from_numpy(rewards[order]).float(), torch.from_numpy(groups[order]), norm_by_std)
    assert_close(actual, expected[order], 1e-5)
