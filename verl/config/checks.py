"""Checks of a whole configuration: what must be there, what fits together, and what is known to go wrong.

Errors show the arithmetic and the fix. Warnings are for settings that run but are known to train badly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl.config.fields import coerce, flat_values
from verl.config.purpose import ANY, SFT, SFT_LR, TRAIN, Purpose
from verl.config.schema import Config
from verl.config.support import refuse_unsupported
from verl.errors import ConfigError

_CRITIC = vars(Config().critic)

LARGE_ACTOR_LR = 2e-5
"""Adam updates of a pretrained model by policy gradients tend to diverge above this learning rate."""
LARGE_CRITIC_LR = 1e-4
"""The same for the critic, which regression keeps steadier."""
_SMALL_HIDDEN_SIZE = 512
"""Models narrower than this are toys made from scratch, which need, and stand, far larger rates."""


@dataclass(frozen=True, kw_only=True)
class _Range:
    low: float
    high: float = math.inf
    open_low: bool = False
    """Whether `low` itself is out."""

    def holds(self, value: float) -> bool:
        return (value > self.low if self.open_low else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


_COUNT = _Range(low=1)
_COUNT_OR_ZERO = _Range(low=0)
_NOT_NEGATIVE = _Range(low=0)
_POSITIVE = _Range(low=0, open_low=True)
_SHARE = _Range(low=0, high=1)
_SHARE_ABOVE_ZERO = _Range(low=0, high=1, open_low=True)

_OPTIMIZER_RANGES = {
    "lr": _NOT_NEGATIVE,
    "lr_warmup_steps": _COUNT_OR_ZERO,
    "min_lr_ratio": _SHARE,
    "weight_decay": _NOT_NEGATIVE,
    "beta1": _SHARE,
    "beta2": _SHARE,
    "eps": _POSITIVE,
    "gradient_clip": _NOT_NEGATIVE,
    "max_tokens_per_micro_batch": _COUNT,
    "mini_batch_size": _COUNT,
}

_RANGES: dict[str, _Range] = {
    "data.train_batch_size": _COUNT,
    "data.max_prompt_length": _COUNT,
    "data.max_response_length": _COUNT,
    "data.max_train_rows": _COUNT,
    "data.max_val_rows": _COUNT,
    "data.prefetch": _COUNT_OR_ZERO,
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.kl_coef": _NOT_NEGATIVE,
    "algorithm.kl_target": _POSITIVE,
    "algorithm.kl_horizon": _COUNT,
    "algorithm.kl_loss_coef": _NOT_NEGATIVE,
    **{f"actor.{name}": limits for name, limits in _OPTIMIZER_RANGES.items()},
    "actor.ppo_epochs": _COUNT,
    "actor.clip_low": _SHARE_ABOVE_ZERO,
    "actor.clip_high": _POSITIVE,
    "actor.dual_clip": _Range(low=1, open_low=True),
    **{f"critic.{name}": limits for name, limits in _OPTIMIZER_RANGES.items()},
    "critic.epochs": _COUNT,
    "critic.value_clip": _POSITIVE,
    "critic.loss_coef": _NOT_NEGATIVE,
    "critic.warmup_steps": _COUNT_OR_ZERO,
    "rollout.n": _COUNT,
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": _SHARE_ABOVE_ZERO,
    "rollout.min_p": _SHARE,
    "rollout.max_num_seqs": _COUNT,
    "rollout.max_model_len": _COUNT,
    "rollout.kv_cache_tokens": _COUNT,
    "rollout.kv_cache_block_size": _COUNT,
    "rollout.gpu_memory_utilization": _SHARE_ABOVE_ZERO,
    "rollout.min_tokens": _COUNT_OR_ZERO,
    "rollout.val_n": _COUNT,
    "rollout.val_temperature": _NOT_NEGATIVE,
    "rollout.val_top_p": _SHARE_ABOVE_ZERO,
    "reward.workers": _COUNT_OR_ZERO,
    "reward.timeout_s": _POSITIVE,
    "multi_turn.max_turns": _COUNT,
    "multi_turn.context_window_size": _COUNT,
    "training.seed": _COUNT_OR_ZERO,
    "data.seed": _COUNT_OR_ZERO,
    "rollout.seed": _COUNT_OR_ZERO,
    "training.total_steps": _COUNT,
    "training.max_epochs": _COUNT,
    "training.save_interval": _COUNT_OR_ZERO,
    "training.keep_last": _COUNT_OR_ZERO,
    "training.keep_best": _COUNT_OR_ZERO,
    "training.eval_interval": _COUNT_OR_ZERO,
    "training.max_restarts": _COUNT_OR_ZERO,
    "training.max_policy_lag": _COUNT_OR_ZERO,
    "training.worker_timeout_s": _POSITIVE,
    "parallel.tensor_model_parallel_size": _COUNT,
    "parallel.pipeline_model_parallel_size": _COUNT,
    "parallel.sequence_parallel_size": _COUNT,
    "parallel.data_parallel_size": _COUNT,
    "parallel.fsdp_size": _COUNT,
    "parallel.rollout_devices": _COUNT,
    "parallel.nnodes": _COUNT,
    "parallel.n_gpus_per_node": _COUNT,
    "tracking.log_samples": _COUNT_OR_ZERO,
}


def check_config(config: Config, *, purpose: Purpose = TRAIN, printer: Callable[[str], object] = print) -> None:
    """Check types, choices, ranges and how the keys fit together; print a line for each warning.

    Args:
        purpose: what the configuration is for; checks of RL alone are left out for others.
        printer: takes one line at a time.
    Raises:
        ConfigError: the first thing that cannot work, with the arithmetic and the fix.
    """
    values = flat_values(config)
    for key, value in values.items():
        refuse_unsupported(key, coerce(key, value))
    for key in purpose.required:
        if values[key] in ("", None, []):
            raise ConfigError(f"{key} is required; set {key}=...")
    for key, limits in _RANGES.items():
        if values[key] is not None and not limits.holds(values[key]):
            raise ConfigError(f"{key}={values[key]:g}: must be {limits}")
    _check_lengths(config)
    _check_batches(config)
    if purpose.trains_by_rl:
        _check_algorithm(config)
    _check_reward(config)
    _check_training(config)
    _check_best(config, purpose)
    if purpose is SFT and config.parallel.rollout_devices is not None:
        raise ConfigError(
            f"parallel.rollout_devices={config.parallel.rollout_devices}: fine-tuning generates nothing; leave it out"
        )
    for line in _warnings(config, purpose):
        printer(f"config: warning: {line}")


def _check_lengths(config: Config) -> None:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    total, limit = prompt + response, config.rollout.max_model_len
    arithmetic = f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {total}"
    if limit is not None and total > limit:
        raise ConfigError(f"{arithmetic} is over rollout.max_model_len={limit}; raise it to {total} or shorten the others")
    cache = config.rollout.kv_cache_tokens
    if cache is not None and cache < total:
        raise ConfigError(f"{arithmetic} does not fit rollout.kv_cache_tokens={cache}; raise it to at least {total}")
    if config.rollout.min_tokens > response:
        raise ConfigError(
            f"rollout.min_tokens={config.rollout.min_tokens} is over data.max_response_length={response}; lower the first"
        )
    if "" in config.rollout.stop:
        raise ConfigError("rollout.stop holds an empty string, which every text contains; leave it out")
    if any(token < 0 for token in config.rollout.stop_token_ids):
        raise ConfigError(f"rollout.stop_token_ids={config.rollout.stop_token_ids}: token ids are at least 0")
    if config.rollout.top_k != -1 and config.rollout.top_k < 1:
        raise ConfigError(f"rollout.top_k={config.rollout.top_k}: must be at least 1, or -1 for off")


def _check_batches(config: Config) -> None:
    batch = config.data.train_batch_size
    critic = config.critic.mini_batch_size if config.algorithm.adv_estimator == "gae" else None
    for key, mini in (("actor.mini_batch_size", config.actor.mini_batch_size), ("critic.mini_batch_size", critic)):
        if mini is None:
            continue
        if mini > batch:
            raise ConfigError(
                f"{key}={mini} is over data.train_batch_size={batch} (both count prompts); set it to {batch} or less"
            )
        if batch % mini:
            whole, rest = divmod(batch, mini)
            below = next(size for size in range(mini, 0, -1) if batch % size == 0)
            above = next(size for size in range(mini, batch + 1) if batch % size == 0)
            raise ConfigError(
                f"{key}={mini} does not divide data.train_batch_size={batch} ({batch} = {whole} x {mini} + {rest}); "
                f"set it to {below} or {above}"
            )
    rows = config.data.max_train_rows
    if rows is not None and rows < batch:
        raise ConfigError(
            f"data.max_train_rows={rows} does not fill one batch of data.train_batch_size={batch}; raise it to {batch}"
        )


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.adv_estimator == "grpo" and config.rollout.n == 1:
        raise ConfigError(
            "rollout.n=1 with algorithm.adv_estimator=grpo: a group of one has no baseline, every advantage would be 0; "
            "set rollout.n=8, or algorithm.adv_estimator=gae"
        )
    if algorithm.kl_loss_coef > 0 and algorithm.kl_estimator in ("k1", "abs"):
        raise ConfigError(
            f"algorithm.kl_estimator={algorithm.kl_estimator} with algorithm.kl_loss_coef={algorithm.kl_loss_coef}: "
            "its gradient does not lower the KL, so it serves the reward only; set algorithm.kl_estimator=k3"
        )
    if algorithm.kl_controller == "adaptive" and not algorithm.kl_in_reward:
        raise ConfigError(
            "algorithm.kl_controller=adaptive steers the KL in the reward, but algorithm.kl_in_reward=false; set it to true, "
            "or algorithm.kl_controller=fixed"
        )
    if algorithm.kl_controller == "adaptive" and algorithm.kl_coef == 0:
        raise ConfigError("algorithm.kl_coef=0 stays 0 under algorithm.kl_controller=adaptive; set algorithm.kl_coef=0.001")


def _check_reward(config: Config) -> None:
    reward = config.reward
    if reward.type == "custom" and reward.function is None:
        raise ConfigError("reward.type=custom needs reward.function; set reward.function=path/to/file.py:name")
    if reward.type != "custom" and reward.function is not None:
        raise ConfigError(
            f"reward.function={reward.function} would not run with reward.type={reward.type}; set reward.type=custom"
        )
    if reward.type != "custom" and reward.function_kwargs:
        raise ConfigError(
            f"reward.function_kwargs has no effect with reward.type={reward.type}; set reward.type=custom, or leave it out"
        )


def _check_training(config: Config) -> None:
    training, turns = config.training, config.multi_turn
    if training.eval_interval and not config.data.val_files:
        raise ConfigError(
            f"training.eval_interval={training.eval_interval} has nothing to evaluate; set data.val_files, or "
            "training.eval_interval=0"
        )
    if training.resume not in ("auto", "never") and not Path(training.resume).is_dir():
        raise ConfigError(f"training.resume={training.resume}: no such folder; write auto, never or a checkpoint folder")
    if training.runtime == "local" and processes_asked_for(config) > 1:
        raise ConfigError(
            f"parallel asks for {processes_asked_for(config)} processes, and training.runtime=local is one; set "
            "training.runtime=ray"
        )
    if not turns.enable and (turns.state_tracking or turns.context_window_size is not None):
        raise ConfigError(
            "multi_turn.state_tracking and multi_turn.context_window_size have no effect with multi_turn.enable=false"
        )


def _check_best(config: Config, purpose: Purpose) -> None:
    training = config.training
    if training.best_metric is not None and not training.keep_best:
        raise ConfigError(f"training.best_metric={training.best_metric} has no effect with training.keep_best=0; set keep_best=1")
    if not training.keep_best:
        return
    if not config.data.val_files:
        raise ConfigError(f"training.keep_best={training.keep_best} has no scores to go by; set data.val_files")
    for key in ("save_interval", "eval_interval"):
        if getattr(training, key) == 0:
            raise ConfigError(
                f"training.keep_best={training.keep_best} needs steps that are validated and saved, and training.{key}=0 is "
                f"never; set training.{key}"
            )
    metric, known = best_metric(config, sft=purpose is SFT), validation_metrics(config, sft=purpose is SFT)
    if purpose is not ANY and metric not in known:
        raise ConfigError(
            f"training.best_metric={metric} is not measured by this run's validation; use one of {', '.join(known)}"
        )


def best_metric(config: Config, *, sft: bool) -> str:
    """The score that training.keep_best goes by."""
    by_default = "val/loss" if sft else "val/reward" if config.reward.type == "custom" else "val/accuracy"
    return config.training.best_metric or by_default


SMALLER_IS_BETTER = ("val/loss", "val/truncated", "val/response_length")


def validation_metrics(config: Config, *, sft: bool) -> list[str]:
    """What validation logs: the names of `EvalSummary.metrics`, or of fine-tuning's validation."""
    if sft:
        return ["val/loss"]
    names = ["accuracy", "reward", "response_length", "truncated", "completeness", "reasoning_steps"]
    n = config.rollout.val_n
    if n > 1:
        names += [f"pass@{k}" for k in sorted({n, *(2**i for i in range(1, n.bit_length()) if 2**i <= n)})] + [f"maj@{n}"]
    return [f"val/{name}" for name in names]


