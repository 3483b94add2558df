"""Rewards for trajectories: `build_reward(config)` gives the scorer that the training loop calls.

The built-in accuracy runs in the driver, because its time is bounded; a user's function runs in the scoring pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from verl.config.schema import RewardConfig
from verl.data.types import Prompt, Trajectory
from verl.errors import UserError
from verl.observe.metrics import Mean, Metrics, Sum, merge_metrics
from verl.rewards import accuracy
from verl.rewards.functions import RewardRequest, check_reward_config, refuse_training_while_importing, trl_columns
from verl.rewards.math_answers import parse_ground_truth
from verl.rewards.outcome import ScoreOutcome, read_result
from verl.rewards.pool import ScoringPool

logger = logging.getLogger(__name__)


class RewardScorer:
    """Gives trajectories their rewards. A context manager; `close` ends the scoring processes."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises UserError when the section cannot work; the function it names is imported in the background."""
        check_reward_config(config)
        refuse_training_while_importing()
        self.config = config
        self._pool: ScoringPool | None = None
        self._shown: set[str] = set()
        if config.type == "custom":
            self._pool = ScoringPool(
                str(config.function), config.function_kwargs, num_workers=config.workers, timeout_s=config.timeout_s
            )

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Look at the function and at the rows, before any model is loaded.

        Raises:
            UserError: accuracy: a ground truth is missing or not a number. Custom: the function cannot be imported, is
                not there, is not callable or does not accept the arguments; TRL style: it needs a column that the rows
                do not have.
        """
        if self._pool is None:
            _check_ground_truths(prompts)
            return
        self._pool.wait_until_ready()
        for prompt in prompts[:1]:
            if prompt.ground_truth is None:
                print("data: no column holds an answer, so the reward function gets ground_truth=None (set data.answer_key)")
            columns = trl_columns(reward_request(prompt, ""))
            missing = [name for name in self._pool.required_columns if name not in columns]
            if missing:
                raise UserError(
                    f"reward.function {self.config.function!r} needs the column {missing[0]!r}; the data has {', '.join(columns)}"
                )

    def score(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], Metrics]:
        """The same trajectories, in order, with `reward`, `reward_parts` and, where scoring failed, `reward_failure`.

        The reward is `scale` times the score; a failed sample's is `failure_reward` as it stands. Parts are not scaled.
        The first failure of each kind is logged, an exception with its traceback; later ones are only counted.
        Metrics: see `outcome_metrics`.

        Raises:
            UserError: every call failed, so it is the function that is wrong and not a sample.
        """
        requests = [reward_request(t.prompt, t.response_text) for t in trajectories]
        outcomes = self._pool.score(requests) if self._pool else [self._accuracy(request) for request in requests]
        self._report_first_failures(outcomes)
        if outcomes and all(outcome.score is None for outcome in outcomes):
            raise UserError(
                f"reward.{self._key}: scoring failed for all {len(outcomes)} samples of this step ({outcomes[0].failure}); "
                "mend it and start again"
            )
        scored = [self._rewarded(t, outcome) for t, outcome in zip(trajectories, outcomes, strict=True)]
        return scored, outcome_metrics(outcomes)

    def try_once(self, prompt: Prompt) -> tuple[str, float]:
        """An answer, the ground truth where that is text, and its reward. Raises UserError when scoring it fails."""
        answer = prompt.ground_truth if isinstance(prompt.ground_truth, str) else "0"
        request = reward_request(prompt, answer)
        outcome = self._pool.score([request])[0] if self._pool else self._accuracy(request)
        if outcome.score is None:
            detail = f"\n{outcome.traceback}" if outcome.traceback else ""
            raise UserError(
                f"reward.{self._key}: scoring the answer {answer!r} to row {prompt.uid} failed: {outcome.failure}{detail}"
            )
        return answer, self.config.scale * outcome.score

    @property
    def _key(self) -> str:
        return "function" if self._pool else "type"

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accuracy(self, request: RewardRequest) -> ScoreOutcome:
        try:
            result = accuracy.compute_score(
                request.data_source,
                request.solution_str,
                request.ground_truth,
                format_score=self.config.format_score,
                answer_format=self.config.answer_format,
            )
        except UserError as error:  # a ground truth that `check` has not seen
            return ScoreOutcome(failure=str(error), kind="exception")
        return read_result(result)

    def _rewarded(self, trajectory: Trajectory, outcome: ScoreOutcome) -> Trajectory:
        if outcome.score is None:
            return trajectory.with_reward(self.config.failure_reward, failure=outcome.failure)
        return trajectory.with_reward(self.config.scale * outcome.score, outcome.parts)

    def _report_first_failures(self, outcomes: Sequence[ScoreOutcome]) -> None:
        for outcome in outcomes:
            if outcome.kind is not None and outcome.kind not in self._shown:
                self._shown.add(outcome.kind)
                detail = f"\n{outcome.traceback}" if outcome.traceback else ""
                logger.warning(
                    "scoring failed: %s (reward %g; later failures of this kind are only counted)%s",
                    outcome.failure,
                    self.config.failure_reward,
                    detail,
                )


def build_reward(config: RewardConfig) -> RewardScorer:
    """The scorer a configuration asks for; `check` tells whether a function it names works.

    Raises:
        UserError: a value of the section cannot work.
    """
    return RewardScorer(config)


def reward_request(prompt: Prompt, response_text: str) -> RewardRequest:
    """What a reward function is told: `extra_info` is the column of that name, with every further column beside its keys."""
    columns = {name: value for name, value in prompt.extra.items() if name != "extra_info"}
    extra_info = prompt.extra.get("extra_info")
    if isinstance(extra_info, Mapping):
        columns.update(extra_info)
    return RewardRequest(
        data_source=prompt.data_source,
        solution_str=response_text,
        ground_truth=prompt.ground_truth,
        extra_info=columns,
        prompt=next(
            (text for text in (prompt.text, prompt.raw_text) if text is not None), [dict(message) for message in prompt.messages]
        ),
    )


def outcome_metrics(outcomes: Sequence[ScoreOutcome]) -> Metrics:
    """`reward/failures` (all kinds), `reward/timeouts` among them, and the mean `reward/<part>` over the samples that have it."""
    parts = [{f"reward/{name}": Mean(value) for name, value in outcome.parts.items()} for outcome in outcomes]
    counts = {
        "reward/failures": Sum(float(sum(outcome.score is None for outcome in outcomes))),
        "reward/timeouts": Sum(float(sum(outcome.kind == "timeout" for outcome in outcomes))),
    }
    return {**merge_metrics(parts), **counts}


def _check_ground_truths(prompts: Sequence[Prompt]) -> None:
    missing = [prompt.uid for prompt in prompts if prompt.ground_truth is None]
    if missing:
        raise UserError(
            f"reward.type=accuracy needs a ground truth, but {len(missing)} of {len(prompts)} rows have none "
            f"(first: {missing[0]}); set data.answer_key to the column that holds it"
        )
    for prompt in prompts:
        try:
            parse_ground_truth(prompt.ground_truth)
        except UserError as error:
            raise UserError(f"row {prompt.uid}: {error}") from None
