"""The trivial environment: one prompt, one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verl.data.types import Completion, EncodedPrompt, Segment, Trajectory
from verl.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """One prompt to be answered `sampling.n` times."""

    prompt: EncodedPrompt
    group_id: int
    seed: int
    """Of this task alone, so that its samples do not depend on the company they are generated in."""


def answer_prompts(
    engine: RolloutEngine,
    decode: Callable[[list[list[int]]], list[str]],
    tasks: Sequence[RolloutTask],
    sampling: SamplingParams,
    on_finished: Callable[[], None] = lambda: None,
) -> list[tuple[Trajectory, ...]]:
    """One group of trajectories a task, in the order of the tasks. `decode` turns lists of token ids into texts;
    `on_finished` is called once for each completion."""
    requests = [
        GenerationRequest(request_id=i, prompt_ids=task.prompt.token_ids, sampling=replace(sampling, seed=task.seed))
        for i, task in enumerate(tasks)
    ]
    finished: dict[tuple[int, int], Completion] = {}
    for completion in engine.stream(requests):
        if isinstance(completion, Completion):
            finished[completion.request_id, completion.sample_index] = completion
            on_finished()
    order = [(i, s) for i in range(len(tasks)) for s in range(sampling.n)]
    texts = decode([list(finished[key].token_ids) for key in order])
    trajectories = [_trajectory(tasks[i], finished[i, s], text) for (i, s), text in zip(order, texts, strict=True)]
    return [tuple(trajectories[i * sampling.n : (i + 1) * sampling.n]) for i in range(len(tasks))]


def _trajectory(task: RolloutTask, completion: Completion, text: str) -> Trajectory:
    segment = Segment(
        token_ids=completion.token_ids, is_model=True, logprobs=completion.logprobs, policy_versions=completion.policy_versions
    )
    return Trajectory(
        prompt=task.prompt.prompt,
        prompt_ids=task.prompt.token_ids,
        segments=(segment,),
        finish_reason=completion.finish_reason,
        group_id=task.group_id,
        sample_index=completion.sample_index,
        response_text=text,
    )
