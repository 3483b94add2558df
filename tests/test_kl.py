"""KL estimators: values, gradients and expectations; the penalty; the controller."""

import math

import pytest
import torch

from verl.algorithms.kl import KLController, kl_estimate, kl_penalised_rewards, kl_straight_through
from verl.errors import ConfigError

# log policy = -1, log reference = -1.5, so d = 0.5; exp(-0.5) = 0.60653066.
#   k1 = 0.5                          gradient in log policy 1
#   k2 = 0.5^2 / 2 = 0.125            gradient d = 0.5
#   k3 = 0.60653066 - 1 + 0.5         gradient 1 - exp(-d) = 0.39346934
#   abs = 0.5                         gradient sign(d) = 1
# And with d = -0.5; exp(0.5) = 1.64872127:
#   k3 = 1.64872127 - 1 - 0.5         gradient 1 - 1.64872127
CASES = [
    ("k1", 0.5, 0.5, 1.0),
    ("k1", -0.5, -0.5, 1.0),
    ("k2", 0.5, 0.125, 0.5),
    ("k2", -0.5, 0.125, -0.5),
    ("k3", 0.5, 0.10653066, 0.39346934),
    ("k3", -0.5, 0.14872127, -0.64872127),
    ("abs", 0.5, 0.5, 1.0),
    ("abs", -0.5, 0.5, -1.0),
]


@pytest.mark.parametrize(("kind", "delta", "value", "gradient"), CASES)
def test_values_and_gradients_by_hand(kind, delta, value, gradient):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-1.0 - delta]), kind)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("delta", [-3.0, -30.0, -1e4])
def test_k3_is_at_most_ten_and_pushes_no_further(delta):
    # exp(3) - 1 - 3 = 16.1 is over the limit of 10; exp(1e4) would overflow.
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-1.0 - delta]), "k3")
    estimate.sum().backward()
    assert estimate.item() == 10.0
    assert logprobs.grad.item() == 0.0


def test_k3_of_a_far_better_policy_token_is_its_log_ratio():
    # d = 12: exp(-12) - 1 + 12 = 11.000006 is clamped as well; d = 5: 0.0067379 - 1 + 5.
    reference = torch.tensor([-12.0, -5.0])
    assert kl_estimate(torch.zeros(2), reference, "k3").tolist() == pytest.approx([10.0, 4.0067379])


def test_k3_is_exact_near_zero():
    # d = 1e-4: d^2 / 2 = 5e-9, which exp(-d) - 1 + d in float32 would round to 0 or to 6e-8.
    estimate = kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert estimate.item() == pytest.approx(5e-9, rel=0.02)


def test_unknown_kind_names_the_key_and_the_kinds():
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator='k4'.*k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def policy_and_reference():
    """Logits of a policy over four tokens, with gradient, and a reference's log-probs; all log-ratios within +-2."""
    logits = torch.tensor([0.3, -0.4, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.4, 0.1], dtype=torch.float64), 0)
    return logits, reference


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    # The expectation over tokens the policy samples, summed out, is the KL divergence.
    logits, reference = policy_and_reference()
    logprobs = torch.log_softmax(logits.detach(), 0)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    assert divergence > 0.1
    torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, reference, kind)).sum(), divergence)


def mean_gradient(estimator):
    """Gradient in the logits of the estimator's mean over tokens sampled by a policy held fixed while sampling."""
    logits, reference = policy_and_reference()
    logprobs = torch.log_softmax(logits, 0)
    (logprobs.detach().exp() * estimator(logprobs, reference)).sum().backward()
    return logits.grad


def gradient_of(divergence):
    logits, reference = policy_and_reference()
    divergence(torch.log_softmax(logits, 0), reference).backward()
    return logits.grad


def test_what_the_estimators_descend():
    reverse = gradient_of(lambda p, q: (p.exp() * (p - q)).sum())
    forward = gradient_of(lambda p, q: (q.exp() * (q - p)).sum())
    assert (reverse - forward).abs().max() > 0.01
    torch.testing.assert_close(mean_gradient(lambda p, q: kl_estimate(p, q, "k1")), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(mean_gradient(lambda p, q: kl_estimate(p, q, "k2")), reverse)
    torch.testing.assert_close(mean_gradient(lambda p, q: kl_estimate(p, q, "k3")), forward)
    torch.testing.assert_close(mean_gradient(lambda p, q: kl_straight_through(p, q, "k3")), reverse)


def test_straight_through_has_the_value_of_its_kind():
    logprobs, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    for kind in ("k1", "k3", "abs"):
        torch.testing.assert_close(kl_straight_through(logprobs, reference, kind), kl_estimate(logprobs, reference, kind))


def test_penalty_is_taken_from_trained_tokens_only():
    # 1 - 0.5 * 0.2 at the first trained token, 0 - 0.5 * 0.4 at the second; the rest as it was, whatever the KL there.
    rewards = kl_penalised_rewards(
        torch.tensor([3.0, 1.0, 0.0, 0.0]),
        torch.tensor([9.0, 0.2, 0.4, torch.nan]),
        torch.tensor([False, True, True, False]),
        kl_coef=0.5,
    )
    assert rewards.tolist() == pytest.approx([3.0, 0.9, -0.2, 0.0])


def adaptive(coef=0.1, target=6.0, horizon=1000):
    return KLController(kind="adaptive", coef=coef, target=target, horizon=horizon)


@pytest.mark.parametrize(
    ("observed", "num_sequences", "coef"),
    [
        (9.0, 50, 0.101),  # 9 / 6 - 1 = 0.5, clipped to 0.2: 0.1 * (1 + 0.2 * 50 / 1000)
        (5.4, 50, 0.0995),  # 5.4 / 6 - 1 = -0.1: 0.1 * (1 - 0.1 * 0.05)
        (0.0, 50, 0.099),  # -1, clipped to -0.2
        (-3.0, 50, 0.099),  # k1 may come out negative
        (6.0, 50, 0.1),  # on target
        (0.0, 8000, 0.08),  # eight horizons count as one: 0.1 * (1 - 0.2), never below 0
    ],
)
def test_adaptive_controller_by_hand(observed, num_sequences, coef):
    assert adaptive().updated(observed, num_sequences).coef == pytest.approx(coef)


def test_adaptive_controller_is_a_value():
    controller = adaptive()
    controller.updated(9.0, 50)
    assert controller == adaptive()


def test_fixed_controller_never_moves():
    controller = KLController(kind="fixed", coef=0.1, target=6.0, horizon=1000)
    assert controller.updated(100.0, 50) == controller


def test_adaptive_controller_holds_its_target():
    # A policy whose KL answers the coefficient as KL = 1 / coef settles at the target.
    controller = adaptive(coef=1.0, target=4.0, horizon=100)
    for _ in range(300):
        controller = controller.updated(1 / controller.coef, 50)
    assert math.isclose(1 / controller.coef, 4.0, rel_tol=0.01)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kind": "adaptiv"}, "kl_controller"),
        ({"coef": -0.1}, "kl_coef"),
        ({"target": 0.0}, "kl_target"),
        ({"horizon": 0}, "kl_horizon"),
    ],
)
def test_impossible_controllers_name_the_key(change, key):
    with pytest.raises(ConfigError, match=rf"^algorithm\.{key}="):
        KLController(**{"kind": "adaptive", "coef": 0.1, "target": 6.0, "horizon": 1000, **change})
