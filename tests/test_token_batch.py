"""TokenBatch and the two splitters: nothing is lost, duplicated or reordered, whatever the lengths."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.balance import karmarkar_karp, pack_by_budget
from verl.data.batch import COLUMNS, TokenBatch
from verl.data.types import Prompt, Segment, Trajectory

PROMPT = Prompt(uid="rows:0", messages=())
lengths_lists = st.lists(st.integers(1, 9), min_size=1, max_size=12)
quick = settings(max_examples=60, deadline=None)


def make_batch(lengths: list[int]) -> TokenBatch:
    """Every token and sequence carries a value of its own, so that any loss or swap shows."""
    total = sum(lengths)
    tokens = torch.arange(total)
    return TokenBatch(
        torch.tensor([0, *np.cumsum(lengths)]),
        input_ids=tokens + 1000,
        loss_mask=tokens % 3 == 0,
        generator_logprobs=-tokens.float(),
        sequence_ids=torch.arange(len(lengths)),
        rewards=torch.arange(len(lengths)) * 0.5,
    )


def sequences(batch: TokenBatch) -> list[tuple]:
    """A batch as plain rows: one tuple a sequence with all that belongs to it."""
    cu = batch.cu_seqlens.tolist()
    rows = []
    for i in range(batch.num_sequences):
        token = {n: getattr(batch, n)[cu[i] : cu[i + 1]].tolist() for n in batch.column_names if COLUMNS[n].level == "token"}
        sequence = {n: getattr(batch, n)[i].item() for n in batch.column_names if COLUMNS[n].level == "sequence"}
        rows.append((token, sequence))
    return rows


@quick
@given(lengths_lists, st.data())
def test_select_takes_whole_sequences_in_the_order_asked(lengths, data):
    batch = make_batch(lengths)
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    rows = sequences(batch)
    assert sequences(batch.select(indices)) == [rows[i] for i in indices]


def test_select_by_bool_mask_filters():
    batch = make_batch([2, 3, 1])
    assert sequences(batch.select(torch.tensor([True, False, True]))) == sequences(batch.select([0, 2]))


@quick
@given(lengths_lists, st.integers(1, 6))
def test_split_then_concatenate_is_a_permutation(lengths, parts):
    batch = make_batch(lengths)
    indices = batch.split_indices(parts)
    split = batch.split(parts)
    assert len(split) == parts
    assert sorted(i for part in indices for i in part) == list(range(len(lengths)))
    order = torch.cat([b.sequence_ids for b in split])
    assert sequences(TokenBatch.concatenate(split).select(torch.argsort(order))) == sequences(batch)


@quick
@given(lengths_lists, st.integers(1, 20))
def test_micro_batches_keep_the_budget_and_every_sequence(lengths, budget):
    batch = make_batch(lengths)
    rows = sequences(batch)
    seen = []
    for indices, micro in batch.micro_batches(budget):
        assert micro.num_tokens <= budget or len(indices) == 1
        assert sequences(micro) == [rows[i] for i in indices]
        seen += indices
    assert sorted(seen) == list(range(len(lengths)))


@quick
@given(lengths_lists, st.integers(1, 20))
def test_scatter_tokens_undoes_micro_batching(lengths, budget):
    batch = make_batch(lengths)
    parts = [(indices, micro.generator_logprobs) for indices, micro in batch.micro_batches(budget)]
    assert torch.equal(batch.scatter_tokens(parts), batch.generator_logprobs)


def test_scatter_tokens_refuses_the_wrong_number_of_values():
    with pytest.raises(ValueError, match=r"shape \(4,\) for 5 tokens of 2 sequences"):
        make_batch([2, 3]).scatter_tokens([([0, 1], torch.zeros(4))])


@quick
@given(lengths_lists)
def test_pickle_and_file_round_trips_keep_every_bit(tmp_path_factory, lengths):
    batch = make_batch(lengths)
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    batch.save(path)
    for copy in (pickle.loads(pickle.dumps(batch)), TokenBatch.load(path)):
        assert sequences(copy) == sequences(batch)
        assert [getattr(copy, n).dtype for n in batch.column_names] == [COLUMNS[n].dtype for n in batch.column_names]


def test_pickle_leaves_the_arrays_out_of_band():
    batch = make_batch([50, 70])
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1 + len(batch.column_names)
    assert len(payload) < 2000
    assert sequences(pickle.loads(payload, buffers=[bytes(b.raw()) for b in buffers])) == sequences(batch)


def test_columns_that_share_memory_can_be_saved(tmp_path):
    batch = make_batch([2, 3])
    batch = batch.with_columns(old_logprobs=batch.generator_logprobs)
    batch.save(tmp_path / "b.safetensors")
    assert sequences(TokenBatch.load(tmp_path / "b.safetensors")) == sequences(batch)


def test_an_empty_batch_survives_every_operation(tmp_path):
    empty = make_batch([2, 3]).select([])
    assert (empty.num_sequences, empty.num_tokens, list(empty.micro_batches(8))) == (0, 0, [])
    empty.save(tmp_path / "b.safetensors")
    assert TokenBatch.load(tmp_path / "b.safetensors").column_names
    assert sequences(TokenBatch.concatenate([empty, make_batch([2])])) == sequences(make_batch([2]))


def test_a_batch_cannot_be_changed():
    batch = make_batch([2, 3])
    before = sequences(batch)
    with pytest.raises(AttributeError, match="immutable"):
        batch.rewards = torch.zeros(2)
    with pytest.raises(AttributeError, match="immutable"):
        del batch.cu_seqlens
    other = batch.with_columns(rewards=torch.tensor([7.0, 8.0]))
    assert sequences(batch) == before
    assert other.rewards.tolist() == [7.0, 8.0]


def test_columns_carry_no_gradient():
    values = torch.zeros(5, requires_grad=True)
    assert not make_batch([2, 3]).with_columns(values=values * 2).values.requires_grad


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda b: TokenBatch(torch.tensor([1, 2]), input_ids=torch.zeros(2)), ValueError, "start at 0"),
        (lambda b: TokenBatch(torch.tensor([0, 2, 2]), input_ids=torch.zeros(2)), ValueError, "sequence 1 has 0 tokens"),
        (lambda b: TokenBatch(torch.tensor([0, 2]), rewards=torch.zeros(1)), ValueError, "needs the column input_ids"),
        (lambda b: b.with_columns(advantage=torch.zeros(5)), KeyError, "unknown column 'advantage'"),
        (lambda b: b.with_columns(values=torch.zeros(4)), ValueError, r"values has shape \(4,\), expected \[5, ...\]"),
        (lambda b: b.with_columns(rewards=torch.tensor(1.0)), ValueError, r"rewards has shape \(\), expected \[2, ...\]"),
        (lambda b: b.advantages, AttributeError, "no column 'advantages'.*it has input_ids"),
        (lambda b: TokenBatch.concatenate([]), ValueError, "nothing to concatenate"),
        (
            lambda b: TokenBatch.concatenate([b, b.with_columns(values=torch.zeros(5))]),
            ValueError,
            r"columns differ: \['values'\]",
        ),
        (lambda b: list(b.micro_batches(0)), ValueError, "at least 1 token"),
        (lambda b: b.split(0), ValueError, "at least 1"),
    ],
)
def test_mistakes_are_named(build, error, words):
    with pytest.raises(error, match=words):
        build(make_batch([2, 3]))


def test_positions_lengths_and_sums_by_hand():
    batch = make_batch([2, 3])
    assert batch.lengths.tolist() == [2, 3]
    assert batch.sequence_index().tolist() == [0, 0, 1, 1, 1]
    assert batch.positions().tolist() == [0, 1, 0, 1, 2]
    assert batch.loss_mask.tolist() == [True, False, False, True, False]
    assert batch.response_lengths().tolist() == [1, 1]
    assert batch.sequence_sum(batch.generator_logprobs).tolist() == [-1.0, -9.0]


def make_trajectory(reward: float | None = 1.0, ids: type = list) -> Trajectory:
    return Trajectory(
        prompt=PROMPT,
        prompt_ids=(1, 2),
        segments=(
            Segment(token_ids=ids([3, 4]), is_model=True, logprobs=ids([-0.5, -0.25]), policy_versions=ids([7, 7])),
            Segment(token_ids=ids([5]), is_model=False),
            Segment(token_ids=ids([6, 8]), is_model=True, logprobs=ids([-1.0, -2.0]), policy_versions=ids([7, 9])),
        ),
        finish_reason="length",
        group_id=4,
        sample_index=0,
        reward=reward,
    )


@pytest.mark.parametrize("ids", [list, tuple, np.array, torch.tensor])
def test_from_trajectories_by_hand(ids):
    batch = TokenBatch.from_trajectories([make_trajectory(ids=ids), make_trajectory(2.0, ids=ids)])
    assert batch.cu_seqlens.tolist() == [0, 7, 14]
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 8] * 2
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, True] * 2
    assert batch.generator_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1, -2] * 2
    assert batch.policy_versions.tolist() == [-1, -1, 7, 7, -1, 7, 9] * 2
    assert batch.sequence_ids.tolist() == [0, 1]
    assert batch.group_ids.tolist() == [4, 4]
    assert batch.truncated.tolist() == [True, True]
    assert batch.rewards.tolist() == [1.0, 2.0]


def test_from_trajectories_without_a_reward_has_no_rewards_column():
    assert "rewards" not in TokenBatch.from_trajectories([make_trajectory(), make_trajectory(None)])


def test_from_trajectories_refuses_a_segment_with_missing_logprobs():
    segment = Segment(token_ids=[3, 4], is_model=True, logprobs=[-0.5], policy_versions=[0, 0])
    bad = Trajectory(prompt=PROMPT, prompt_ids=(1,), segments=(segment,), finish_reason="stop", group_id=0, sample_index=0)
    with pytest.raises(ValueError, match="rows:0: a model segment of 2 tokens has 1 log-probs"):
        TokenBatch.from_trajectories([bad])


def spread(weights: list[int], parts: list[list[int]]) -> int:
    totals = [sum(weights[i] for i in part) for part in parts]
    return max(totals) - min(totals)


def greedy(weights: list[int], num_parts: int) -> list[list[int]]:
    """Longest item first onto the lightest part: the usual baseline."""
    parts = [SimpleNamespace(total=0, items=[]) for _ in range(num_parts)]
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min(parts, key=lambda part: part.total)
        lightest.total += weights[i]
        lightest.items.append(i)
    return [part.items for part in parts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 9))
def test_karmarkar_karp_is_a_partition_with_bounded_spread(weights, num_parts):
    parts = karmarkar_karp(weights, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)
    assert spread(weights, parts) <= max(weights, default=0)
    assert sum(not part for part in parts) == max(0, num_parts - len(weights))


def test_karmarkar_karp_by_hand():
    # Differencing 8,7,6,5,4: (8-7), (6-5), then 4 against the difference 1, ... ends with totals 16 and 14.
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_karmarkar_karp_is_no_worse_than_greedy_on_ragged_lengths():
    rng = random.Random(0)
    ours = theirs = 0
    for _ in range(40):
        weights = [rng.randint(50, 2000) for _ in range(rng.randint(32, 128))]
        ours += spread(weights, karmarkar_karp(weights, 8))
        theirs += spread(weights, greedy(weights, 8))
    assert ours < theirs


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_packing_is_a_partition_within_budget_and_as_tight_as_first_fit(weights, budget):
    groups = pack_by_budget(weights, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(weights)))
    assert [group[0] for group in groups] == sorted(min(group) for group in groups)
    loads = [sum(weights[i] for i in group) for group in groups]
    assert all(load <= budget or len(group) == 1 for load, group in zip(loads, groups, strict=True))
    # First fit leaves no two groups that could have been one.
    assert len(loads) < 2 or sum(sorted(loads)[:2]) > budget


def test_packing_by_hand():
    # 7 opens a group, 6 another, 4 joins the 6, 3 joins the 7, 2 opens a third; 12 is over the budget of 10.
    assert pack_by_budget([4, 7, 2, 12, 3, 6], 10) == [[0, 5], [1, 4], [2], [3]]
