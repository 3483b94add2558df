"""The Algorithm spec: what the configuration builds, one step's advantages, mini-batches, the automatic choice."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import PolicyLoss, ValueLoss
from verl.algorithms.select import build_algorithm, choose_algorithm
from verl.algorithms.spec import REWARD_KL_METRIC, GAEEstimator, GRPOEstimator, UpdatePlan
from verl.config.schema import ActorConfig, AlgorithmConfig, Config, CriticConfig, DataConfig, RolloutConfig
from verl.data.batch import TokenBatch
from verl.engines.train.base import ModelOutputs
from verl.errors import ConfigError
from verl.observe.metrics import metric_values, unknown_metrics


def make(n=8, train_batch_size=256, actor=None, critic=None, **algorithm):
    config = Config(
        algorithm=AlgorithmConfig(**algorithm),
        actor=ActorConfig(**(actor or {})),
        critic=CriticConfig(**(critic or {})),
        rollout=RolloutConfig(n=n),
        data=DataConfig(train_batch_size=train_batch_size, max_response_length=64),
    )
    return build_algorithm(config)


def four_answers(**columns):
    """Two interleaved groups of two, rewards 1, 3, 0, 3; a prompt token and two answer tokens each."""
    return TokenBatch(
        torch.tensor([0, 3, 6, 9, 12]),
        input_ids=torch.arange(12),
        loss_mask=torch.tensor([False, True, True] * 4),
        group_ids=torch.tensor([5, 2, 5, 2]),
        rewards=torch.tensor([1.0, 3.0, 0.0, 3.0]),
        **columns,
    )


def test_defaults_build_strictly_on_policy_grpo():
    algorithm = make()
    assert algorithm.name == "grpo"
    assert algorithm.estimator == GRPOEstimator(norm_by_std=True)
    assert algorithm.policy_loss == PolicyLoss(norm_length=64)
    assert algorithm.value_loss is None
    assert not (algorithm.uses_critic or algorithm.uses_reference or algorithm.needs_old_logprobs)
    assert algorithm.old_logprobs == "policy"
    assert algorithm.updates_per_step(256) == 1


def test_every_setting_reaches_its_place():
    algorithm = make(
        adv_estimator="gae",
        gamma=0.9,
        lam=0.8,
        whiten_advantages=False,
        kl_in_reward=True,
        kl_coef=0.05,
        kl_controller="adaptive",
        kl_target=3.0,
        kl_horizon=500,
        kl_loss_coef=0.02,
        kl_estimator="k2",
        train_batch_size=16,
        actor={
            "mini_batch_size": 8,
            "ppo_epochs": 3,
            "clip_low": 0.1,
            "clip_high": 0.3,
            "dual_clip": None,
            "entropy_coef": 0.01,
            "loss_aggregation": "seq-mean-token-sum-norm",
        },
        critic={"mini_batch_size": 4, "epochs": 2, "value_clip": 0.4, "loss_coef": 0.5},
    )
    assert algorithm.name == "ppo"
    assert algorithm.estimator == GAEEstimator(gamma=0.9, lam=0.8, whiten=False)
    assert algorithm.policy_loss == PolicyLoss(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=None,
        entropy_coef=0.01,
        kl_coef=0.02,
        kl_estimator="k2",
        aggregation="seq-mean-token-sum-norm",
        norm_length=64,
    )
    assert algorithm.value_loss == ValueLoss(value_clip=0.4, coef=0.5)
    assert algorithm.actor_updates == UpdatePlan(mini_batch_size=8, epochs=3)
    assert algorithm.critic_updates == UpdatePlan(mini_batch_size=4, epochs=2)
    controller = algorithm.kl_controller
    assert (controller.kind, controller.coef, controller.target, controller.horizon) == ("adaptive", 0.05, 3.0, 500)
    assert algorithm.kl_estimator == "k2"
    assert algorithm.uses_critic
    assert algorithm.uses_reference
    assert algorithm.needs_old_logprobs
    assert algorithm.updates_per_step(16) == 6
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm  # it travels to workers


def test_the_critic_takes_the_actors_mini_batches_unless_told():
    assert make(adv_estimator="gae", actor={"mini_batch_size": 8}).critic_updates.mini_batch_size == 8


@pytest.mark.parametrize(
    ("settings_", "source"),
    [
        ({}, "policy"),
        ({"actor": {"mini_batch_size": 256}}, "policy"),  # one mini-batch is one update
        ({"actor": {"mini_batch_size": 128}}, "trainer"),
        ({"actor": {"ppo_epochs": 2}}, "trainer"),
        ({"kl_in_reward": True}, "trainer"),  # the penalty needs the policy's log-probs before the update
        ({"old_logprobs": "trainer"}, "trainer"),
        ({"old_logprobs": "generator", "actor": {"ppo_epochs": 2}}, "generator"),
    ],
)
def test_where_old_logprobs_come_from(settings_, source):
    algorithm = make(**settings_)
    assert algorithm.old_logprobs == source
    assert algorithm.needs_old_logprobs == (source == "trainer")


@pytest.mark.parametrize(
    ("settings_", "key"),
    [
        ({"adv_estimator": "grpoo"}, "algorithm.adv_estimator"),
        ({"n": 1}, "rollout.n"),
        ({"actor": {"mini_batch_size": 0}}, "actor.mini_batch_size"),
        ({"actor": {"ppo_epochs": 0}}, "actor.ppo_epochs"),
        ({"critic": {"mini_batch_size": -1}}, "critic.mini_batch_size"),
        ({"critic": {"epochs": 0}}, "critic.epochs"),
        ({"old_logprobs": "rollout"}, "algorithm.old_logprobs"),
        ({"adv_estimator": "gae", "gamma": 1.1}, "algorithm.gamma"),
        ({"adv_estimator": "gae", "lam": -0.1}, "algorithm.lam"),
        ({"kl_loss_coef": 0.1, "kl_estimator": "abs"}, "algorithm.kl_estimator"),
    ],
)
def test_impossible_settings_name_their_key(settings_, key):
    with pytest.raises(ConfigError) as error:
        make(**settings_)
    assert str(error.value).startswith(f"{key}=")
    assert "\n" not in str(error.value)


def test_ppo_works_with_one_sample_a_prompt():
    assert make(adv_estimator="gae", n=1).name == "ppo"


def test_grpo_step_by_hand():
    # Group 5: 1 and 0, mean 0.5, unbiased std 0.70710678: +-0.70710578. Group 2: 3 and 3, so 0.
    batch, metrics = make().advantages(four_answers())
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert batch.advantages.tolist() == pytest.approx([0, a, a, 0, 0, 0, 0, -a, -a, 0, 0, 0])
    assert batch.token_rewards.tolist() == [0, 0, 1, 0, 0, 3, 0, 0, 0, 0, 0, 3]
    assert "returns" not in batch
    assert metric_values(metrics) == pytest.approx(
        {
            "reward/mean": 1.75,
            "reward/max": 3.0,
            "reward/min": 0.0,
            "reward/std": math.sqrt((0.75**2 + 1.25**2 + 1.75**2 + 1.25**2) / 4),
            "reward/zero_std_groups": 0.5,
            "advantages/mean": 0.0,
            "advantages/max": a,
            "advantages/min": -a,
            "advantages/std": a / math.sqrt(2),
        }
    )


def test_grpo_counts_the_reward_of_an_answer_that_trains_nothing():
    # The second answer of group 5 has every token masked; its reward 0 is still the other's baseline.
    batch = four_answers()
    mask = batch.loss_mask.clone()
    mask[6:9] = False
    rewards = torch.tensor([1.0, 3.0, -1.0, 3.0])  # group 5: 1 and -1, mean 0
    batch, _ = make(norm_adv_by_std=False).advantages(batch.with_columns(loss_mask=mask, rewards=rewards))
    assert batch.advantages.tolist() == [0, 1, 1] + [0] * 9


def test_ppo_step_by_hand():
    # gamma = lambda = 1: returns are the rewards, advantages reward - value. The critic says 1 everywhere:
    # advantages 0, 0 | 2, 2 | -1, -1 | 2, 2. Returns vary, value - return varies as much: nothing is explained.
    values = torch.tensor([0.0, 1, 1] * 4)
    batch, metrics = make(adv_estimator="gae", whiten_advantages=False).advantages(four_answers(values=values))
    assert batch.advantages.tolist() == [0, 0, 0, 0, 2, 2, 0, -1, -1, 0, 2, 2]
    assert batch.returns.tolist() == [0, 1, 1, 0, 3, 3, 0, 0, 0, 0, 3, 3]
    read = metric_values(metrics)
    assert read["critic/explained_variance"] == pytest.approx(0.0)
    assert (read["returns/mean"], read["returns/max"], read["critic/values/mean"]) == (1.75, 3.0, 1.0)


def test_a_critic_that_knows_the_returns_explains_them():
    values = torch.tensor([0.0, 1, 1, 0, 3, 3, 0, 0, 0, 0, 3, 3])
    _, metrics = make(adv_estimator="gae").advantages(four_answers(values=values))
    assert metrics["critic/explained_variance"].value == pytest.approx(1.0)


def test_ppo_whitens_over_trained_tokens():
    # Advantages 0, 0, 2, 2, -1, -1, 2, 2: mean 0.75, unbiased variance (2 * .5625 + 4 * 1.5625 + 2 * 3.0625) / 7 = 13.5 / 7.
    batch, metrics = make(adv_estimator="gae").advantages(four_answers(values=torch.tensor([9.0, 1, 1] * 4)))
    std = math.sqrt(13.5 / 7)
    assert batch.advantages[:6].tolist() == pytest.approx([0, -0.75 / std, -0.75 / std, 0, 1.25 / std, 1.25 / std], rel=1e-5)
    assert batch.returns[1].item() == 1.0  # of the advantages before whitening
    assert metrics["advantages/mean"].value == pytest.approx(0.0, abs=1e-6)


def test_kl_in_the_reward_by_hand():
    # d = 0.5 (k1) at every trained token, nan at prompts: with coefficient 0.2 each token costs 0.1, each answer 1 nat.
    old = torch.tensor([torch.nan, -1.0, -1.0] * 4)
    batch = four_answers(old_logprobs=old, ref_logprobs=old - 0.5)
    algorithm = make(kl_in_reward=True, kl_coef=0.2, kl_estimator="k1")
    penalised, metrics = algorithm.advantages(batch)
    assert penalised.token_rewards[:6].tolist() == pytest.approx([0, -0.1, 0.9, 0, -0.1, 2.9])
    read = metric_values(metrics)
    assert read[REWARD_KL_METRIC] == pytest.approx(1.0)
    assert read["reward/kl_penalty"] == pytest.approx(0.2)
    assert read["reward/kl_coef"] == 0.2
    assert read["reward/mean"] == 1.75  # the reward itself, before the penalty
    # The controller's later coefficient takes the initial one's place.
    later, _ = algorithm.advantages(batch, kl_coef=0.4)
    assert later.token_rewards[1].item() == pytest.approx(-0.2)


def test_kl_in_the_reward_enters_grpo_scores():
    # Only the first answer drifted: its score is 1 - 1 * 2 * 0.5 = 0, as its group's other one.
    old = torch.tensor([0.0, -1.0, -1.0] * 4)
    reference = old.clone()
    reference[1:3] -= 0.5
    batch = four_answers(old_logprobs=old, ref_logprobs=reference)
    penalised, _ = make(kl_in_reward=True, kl_coef=1.0, kl_estimator="k1").advantages(batch)
    assert penalised.advantages.tolist() == [0.0] * 12


def test_generator_logprobs_become_the_old_ones():
    generator_logprobs = -torch.arange(12.0)
    batch, _ = make(old_logprobs="generator").advantages(four_answers(generator_logprobs=generator_logprobs))
    assert torch.equal(batch.old_logprobs, generator_logprobs)


def test_every_metric_is_in_the_table():
    # All that a step may report, PPO with everything on: driver statistics and both losses.
    algorithm = make(adv_estimator="gae", kl_in_reward=True, kl_loss_coef=0.1, actor={"entropy_coef": 0.1})
    noise = torch.full((12,), -1.0)
    batch, metrics = algorithm.advantages(four_answers(values=noise, old_logprobs=noise, ref_logprobs=noise))
    outputs = ModelOutputs(logprobs=noise, entropy=noise, values=noise)
    metrics |= algorithm.policy_loss(batch, outputs).metrics | algorithm.value_loss(batch, outputs).metrics
    assert unknown_metrics(metrics) == []
    assert metrics.keys() >= {"reward/kl_coef", "critic/explained_variance", "actor/kl_loss", "actor/entropy", "critic/vf_loss"}


def grouped_batch(group_ids):
    n = len(group_ids)
    return TokenBatch(
        torch.arange(n + 1) * 2, input_ids=torch.arange(2 * n), sequence_ids=torch.arange(n), group_ids=torch.tensor(group_ids)
    )


@settings(max_examples=50, deadline=None)
@given(
    group_ids=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    mini_batch_size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_mini_batches_cover_each_epoch_with_whole_groups(group_ids, mini_batch_size, epochs, seed):
    batch, num_groups = grouped_batch(group_ids), len(set(group_ids))
    plan = UpdatePlan(mini_batch_size=mini_batch_size, epochs=epochs)
    mini_batches = list(plan.minibatches(batch, seed))
    assert len(mini_batches) == plan.updates_per_step(num_groups)
    per_epoch = len(mini_batches) // epochs
    for e in range(epochs):
        epoch = mini_batches[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(torch.cat([m.sequence_ids for m in epoch]).tolist()) == list(range(len(group_ids)))
        groups = [set(m.group_ids.tolist()) for m in epoch]
        assert sum(map(len, groups)) == num_groups  # no group is in two mini-batches
        sizes = [len(g) for g in groups]
        assert max(sizes) <= mini_batch_size
        assert max(sizes) - min(sizes) <= 1  # 10 groups by 4: 4, 3, 3, not 4, 4, 2
    assert all(m.sequence_ids.tolist() == sorted(m.sequence_ids.tolist()) for m in mini_batches)


def membership(plan, batch, seed):
    return [m.sequence_ids.tolist() for m in plan.minibatches(batch, seed)]


def test_mini_batches_are_a_function_of_the_seed():
    batch, plan = grouped_batch([g for g in range(12) for _ in range(2)]), UpdatePlan(mini_batch_size=4, epochs=2)
    first = membership(plan, batch, 0)
    assert first == membership(plan, batch, 0)
    assert first != membership(plan, batch, 1)
    assert first[:3] != first[3:]  # each epoch has its own order


def test_one_mini_batch_is_the_batch_itself():
    batch = grouped_batch([0, 1, 0, 1])
    assert list(UpdatePlan().minibatches(batch, 0)) == [batch]
    assert list(UpdatePlan(mini_batch_size=2, epochs=2).minibatches(batch, 0)) == [batch, batch]


def test_the_algorithm_uses_the_two_plans():
    algorithm = replace(
        make(), actor_updates=UpdatePlan(mini_batch_size=2), critic_updates=UpdatePlan(mini_batch_size=1, epochs=2)
    )
    batch = grouped_batch([0, 1, 2, 3])
    assert membership(algorithm.actor_updates, batch, 7) == [m.sequence_ids.tolist() for m in algorithm.minibatches(batch, 7)]
    assert len(list(algorithm.minibatches(batch, 7))) == algorithm.updates_per_step(4) == 2
    assert len(list(algorithm.critic_minibatches(batch, 7))) == 8


@pytest.mark.parametrize(
    ("evidence", "choice", "first_reason"),
    [
        ({"task_type": "math_reasoning"}, "grpo", "task type 'math_reasoning'"),
        ({"task_type": "dialogue"}, "gae", "task type 'dialogue'"),
        ({"task_type": "something_else"}, "grpo", "nothing speaks for a critic"),
        ({}, "grpo", "nothing speaks for a critic"),
        ({"verifiable_reward": True}, "grpo", "the reward is verifiable"),
        ({"verifiable_reward": False}, "gae", "the reward is learned"),
        ({"verifiable_reward": False, "task_type": "math"}, "gae", "the reward is learned"),  # the reward outweighs the label
        ({"verifiable_reward": True, "multi_turn": True}, "grpo", "the reward is verifiable"),
        ({"multi_turn": True}, "gae", "episodes have several turns"),
        ({"verifiable_reward": True, "dense_reward": True}, "gae", "the reward is dense"),
        ({"verifiable_reward": True, "samples_per_prompt": 1}, "gae", "one sample a prompt"),
        ({"verifiable_reward": True, "samples_per_prompt": 8}, "grpo", "the reward is verifiable"),
    ],
)
def test_automatic_choice(evidence, choice, first_reason):
    chosen = choose_algorithm(**evidence)
    assert chosen.adv_estimator == choice
    assert chosen.reasons[0].favours == choice
    assert chosen.reasons[0].text.startswith(first_reason)


def test_reasons_against_are_told_too():
    chosen = choose_algorithm(verifiable_reward=True, task_type="dialogue")
    assert [r.favours for r in chosen.reasons] == ["grpo", "gae"]