def processes_asked_for(config: Config) -> int:
    """By the section `parallel` alone, whatever devices there are."""
    parallel = config.parallel
    training = (parallel.data_parallel_size or 1) * replica_size(config)
    return max(training + (parallel.rollout_devices or 0), parallel.nnodes * (parallel.n_gpus_per_node or 1))


def replica_size(config: Config) -> int:
    """Ranks that one copy of a model is spread over, slices aside."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.sequence_parallel_size


def _warnings(config: Config, purpose: Purpose) -> Iterator[str]:
    if purpose.trains_by_rl:
        yield from _rl_warnings(config)
    if purpose is SFT and 0 < config.actor.lr < 0.2 * SFT_LR:
        yield f"actor.lr={config.actor.lr:g} is a rate of RL, at which fine-tuning changes next to nothing; {SFT_LR:g} is usual"
    if config.training.device == "cpu" and config.model.dtype == "bfloat16":
        yield "model.dtype=bfloat16 on a CPU is several times slower than float32"


def _rl_warnings(config: Config) -> Iterator[str]:
    algorithm, actor, critic, rollout = config.algorithm, config.actor, config.critic, config.rollout
    has_critic = algorithm.adv_estimator == "gae"
    if not _is_small(config.model.path):
        if actor.lr > LARGE_ACTOR_LR:
            yield (
                f"actor.lr={actor.lr:g} is above {LARGE_ACTOR_LR:g}, where RL of pretrained models tends to diverge; "
                "1e-6 is a safe start"
            )
        if has_critic and critic.lr > LARGE_CRITIC_LR:
            yield f"critic.lr={critic.lr:g} is above {LARGE_CRITIC_LR:g}, where critics tend to diverge; 1e-5 is a safe start"
    for key, clip in (("actor", actor.gradient_clip), ("critic", critic.gradient_clip if has_critic else 1.0)):
        if clip == 0:
            yield f"{key}.gradient_clip=0 switches clipping off: one outlying batch can ruin the model; 1.0 is usual"
    truncated = [
        text
        for text, on in (
            (f"rollout.top_p={rollout.top_p:g}", rollout.top_p < 1),
            (f"rollout.top_k={rollout.top_k}", rollout.top_k != -1),
            (f"rollout.min_p={rollout.min_p:g}", rollout.min_p > 0),
        )
        if on
    ]
    if truncated and algorithm.old_logprobs == "generator":
        yield (
            f"{', '.join(truncated)} with algorithm.old_logprobs=generator: the generator's log-probs are of the truncated "
            "distribution, the trainer's of the whole one, so ratios are biased; use top_p=1, top_k=-1, min_p=0"
        )
    if not has_critic:
        # gradient_clip is left out: one general setting reaches both models
        idle = [
            name for name in ("lr", "path", "value_clip", "loss_coef", "warmup_steps") if getattr(critic, name) != _CRITIC[name]
        ]
        if idle:
            yield f"critic.{', critic.'.join(idle)}: no effect with algorithm.adv_estimator=grpo, which trains no critic"


def _is_small(model_path: str) -> bool:
    """Whether it is a local folder of a model too narrow to be a pretrained one."""
    file = Path(model_path) / "config.json"
    if not model_path or not file.is_file():
        return False
    try:
        return json.loads(file.read_text()).get("hidden_size", math.inf) < _SMALL_HIDDEN_SIZE
    except (ValueError, AttributeError):  # the model loader reports a broken config.json with its own message
        return False
