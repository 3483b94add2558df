"""Rows of pieces: prompts that occur more than once are laid down once, and nothing is lost."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.data.batch import TokenBatch
from verl.engines.train.packing import lay_out, micro_batches

# Sequences as (which of three prompts, prompt tokens, response tokens): the same prompt cut at several lengths occurs.
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)


def make_batch(sequences) -> TokenBatch:
    ids, mask, lengths = [], [], []
    for n, (prompt, size, response) in enumerate(sequences):
        ids += [10 * prompt + i for i in range(size)] + [100 + 10 * n + i for i in range(response)]
        mask += [False] * size + [True] * response
        lengths.append(size + response)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return TokenBatch(cu, input_ids=torch.tensor(ids), loss_mask=torch.tensor(mask))


@given(SEQUENCES)
def test_every_token_is_in_the_row_with_its_own_history(sequences):
    batch = make_batch(sequences)
    layout = lay_out(batch)
    assert sum(layout.lengths) <= batch.num_tokens
    tokens = torch.arange(batch.num_tokens) if layout.tokens is None else layout.tokens
    places = torch.arange(batch.num_tokens) if layout.places is None else layout.places
    row = batch.input_ids[tokens]
    assert row.numel() == sum(layout.lengths)
    assert row[places].equal(batch.input_ids)
    pieces = [p.tolist() for p in row.split(layout.lengths)]
    contexts = layout.contexts or [-1] * len(pieces)
    assert all(contexts[c] < 0 for c in contexts if c >= 0)
    whole = [(pieces[c] if c >= 0 else []) + piece for piece, c in zip(pieces, contexts, strict=True)]
    used = [w for i, w in enumerate(whole) if i not in contexts]
    assert sorted(used) == sorted(s.tolist() for s in batch.input_ids.split(batch.lengths.tolist()))
    # The state in which a token was chosen is the row token right before it, and no other sequence's.
    chosen = places[batch.loss_mask]
    assert (places[(batch.loss_mask.nonzero()[:, 0] - 1)] <= chosen - 1).all()
    assert len(set((chosen - 1).tolist())) == chosen.numel()


def test_a_group_shares_all_of_its_prompt_but_the_last_token():
    batch = make_batch([(0, 4, 2), (1, 3, 1), (0, 4, 3), (2, 5, 1)])
    layout = lay_out(batch)
    assert layout.lengths == [3, 3, 4, 4, 6]
    assert layout.contexts == [-1, 0, 0, -1, -1]


def test_nothing_shared_leaves_the_batch_as_it_is():
    batch = make_batch([(0, 4, 2), (1, 3, 1), (0, 3, 3), (0, 1, 1), (0, 1, 1), (2, 5, 0), (2, 5, 0)])
    layout = lay_out(batch)
    assert (layout.tokens, layout.places, layout.contexts) == (None, None, None)
    assert lay_out(make_batch([(0, 4, 2)] * 2), share_prompts=False).tokens is None


@given(SEQUENCES, st.integers(1, 40), st.booleans())
def test_micro_batches_hold_every_sequence_once_and_keep_the_budget(sequences, budget, share):
    batch = make_batch(sequences)
    parts = micro_batches(batch, budget, share_prompts=share)
    assert sorted(i for part in parts for i in part) == list(range(len(batch)))
    for part in parts:
        size = sum(lay_out(batch.select(part), share_prompts=share).lengths)
        assert size <= budget or len(part) == 1


def test_samples_of_a_prompt_travel_together():
    batch = make_batch([(0, 5, 1), (1, 5, 1)] * 4)
    # A group takes 4 + 4 * 2 tokens and 3 for the copies of its context; its separate sequences take 24.
    assert micro_batches(batch, 15) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert len(micro_batches(batch, 15, share_prompts=False)) == 4
