"""Order, resume and prefetching: a resumed run sees exactly the batches the uninterrupted one would have."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.loader import PromptLoader, SeededLoader
from verl.errors import DataError, UserError


class Numbers:
    """A data set whose batches are their row numbers; remembers what was asked for."""

    def __init__(self, size):
        self.size = size
        self.asked = []
        self.threads = set()

    def __len__(self):
        return self.size

    def batch(self, indices):
        self.asked.append(list(indices))
        self.threads.add(threading.current_thread())
        return list(indices)


def loader(size=10, batch=3, **options):
    return SeededLoader(Numbers(size), batch, **{"seed": 0, "total_steps": 9, **options})


def test_every_row_is_used_once_an_epoch_and_no_batch_is_short():
    batches = list(loader(size=10, batch=3, total_steps=10))
    assert [len(batch) for batch in batches] == [3] * 10
    rows = [row for batch in batches for row in batch]
    for epoch in range(3):
        assert sorted(rows[epoch * 10 : epoch * 10 + 10]) == list(range(10))
    assert rows[:10] != rows[10:20] != rows[20:30]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.booleans(), st.integers(0, 9))
def test_resuming_anywhere_gives_the_rest_of_the_sequence(size, batch, prefetch, shuffle, stop):
    if batch > size:
        size, batch = batch, size
    options = dict(size=size, batch=batch, prefetch=prefetch, shuffle=shuffle, total_steps=9)
    whole = list(loader(**options))
    first = loader(**options)
    seen = [item for item, _ in zip(first, range(stop), strict=False)] if stop else []
    # zip takes one item more than it gives when its second argument ends first, so the loader is one ahead.
    assert first.step - len(seen) in (0, 1)
    second = loader(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert whole[: first.step] + list(second) == whole


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("stop", range(10))
def test_the_position_is_that_of_the_last_batch_yielded(prefetch, stop):
    """10 rows in threes: stops at, before and after the ends of epochs."""
    whole = list(loader())
    running = loader(prefetch=prefetch)
    batches = iter(running)
    seen = [next(batches) for _ in range(stop)]
    state = running.state_dict()
    assert state["step"] == stop
    running.close()
    resumed = loader(prefetch=prefetch)
    resumed.load_state_dict(state)
    assert resumed.epoch == pytest.approx(stop * 3 / 10)
    assert seen + list(resumed) == whole


def test_order_depends_on_the_seed_alone():
    assert list(loader(seed=1)) == list(loader(seed=1, prefetch=0))
    assert list(loader(seed=1)) != list(loader(seed=2))
    assert list(loader(shuffle=False, total_steps=4)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 1, "total_steps": None}, 3),
        ({"max_epochs": 3, "total_steps": None}, 10),
        ({"max_epochs": 2, "total_steps": 4}, 4),
        ({"max_epochs": 1, "total_steps": 8}, 3),
        ({"total_steps": 8}, 8),
    ],
)
def test_number_of_steps(options, steps):
    one = loader(**options)
    assert one.num_steps == steps
    assert len(list(one)) == steps
    assert one.step == steps
    assert one.epoch == pytest.approx(steps * 3 / 10)
    assert list(one) == []


def test_without_a_limit_it_goes_on():
    with loader(total_steps=None) as endless:
        assert endless.num_steps is None
        batches = iter(endless)
        assert [len(next(batches)) for _ in range(50)] == [3] * 50


def test_prefetching_stays_a_few_batches_ahead_and_ends_with_the_block():
    one = loader(prefetch=2, total_steps=9)
    with one as batches:
        next(iter(batches))
    threads = one._dataset.threads
    for thread in threads:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in threads)
    assert threading.current_thread() not in threads
    assert 1 <= len(one._dataset.asked) <= 4


def test_in_line_uses_no_thread():
    one = loader(prefetch=0)
    list(one)
    assert one._dataset.threads == {threading.current_thread()}


def test_an_error_in_the_background_reaches_the_loop():
    class Broken(Numbers):
        def batch(self, indices):
            if len(self.asked) == 2:
                raise DataError("train.jsonl:3: bad row")
            return super().batch(indices)

    seen = []
    with pytest.raises(DataError, match="bad row"):
        seen.extend(SeededLoader(Broken(10), 3, seed=0, total_steps=9))
    one = SeededLoader(Broken(10), 3, seed=0, total_steps=9)
    with pytest.raises(DataError, match="bad row"):
        for _ in one:
            pass
    assert one.step == 2


def test_a_data_set_smaller_than_a_batch_is_an_error_with_the_numbers():
    with pytest.raises(DataError, match=r"data.train_batch_size=8 is more than the 5 rows of the data set; set it to 5 or less"):
        PromptLoader(Numbers(5), 8, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 4}, "the checkpoint has batch_size=3, this run 4"),
        ({"size": 11}, "num_rows=10, this run 11"),
        ({"seed": 5}, "seed=0, this run 5"),
        ({"shuffle": False}, "shuffle=True, this run False"),
    ],
)
def test_a_state_of_other_data_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        loader(**change).load_state_dict(loader().state_dict())
