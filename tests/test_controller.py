"""The controller: registration, dispatch, gathering, colocation, user-defined dispatch."""

import copy
import pickle

import pytest
import torch

from verl.controller import (
    Call,
    DispatchPlan,
    LocalRuntime,
    ResourcePool,
    Worker,
    WorkerLayout,
    WorkerSpec,
    all_ranks,
    all_to_all,
    data_parallel,
    one_to_all,
    rank_zero,
    register,
)
from verl.data.batch import TokenBatch
from verl.engines.train.base import ModelOutputs
from verl.errors import ConfigError, MissingExtraError
from verl.observe.metrics import Max, Mean, Sum


def every_second_rank(layout, args, kwargs):
    return DispatchPlan({r: Call(args, kwargs) for r in range(0, layout.world_size, 2)}, lambda results: sum(results.values()))


class Echo(Worker):
    @register(dispatch=one_to_all)
    def where(self):
        return self.context.rank, self.context.world_size

    @register(dispatch=rank_zero)
    def first(self, x):
        return self.context.rank + x

    @register(dispatch=all_ranks)
    def collective(self):
        return self.context.rank

    @register(dispatch=all_to_all)
    def mine(self, x, *, y):
        return x + y

    @register(dispatch=data_parallel)
    def double_ids(self, batch):
        return batch.input_ids * 2.0

    @register(dispatch=data_parallel)
    def outputs(self, batch):
        return ModelOutputs(logprobs=-batch.input_ids.float(), entropy=None, values=batch.input_ids.float())

    @register(dispatch=data_parallel)
    def same_batch(self, batch):
        return batch.with_columns(values=batch.input_ids.float())

    @register(dispatch=data_parallel)
    def count(self, batch, weight):
        return {
            "tokens": Sum(batch.num_tokens),
            "mean_id": Mean(float(batch.input_ids.sum()) * weight, batch.num_tokens),
            "most": Max(batch.num_tokens),
        }

    @register(dispatch=data_parallel)
    def shout(self, words):
        return [f"{w}@{self.context.rank}" for w in words]

    @register(dispatch=data_parallel, blocking=False)
    def later(self, words):
        return [w.upper() for w in words]

    @register(dispatch=every_second_rank)
    def sum_of_even_ranks(self):
        return self.context.rank

    def hidden(self):
        return 1


class Paired(Echo):
    """Two ranks a replica."""

    @classmethod
    def layout(cls, world_size):
        return WorkerLayout(data_ranks=tuple(rank // 2 for rank in range(world_size)))


def group(n, worker_class=Echo):
    return LocalRuntime().spawn(ResourcePool(num_workers=n), {"echo": WorkerSpec(worker_class)})["echo"]


def batch(lengths=(5, 1, 3, 2, 8)):
    total = sum(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return TokenBatch(cu, input_ids=torch.arange(total), group_ids=torch.arange(len(lengths)))


def test_broadcast_modes():
    g = group(3)
    assert g.where() == [(0, 3), (1, 3), (2, 3)]
    assert g.first(10) == 10
    assert g.collective() == 0
    assert g.mine([1, 2, 3], y=[10, 20, 30]) == [11, 22, 33]
    assert g.sum_of_even_ranks() == 2
    with pytest.raises(ValueError, match="one entry a rank: got 2 for 3 ranks"):
        g.mine([1, 2], y=[1, 2])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_data_parallel_keeps_the_order_whatever_the_number_of_ranks(ranks):
    g, b = group(ranks), batch()
    assert torch.equal(g.double_ids(b), b.input_ids * 2.0)
    out = g.outputs(b)
    assert torch.equal(out.logprobs, -b.input_ids.float()) and out.entropy is None
    back = g.same_batch(b)
    assert torch.equal(back.values, b.input_ids.float()) and torch.equal(back.group_ids, b.group_ids)
    metrics = g.count(b, 2.0)
    assert metrics["tokens"].value == 19
    assert metrics["mean_id"].value == pytest.approx(2.0 * sum(range(19)) / 19)


def test_sequences_are_split_in_runs():
    g = group(2)
    assert g.shout(["a", "b", "c"]) == ["a@0", "b@1", "c@1"]
    pending = g.later(["a", "b", "c"])
    assert pending.result() == ["A", "B", "C"]


def test_ranks_of_one_replica_get_the_same_data_and_the_last_answers():
    g = group(4, Paired)
    assert g.shout(["a", "b"]) == ["a@1", "b@3"]
    assert g.count(batch(), 1.0)["tokens"].value == 19


def test_only_registered_methods_can_be_called():
    with pytest.raises(AttributeError, match=r"registers no method 'hidden'; it has .*collective"):
        group(1).hidden()


def test_colocated_groups_find_each_other():
    class Reader(Worker):
        @register(dispatch=one_to_all)
        def peer_is_mine(self):
            return self.context.peers["echo"].context.rank == self.context.rank

    groups = LocalRuntime().spawn(ResourcePool(num_workers=2), {"echo": WorkerSpec(Echo), "reader": WorkerSpec(Reader)})
    assert groups["reader"].peer_is_mine() == [True, True]


def test_an_error_keeps_its_traceback():
    class Broken(Worker):
        @register(dispatch=one_to_all)
        def fail(self):
            raise ZeroDivisionError("rank work")

    g = LocalRuntime().spawn(ResourcePool(), {"broken": WorkerSpec(Broken)})["broken"]
    with pytest.raises(ZeroDivisionError, match="rank work"):
        g.fail()


class Uneven(Worker):
    @register(dispatch=data_parallel)
    def or_none(self, items):
        return [2 * item for item in items] or None

    @register(dispatch=data_parallel)
    def or_count(self, items):
        return {"n": Sum(len(items))} if self.context.rank else {}

    @register(dispatch=data_parallel)
    def plain_dict(self, items):
        return {item: item for item in items}

    @register(dispatch=data_parallel)
    def nothing(self, items):
        return None


def test_ranks_that_answer_differently_are_an_error():
    """With fewer items than ranks the first ranks have none, and their answer must not stand for all."""
    group = LocalRuntime().spawn(ResourcePool(num_workers=3), {"a": WorkerSpec(Uneven)})["a"]
    with pytest.raises(TypeError, match="cannot join a NoneType with list"):
        group.or_none([1, 2])
    with pytest.raises(TypeError, match="results of type dict"):
        group.plain_dict([1, 2])
    assert group.or_count([1, 2]) == {"n": Sum(2)}
    assert group.nothing([1, 2]) is None
    with pytest.raises(TypeError, match="by position"):
        group.nothing(items=[1, 2])


@pytest.mark.parametrize("number", [0, -1])
def test_pools_have_a_worker(number):
    with pytest.raises(ConfigError, match=f"num_workers={number}"):
        ResourcePool(num_workers=number)


def test_groups_can_be_copied():
    group = LocalRuntime().spawn(ResourcePool(), {"a": WorkerSpec(Uneven)})["a"]
    assert copy.copy(group).nothing([]) is None


def test_a_missing_extra_travels():
    error = pickle.loads(pickle.dumps(MissingExtraError("wandb", "tracking")))
    assert type(error) is MissingExtraError and str(error) == str(MissingExtraError("wandb", "tracking"))
