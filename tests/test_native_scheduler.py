"""The scheduler alone, over random schedules: nothing leaks, nothing is lost, nobody writes where another reads."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.engines.rollout.base import GenerationRequest, SamplingParams
from verl.engines.rollout.native.scheduler import Memory, PagedMemory, RowMemory, Sample, Scheduler

BLOCK = 4
LONGEST = 32


def make_samples(rng: random.Random, num_requests: int) -> list[Sample]:
    known = [tuple(rng.randrange(5, 50) for _ in range(rng.randint(1, 20))) for _ in range(max(1, num_requests - 1))]
    samples = []
    for i in range(num_requests):
        prompt = rng.choice(known)
        sampling = SamplingParams(max_tokens=rng.randint(1, LONGEST - len(prompt)), n=rng.randint(1, 5))
        request = GenerationRequest(request_id=i, prompt_ids=prompt, sampling=sampling)
        for index in range(sampling.n):
            samples.append(Sample(request=request, sample_index=index, key=0, end_ids=frozenset({1}), stop_strings=None))
    return samples


class FakeCache:
    """What a cache block holds, position by position: the tokens that were written there."""

    def __init__(self, layout: str) -> None:
        self.size = LONGEST if layout == "rows" else BLOCK
        self.blocks: dict[int, dict[int, int]] = {}

    def write(self, blocks: list[int], position: int, token: int) -> None:
        self.blocks.setdefault(blocks[position // self.size], {})[position % self.size] = token

    def read(self, blocks: list[int], length: int) -> list[int | None]:
        return [self.blocks.get(blocks[i // self.size], {}).get(i % self.size) for i in range(length)]

    def copy(self, source: int, destination: int, length: int) -> None:
        held = self.blocks.get(source, {})
        self.blocks[destination] = {i: held[i] for i in range(length)}


def follow(cache: FakeCache, scheduler: Scheduler, moves: list[tuple[int, int]], layout: str) -> None:
    if layout == "rows":
        for source, destination in moves:
            cache.copy(source, destination, scheduler.running[destination].cached)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    layout=st.sampled_from(["rows", "paged"]),
    slots=st.integers(1, 6),
    num_requests=st.integers(1, 8),
    extra_blocks=st.integers(0, 20),
    steps_per_read=st.sampled_from([1, 3]),
)
def test_random_schedules(seed: int, layout: str, slots: int, num_requests: int, extra_blocks: int, steps_per_read: int) -> None:
    rng = random.Random(seed)
    samples = make_samples(rng, num_requests)
    memory: Memory = RowMemory(slots) if layout == "rows" else PagedMemory(LONGEST // BLOCK + 1 + extra_blocks, BLOCK)
    scheduler = Scheduler(memory, slots)
    scheduler.submit(samples)
    cache = FakeCache(layout)
    finished: list[Sample] = []
    for _ in range(5000):
        if not scheduler.running and not scheduler.waiting:
            break
        if rng.random() < 0.03:
            chosen = {rng.randrange(num_requests)}
            leaving = [s for s in scheduler.running if s.request.request_id in chosen]
            follow(cache, scheduler, scheduler.remove(leaving), layout)
            finished += leaving + scheduler.take_waiting(chosen)
        if rng.random() < 0.03:
            scheduler.requeue(list(scheduler.running))
            scheduler.drop_held_prompts()
        admission = scheduler.admit()
        if not scheduler.running:
            scheduler.drop_held_prompts()
            continue
        for tokens, blocks in admission.prefills:
            for position, token in enumerate(tokens):
                cache.write(blocks, position, token)
        for source, destination, length in admission.copies:
            cache.copy(source, destination, length)
        steps = scheduler.shortest_of(steps_per_read)
        while (victim := scheduler.next_victim(steps)) is not None:
            assert victim.admitted == max(s.admitted for s in scheduler.running)
            follow(cache, scheduler, scheduler.requeue([victim]), layout)
        assert [s.slot for s in scheduler.running] == list(range(len(scheduler.running)))
        assert len(scheduler.running) <= slots
        for _ in range(steps):
            for s in scheduler.running:
                cache.write(s.blocks, s.cached, [*s.request.prompt_ids, *s.token_ids][-1])
            for s in scheduler.running:
                # Whatever the others wrote, a sample finds its own history.
                assert cache.read(s.blocks, s.cached + 1) == [*s.request.prompt_ids, *s.token_ids]
            for s in scheduler.running:
                if s.finish_reason is None:
                    s.append(1 if rng.random() < 0.05 else rng.randrange(5, 50), 0.0, 0)
                else:
                    s.token_ids.append(-1)
        done = [s for s in scheduler.running if s.finish_reason is not None]
        follow(cache, scheduler, scheduler.remove(done), layout)
        finished += done
    assert not scheduler.running and not scheduler.waiting
    assert memory.blocks_in_use == 0
    assert Counter(map(id, finished)) == Counter(map(id, samples))


@pytest.mark.parametrize("layout", ["rows", "paged"])
def test_a_group_is_admitted_with_one_prefill(layout: str) -> None:
    memory: Memory = RowMemory(8) if layout == "rows" else PagedMemory(40, BLOCK)
    scheduler = Scheduler(memory, 8)
    request = GenerationRequest(request_id=0, prompt_ids=[9] * 11, sampling=SamplingParams(max_tokens=3, n=3))
    scheduler.submit(
        Sample(request=request, sample_index=i, key=0, end_ids=frozenset(), stop_strings=None) for i in range(request.sampling.n)
    )
    admission = scheduler.admit()
    assert [list(tokens) for tokens, _ in admission.prefills] == [[9] * 10]
    assert [s.sample_index for s in admission.samples] == [0, 1, 2]
    if layout == "rows":
        assert admission.copies == [(0, 1, 10), (0, 2, 10)]
        assert [s.blocks for s in scheduler.running] == [[0], [1], [2]]
    else:
        # Two full blocks shared; the third, holding two tokens, is copied for all but the last sample.
        assert [(source, length) for source, _, length in admission.copies] == [(2, 2), (2, 2)]
        assert [s.blocks for s in scheduler.running] == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]
        assert memory.blocks_in_use == 5


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    memory = PagedMemory(5, BLOCK)
    scheduler = Scheduler(memory, 3)
    for i in range(3):
        request = GenerationRequest(request_id=i, prompt_ids=[9 + i] * 5, sampling=SamplingParams(max_tokens=9))
        scheduler.submit([Sample(request=request, sample_index=0, key=0, end_ids=frozenset(), stop_strings=None)])
    scheduler.admit()
    # Four cached tokens are one block each, and one block is kept free for each that runs.
    assert [s.request.request_id for s in scheduler.running] == [0, 1]
    for sample in scheduler.running:
        sample.token_ids += [7] * 5
    victim = scheduler.next_victim(1)
    assert victim is scheduler.running[1]
    scheduler.requeue([victim])
    assert [list(group.tokens) for group in scheduler.waiting] == [[10] * 5 + [7] * 5, [11] * 5]
    assert scheduler.next_victim(1) is None
