"""Losses: constants and gradients by hand, and sums and counts that no split can change."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import PolicyLoss, SFTLoss, ValueLoss
from verl.data.batch import TokenBatch
from verl.engines.train.base import ModelOutputs
from verl.errors import ConfigError
from verl.observe.metrics import merge_metrics, metric_values

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def one_answer(**columns):
    """One sequence, a prompt token and then trained tokens; each column is given for the trained tokens."""
    rows = {name: torch.tensor([0.0, *values]) for name, values in columns.items()}
    length = len(next(iter(rows.values())))
    return TokenBatch(
        torch.tensor([0, length]),
        input_ids=torch.arange(length),
        loss_mask=torch.arange(length) > 0,
        **rows,
    )


def run(loss, batch, **outputs):
    """(total, gradient in the first output, metric values); outputs are given for the trained tokens."""
    leaves = {name: torch.tensor([0.0, *values], requires_grad=True) for name, values in outputs.items()}
    result = loss(batch, ModelOutputs(**leaves))
    result.total.backward()
    gradient = next(iter(leaves.values())).grad
    assert gradient[0] == 0  # the prompt token
    return result.total.item(), gradient[1:].tolist(), metric_values(result.metrics)


# Clip at 0.8 and 1.3, dual clip at 3. The gradient in log policy of -A r is -A r; of a clipped term, 0.
CLIP_CASES = [
    # advantage, ratio, loss, gradient
    (1.0, 1.5, -1.3, 0.0),  # clipped above
    (1.0, 1.1, -1.1, -1.1),
    (1.0, 0.5, -0.5, -0.5),  # below the range, but the pessimistic bound is the unclipped term
    (-1.0, 0.5, 0.8, 0.0),  # clipped below
    (-1.0, 0.9, 0.9, 0.9),
    (-1.0, 1.5, 1.5, 1.5),  # above the range, unclipped
    (-1.0, 4.0, 3.0, 0.0),  # held by the dual clip
    (-2.0, 2.0, 4.0, 4.0),  # under it: 3 * 2 = 6
    (-2.0, 3.5, 6.0, 0.0),
    (1.0, 4.0, -1.3, 0.0),  # the dual clip is for negative advantages alone
    (0.0, 4.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("advantage", "ratio", "value", "gradient"), CLIP_CASES)
def test_clipped_surrogate_by_hand(advantage, ratio, value, gradient):
    batch = one_answer(advantages=[advantage], old_logprobs=[-1.0])
    loss = PolicyLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    total, gradients, _ = run(loss, batch, logprobs=[-1.0 + math.log(ratio)])
    assert total == pytest.approx(value, abs=1e-5)
    assert gradients == pytest.approx([gradient], abs=1e-5)
    assert loss.count(batch) == 1


def test_without_dual_clip_a_negative_advantage_is_unbounded():
    batch = one_answer(advantages=[-1.0], old_logprobs=[-1.0])
    total, gradients, metrics = run(PolicyLoss(dual_clip=None), batch, logprobs=[-1.0 + math.log(4.0)])
    assert (total, *gradients) == pytest.approx((4.0, 4.0), abs=1e-5)
    assert "actor/dual_clip_fraction" not in metrics


def test_log_ratio_is_clamped_at_20_nats():
    batch = one_answer(advantages=[-1.0], old_logprobs=[-100.0])
    total, gradients, _ = run(PolicyLoss(dual_clip=None), batch, logprobs=[-1.0])
    assert total == pytest.approx(math.exp(20.0), rel=1e-5)
    assert gradients == [0.0]


def test_policy_metrics_by_hand():
    # All eleven cases as one answer: ratios sum to 1.5 + 1.1 + .5 + .5 + .9 + 1.5 + 4 + 2 + 3.5 + 4 + 4 = 23.5.
    advantages, ratios, values, _ = zip(*CLIP_CASES, strict=True)
    batch = one_answer(advantages=advantages, old_logprobs=[-1.0] * 11)
    loss = PolicyLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    _, _, metrics = run(loss, batch, logprobs=[-1.0 + math.log(r) for r in ratios])
    assert metrics["actor/pg_loss"] == pytest.approx(sum(values) / 11, abs=1e-5)
    assert metrics["actor/loss"] == metrics["actor/pg_loss"]
    assert metrics["actor/ratio_mean"] == pytest.approx(23.5 / 11, rel=1e-5)
    assert metrics["actor/ratio_max"] == pytest.approx(4.0, rel=1e-5)
    assert metrics["actor/ratio_min"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["actor/clip_fraction_high"] == pytest.approx(2 / 11)
    assert metrics["actor/clip_fraction_low"] == pytest.approx(1 / 11)
    assert metrics["actor/clip_fraction"] == pytest.approx(3 / 11)
    assert metrics["actor/dual_clip_fraction"] == pytest.approx(2 / 11)
    assert metrics["actor/approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 11, rel=1e-5)
    assert metrics["actor/entropy_estimate"] == pytest.approx(1 - sum(map(math.log, ratios)) / 11, rel=1e-5)


def test_on_policy_gradient_is_reinforce():
    # No old log-probs: ratio 1, so the loss is -A and its gradient -A, at any log-prob.
    batch = one_answer(advantages=[2.0, -0.5, 0.0])
    total, gradients, metrics = run(PolicyLoss(), batch, logprobs=[-3.0, -0.1, -1.0])
    assert total == pytest.approx(-1.5)
    assert gradients == pytest.approx([-2.0, 0.5, 0.0])
    assert metrics["actor/ratio_max"] == metrics["actor/ratio_min"] == 1.0
    assert metrics["actor/approx_kl"] == metrics["actor/clip_fraction"] == 0.0


def test_on_policy_equals_old_logprobs_of_the_policy_itself():
    logprobs = [-3.0, -0.1, -1.0]
    implied = one_answer(advantages=[2.0, -0.5, 1.0])
    given_ = implied.with_columns(old_logprobs=torch.tensor([0.0, *logprobs]))
    assert run(PolicyLoss(), implied, logprobs=logprobs) == run(PolicyLoss(), given_, logprobs=logprobs)


def test_entropy_bonus_and_kl_term_by_hand():
    # On-policy with A = 1 and 2: L_pg = -3. Entropy 0.5 + 1.5 = 2. d = 0.5 and 0: k2 = 0.125 and 0.
    #   total = -3 - 0.1 * 2 + 0.4 * 0.125 = -3.15; gradient in log policy: -A + 0.4 * d = -0.8, -2
    batch = one_answer(advantages=[1.0, 2.0], ref_logprobs=[-1.5, -1.0])
    loss = PolicyLoss(entropy_coef=0.1, kl_coef=0.4, kl_estimator="k2")
    assert loss.needs_entropy
    total, gradients, metrics = run(loss, batch, logprobs=[-1.0, -1.0], entropy=[0.5, 1.5])
    assert total == pytest.approx(-3.15)
    assert gradients == pytest.approx([-0.8, -2.0])
    assert metrics["actor/entropy"] == pytest.approx(1.0)
    assert metrics["actor/kl_loss"] == metrics["actor/ref_kl"] == pytest.approx(0.0625)
    assert metrics["actor/pg_loss"] == pytest.approx(-1.5)
    assert metrics["actor/loss"] == pytest.approx(-3.15 / 2)


def test_k3_term_by_hand():
    # d = 0.5: k3 = 0.10653066, gradient 0.39346934; times 0.4.
    batch = one_answer(advantages=[0.0], ref_logprobs=[-1.5])
    total, gradients, _ = run(PolicyLoss(kl_coef=0.4), batch, logprobs=[-1.0])
    assert (total, *gradients) == pytest.approx((0.4 * 0.10653066, 0.4 * 0.39346934), abs=1e-6)


def test_gradient_of_the_entropy_bonus():
    batch = one_answer(advantages=[0.0, 0.0])
    entropy = torch.tensor([7.0, 0.5, 1.5], requires_grad=True)
    logprobs = torch.zeros(3, requires_grad=True)
    PolicyLoss(entropy_coef=0.1)(batch, ModelOutputs(logprobs=logprobs, entropy=entropy)).total.backward()
    assert entropy.grad.tolist() == pytest.approx([0.0, -0.1, -0.1])


def test_reference_logprobs_are_reported_without_a_term_in_the_loss():
    batch = one_answer(advantages=[1.0], ref_logprobs=[-1.5])
    total, gradients, metrics = run(PolicyLoss(), batch, logprobs=[-1.0])
    assert (total, *gradients) == (-1.0, -1.0)
    assert metrics["actor/ref_kl"] == pytest.approx(0.10653066, abs=1e-6)
    assert "actor/kl_loss" not in metrics


def test_what_stands_at_untrained_tokens_cannot_reach_the_gradient():
    batch = TokenBatch(
        torch.tensor([0, 3]),
        input_ids=torch.arange(3),
        loss_mask=torch.tensor([False, True, False]),
        advantages=torch.tensor([0.0, 1.0, 0.0]),
        old_logprobs=torch.tensor([torch.nan, -1.0, -torch.inf]),
        ref_logprobs=torch.tensor([torch.inf, -1.0, torch.nan]),
        values=torch.tensor([torch.nan, 0.0, torch.inf]),
        returns=torch.tensor([0.0, 1.0, 0.0]),
    )
    rows = torch.tensor([-torch.inf, -1.0, torch.nan])
    for loss in (PolicyLoss(entropy_coef=0.1, kl_coef=0.1), SFTLoss(), ValueLoss()):
        outputs = {name: rows.clone().requires_grad_() for name in ("logprobs", "entropy", "values")}
        result = loss(batch, ModelOutputs(**outputs))
        result.total.backward()
        assert math.isfinite(result.total.item())
        assert all(math.isfinite(v) for v in metric_values(result.metrics).values())
        for leaf in outputs.values():
            if leaf.grad is not None:
                assert leaf.grad.isfinite().all()
                assert leaf.grad[[0, 2]].tolist() == [0.0, 0.0]


# Value clip 0.5 around an old value of 1, return 2; the gradient of 0.5 (V - R)^2 is V - R.
@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (1.2, 0.32, -0.8),  # inside: 0.5 * 0.8^2
        (1.8, 0.125, 0.0),  # clip to 1.5: 0.5 * max(0.04, 0.25), a constant
        (0.2, 1.62, -1.8),  # clip to 0.5: 0.5 * max(3.24, 2.25), the way back is open
    ],
)
def test_value_clip_by_hand(value, loss, gradient):
    batch = one_answer(values=[1.0], returns=[2.0])
    total, gradients, metrics = run(ValueLoss(value_clip=0.5), batch, values=[value])
    assert (total, *gradients) == pytest.approx((loss, gradient), abs=1e-6)
    assert metrics["critic/vf_loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["critic/clip_fraction"] == float(value == 1.8)


def test_value_loss_without_clip_and_with_a_coefficient():
    # 2 * 0.5 * (0.2^2 + 1^2) over two tokens.
    batch = one_answer(values=[1.0, 1.0], returns=[2.0, 3.0])
    loss = ValueLoss(value_clip=None, coef=2.0)
    total, gradients, metrics = run(loss, batch, values=[1.8, 2.0])
    assert total == pytest.approx(1.04)
    assert gradients == pytest.approx([-0.4, -2.0])
    assert loss.count(batch) == 2
    assert metrics == {"critic/vf_loss": pytest.approx(0.52)}


def uneven_answers():
    """Trained tokens 1, 0 and 3, with losses 4 | | 1, 2, 3 as log-probs; an untrained prompt and tool token each."""
    mask = torch.tensor([False, True, False, False, False, True, False, True, True])
    logprobs = torch.tensor([-9.0, -4, -9, -9, -9, -1, -9, -2, -3])
    return TokenBatch(torch.tensor([0, 2, 4, 9]), input_ids=torch.arange(9), loss_mask=mask), logprobs


@pytest.mark.parametrize(
    ("aggregation", "total", "count"),
    [
        ("token-mean", 10.0, 4),
        ("seq-mean-token-mean", 4 / 1 + 6 / 3, 2),  # the sequence without trained tokens is not counted
        ("seq-mean-token-sum", 4.0 + 6.0, 2),
        ("seq-mean-token-sum-norm", (4 + 6) / 5, 2),
    ],
)
def test_aggregations_by_hand(aggregation, total, count):
    batch, logprobs = uneven_answers()
    loss = SFTLoss(aggregation=aggregation, norm_length=5)
    result = loss(batch, ModelOutputs(logprobs=logprobs))
    assert result.total.item() == pytest.approx(total)
    assert loss.count(batch) == count
    assert metric_values(result.metrics)["sft/loss"] == pytest.approx(total / count)
    # The policy's loss weighs tokens the same way: with A = -loss and ratio 1 its tokens' losses are those above.
    policy = PolicyLoss(aggregation=aggregation, norm_length=5)
    advantages = torch.where(batch.loss_mask, logprobs, 0.0)
    result = policy(batch.with_columns(advantages=advantages), ModelOutputs(logprobs=logprobs))
    assert result.total.item() == pytest.approx(total)
    assert policy.count(batch) == count


def test_a_micro_batch_that_trains_nothing_adds_nothing():
    batch = TokenBatch(
        torch.tensor([0, 2]), input_ids=torch.arange(2), loss_mask=torch.zeros(2, dtype=torch.bool), advantages=torch.zeros(2)
    )
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = PolicyLoss(aggregation="seq-mean-token-mean")
    result = loss(batch, ModelOutputs(logprobs=logprobs))
    result.total.backward()
    assert result.total.item() == loss.count(batch) == 0
    assert logprobs.grad.tolist() == [0.0, 0.0]
    assert "actor/ratio_max" not in result.metrics


def random_batch(seed, num_sequences=6):
    """Ragged sequences, some of them without a trained token, every column a loss reads, and outputs."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (num_sequences,), generator=g)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(cu[-1])
    mask = (torch.rand(n, generator=g) < 0.7) & (torch.rand(num_sequences, generator=g) < 0.8).repeat_interleave(lengths)

    def noise():
        return torch.randn(n, generator=g)

    batch = TokenBatch(
        cu,
        input_ids=torch.arange(n),
        loss_mask=mask,
        advantages=noise() * mask,
        old_logprobs=noise() - 2,
        ref_logprobs=noise() - 2,
        values=noise(),
        returns=noise(),
    )
    return batch, {"logprobs": noise() - 2, "entropy": noise().abs(), "values": noise()}


def losses():
    for aggregation in AGGREGATIONS:
        yield PolicyLoss(aggregation=aggregation, norm_length=8, entropy_coef=0.1, kl_coef=0.2)
        yield SFTLoss(aggregation=aggregation, norm_length=8)
    yield ValueLoss()


def evaluate(loss, batch, outputs, parts):
    """(sum of totals, sum of counts, gradients of the outputs, merged metrics) over parts of the batch's sequences."""
    leaves = {name: values.clone().requires_grad_() for name, values in outputs.items()}
    totals, counts, metrics = [], [], []
    for part in parts:
        tokens = torch.cat([torch.arange(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])) for i in part])
        micro_batch = batch.select(part)
        result = loss(micro_batch, ModelOutputs(**{name: leaf[tokens] for name, leaf in leaves.items()}))
        result.total.backward()
        totals.append(result.total.item())
        counts.append(loss.count(micro_batch))
        metrics.append(result.metrics)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return sum(totals), sum(counts), gradients, metric_values(merge_metrics(metrics))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    order=st.permutations(range(6)),
    cuts=st.sets(st.integers(1, 5)),
)
def test_no_split_or_order_changes_sum_count_gradient_or_metrics(seed, order, cuts):
    batch, outputs = random_batch(seed)
    edges = [0, *sorted(cuts), 6]
    parts = [order[a:b] for a, b in pairwise(edges)]
    for loss in losses():
        total, count, gradients, metrics = evaluate(loss, batch, outputs, [list(range(6))])
        split_total, split_count, split_gradients, split_metrics = evaluate(loss, batch, outputs, parts)
        assert split_total == pytest.approx(total, rel=1e-5, abs=1e-5)
        assert split_count == count
        assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True)
        assert gradients.keys() == split_gradients.keys()
        for name in gradients:
            torch.testing.assert_close(split_gradients[name], gradients[name])


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: PolicyLoss(clip_low=1.5), "actor.clip_low"),
        (lambda: PolicyLoss(clip_high=-0.1), "actor.clip_high"),
        (lambda: PolicyLoss(dual_clip=1.0), "actor.dual_clip"),
        (lambda: PolicyLoss(kl_coef=-1.0), "algorithm.kl_loss_coef"),
        (lambda: PolicyLoss(kl_coef=0.1, kl_estimator="k1"), "algorithm.kl_estimator"),
        (lambda: PolicyLoss(aggregation="mean"), "actor.loss_aggregation"),
        (lambda: SFTLoss(aggregation="seq-mean-token-sum-norm"), "actor.loss_aggregation"),
        (lambda: ValueLoss(value_clip=0.0), "critic.value_clip"),
    ],
)
def test_impossible_settings_name_their_key(make, key):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(f"{key}=")
    assert "\n" not in str(error.value)
