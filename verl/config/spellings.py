"""The one table that translates other spellings of configuration keys: those of tutorials and of upstream scripts.

A row says which canonical key a foreign one becomes, or why it needs nothing here. Nothing else in verl maps names,
and nothing is mapped in silence: `verl.config.load` prints each row it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.errors import ConfigError


class Context(Protocol):
    """What a rule may look at besides its own value."""

    def given(self, key: str) -> bool:
        """Whether the canonical key was set, by any spelling handled before, in the same source or a stronger one."""
        ...

    def outranked(self, key: str) -> bool:
        """Whether a stronger source sets the canonical key, so that this row's value for it counts for nothing."""
        ...

    def value(self, key: str) -> Any:
        """The canonical key's value: what was set, else the default."""
        ...

    def raw(self, key: str) -> Any:
        """What the user wrote under this very spelling; None if nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one foreign key becomes."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Canonical key -> value."""
    note: str = ""
    """Why, where the key alone does not say it."""


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """A row of the table."""

    targets: tuple[str, ...]
    """Canonical keys it may set."""
    rule: Callable[[str, Any, Context], Outcome]
    how: str = ""
    """For the documentation: how the value changes, or why there is no target."""
    late: bool = False
    """The rule looks at other keys, so it runs after the plain rows."""
    weak: bool = False
    """A general setting: a more specific one beside it wins."""


def to(*targets: str, convert: Callable[[Any], Any] | None = None, how: str = "", weak: bool = False) -> Spelling:
    """Another name, its value unchanged or converted."""

    def rule(key: str, value: Any, context: Context) -> Outcome:
        new = value if convert is None else convert(value)
        return Outcome(values=dict.fromkeys(targets, new))

    return Spelling(targets=targets, rule=rule, how=how, weak=weak)


def always(*accepted: Any, why: str) -> Spelling:
    """A switch with one position here; asking for another is an error."""

    def rule(key: str, value: Any, context: Context) -> Outcome:
        if value not in accepted:
            raise ConfigError(f"{key}={value} cannot be had: {why}; write {key}={accepted[0]} or leave it out")
        return Outcome(note=why)

    return Spelling(targets=(), rule=rule, how=f"only {' or '.join(map(str, accepted))}: {why}")


def automatic(why: str) -> Spelling:
    """A tuning knob of something that needs none here: every value is accepted, none changes a result."""
    return Spelling(targets=(), rule=lambda key, value, context: Outcome(note=f"no effect, {why}"), how=f"no effect: {why}")


def depends(*targets: str, rule: Callable[[str, Any, Context], Outcome], how: str) -> Spelling:
    """A key whose meaning depends on others."""
    return Spelling(targets=targets, rule=rule, how=how, late=True)


def _never_if_not_positive(value: Any) -> Any:
    return 0 if isinstance(value, int) and value <= 0 else value


def _all_if_not_positive(value: Any) -> Any:
    return None if isinstance(value, int) and value <= 0 else value


def _keep_all_if_null(value: Any) -> Any:
    return 0 if value is None else value


def _no_warmup_if_negative(value: Any) -> Any:
    return 0 if isinstance(value, int) and value < 0 else value


def _total_length(key: str, value: Any, context: Context) -> Outcome:
    prompt_key, response_key = "data.max_prompt_length", "data.max_response_length"
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ConfigError(f"{key}={value!r}: expected a whole number of at least 2; write for example {key}=1024")
    if context.outranked(prompt_key) and context.outranked(response_key):
        return Outcome(note=f"no effect, {prompt_key} and {response_key} are given")
    prompt = context.value(prompt_key) if context.given(prompt_key) else None
    response = context.value(response_key) if context.given(response_key) else None
    if prompt is None:
        prompt = value // 2 if response is None else value - response
    if response is None:
        response = value - prompt
    if prompt + response != value or min(prompt, response) < 1:
        raise ConfigError(
            f"{key}={value} is the total length, but {prompt_key} + {response_key} = {prompt} + {response} = "
            f"{prompt + response}; leave {key} out"
        )
    return Outcome(values={prompt_key: prompt, response_key: response}, note="prompt plus response")


def _micro_batch(section: str) -> Callable[[str, Any, Context], Outcome]:
    """Sequences in a pass -> tokens in a pass: never more memory than that many sequences of full length."""
    target = f"{section}.max_tokens_per_micro_batch"

    def rule(key: str, value: Any, context: Context) -> Outcome:
        if value is None:
            return Outcome(note="not set")
        if context.given(target):
            return Outcome(note=f"no effect, {target}={context.value(target)} is given")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}={value!r}: expected a whole number of at least 1; write for example {key}=4")
        prompt, response = context.value("data.max_prompt_length"), context.value("data.max_response_length")
        return Outcome(
            values={target: value * (prompt + response)},
            note=f"{value} sequences x ({prompt} + {response}) tokens; a memory setting that does not change results",
        )

    return rule


_KL_LOSS = "actor_rollout_ref.actor.use_kl_loss"
_KL_LOSS_COEF = "actor_rollout_ref.actor.kl_loss_coef"


def _use_kl_loss(key: str, value: Any, context: Context) -> Outcome:
    if not value:
        return Outcome(values={"algorithm.kl_loss_coef": 0.0}, note="no KL in the loss")
    if context.raw(_KL_LOSS_COEF) is not None or context.given("algorithm.kl_loss_coef"):
        return Outcome(note="a KL coefficient above 0 switches it on")
    return Outcome(values={"algorithm.kl_loss_coef": 0.001}, note="upstream's coefficient, as none is given")


def _with_kl_loss(target: str) -> Callable[[str, Any, Context], Outcome]:
    def rule(key: str, value: Any, context: Context) -> Outcome:
        switch = context.raw(_KL_LOSS)
        if switch is None:
            raise ConfigError(
                f"{key}={value} has no effect upstream without {_KL_LOSS}=True; add that, or write {target}={value}"
            )
        return Outcome(values={target: value}) if switch else Outcome(note=f"no effect with {_KL_LOSS}={switch}")

    return rule


def _kl_penalty(key: str, value: Any, context: Context) -> Outcome:
    if context.value("algorithm.kl_in_reward"):
        return Outcome(values={"algorithm.kl_estimator": value})
    return Outcome(note="no effect without KL in the reward")


def _reward_function(prefix: str) -> Callable[[str, Any, Context], Outcome]:
    def rule(key: str, value: Any, context: Context) -> Outcome:
        if value is None:
            return Outcome(note="no custom reward")
        name = context.raw(f"{prefix}.name") or "compute_score"
        return Outcome(values={"reward.function": f"{value}:{name}", "reward.type": "custom"})

    return rule


def _reward_function_name(prefix: str) -> Callable[[str, Any, Context], Outcome]:
    def rule(key: str, value: Any, context: Context) -> Outcome:
        return Outcome(
            note=f"part of reward.function with {prefix}.path" if context.raw(f"{prefix}.path") else "no custom reward"
        )

    return rule


def _do_sample(key: str, value: Any, context: Context) -> Outcome:
    if not value:
        return Outcome(values={"rollout.val_temperature": 0.0}, note="greedy")
    if context.value("rollout.val_temperature") == 0:
        raise ConfigError(
            f"{key}={value} asks for sampling, but rollout.val_temperature=0 is greedy; set rollout.val_temperature=1"
        )
    return Outcome(note=f"rollout.val_temperature={context.value('rollout.val_temperature')} samples")


def _betas(key: str, value: Any, context: Context) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{key}={value!r}: expected two numbers; write for example {key}=[0.9,0.999]")
    section = key.split(".")[-3]
    return Outcome(values={f"{section}.beta1": value[0], f"{section}.beta2": value[1]})


def _resume_mode(key: str, value: Any, context: Context) -> Outcome:
    modes = {"auto": "auto", "disable": "never", "resume_path": context.raw("trainer.resume_from_path")}
    if modes.get(str(value)) is None:
        raise ConfigError(f"{key}={value!r}: write auto, disable, or resume_path together with trainer.resume_from_path=FOLDER")
    return Outcome(values={"training.resume": modes[str(value)]})


def _resume_from(key: str, value: Any, context: Context) -> Outcome:
    if not value:
        return Outcome(note="not set")
    if context.raw("trainer.resume_mode") != "resume_path":
        raise ConfigError(f"{key}={value} has no effect without trainer.resume_mode=resume_path; write training.resume={value}")
    return Outcome(note="used by trainer.resume_mode")


def _turns(target: str) -> Callable[[str, Any, Context], Outcome]:
    def rule(key: str, value: Any, context: Context) -> Outcome:
        return Outcome(values={target: value, "multi_turn.enable": True})

    return rule


def _dialogue(name: str) -> Spelling:
    target = f"multi_turn.{name}"
    return depends(target, "multi_turn.enable", rule=_turns(target), how="and switches multi_turn on")


_CLIP = ("actor.clip_low", "actor.clip_high")
_GRADIENT_CLIP = ("actor.gradient_clip", "critic.gradient_clip")

TUTORIAL_SPELLINGS: dict[str, Spelling] = {
    "algorithm.grpo_beta": to("algorithm.kl_loss_coef"),
    "grpo_beta": to("algorithm.kl_loss_coef"),
    "algorithm.value_clip": to("critic.value_clip"),
    "algorithm.clip_epsilon": to(*_CLIP, weak=True),
    "actor.clip_epsilon": to(*_CLIP, weak=True),
    "clip_epsilon": to(*_CLIP, weak=True),
    "actor.model.path": to("model.path"),
    "actor.model.dtype": to("model.dtype"),
    "data.dataset_path": to("data.train_files"),
    "data.train_path": to("data.train_files"),
    "data.val_path": to("data.val_files"),
    "data.batch_size": to("data.train_batch_size"),
    "data.seq_len": depends(
        "data.max_prompt_length",
        "data.max_response_length",
        rule=_total_length,
        how="half each, or what the one given leaves",
    ),
    "training.learning_rate": to("actor.lr"),
    "actor.learning_rate": to("actor.lr"),
    "critic.learning_rate": to("critic.lr"),
    "training.batch_size": to("data.train_batch_size"),
    "training.gradient_clip": to(*_GRADIENT_CLIP, weak=True),
    "gradient_clip": to(*_GRADIENT_CLIP, weak=True),
    "actor_rollout_ref.model_name_or_path": to("model.path"),
    "actor_rollout_ref.actor_lr": to("actor.lr"),
    "actor_rollout_ref.rollout_batch_size": to("rollout.max_num_seqs"),
    "actor_rollout_ref.num_rollout_per_prompt": to("rollout.n"),
    "reward_model.type": to("reward.type"),
    "reward_model.reward_scale": to("reward.scale"),
    "reward.reward_scale": to("reward.scale"),
    "critic.critic_lr": to("critic.lr"),
    "critic.value_loss_coef": to("critic.loss_coef"),
    "trainer.algorithm": to("algorithm.adv_estimator", how="PPO becomes gae"),
    "trainer.total_steps": to("training.total_steps"),
    "trainer.save_interval": to("training.save_interval"),
    "tools": to("tools.names"),
    "max_turns": _dialogue("max_turns"),
    "context_window_size": _dialogue("context_window_size"),
    "state_tracking": _dialogue("state_tracking"),
    "memory_optimization.dtype": to("model.dtype"),
}
"""Keys that tutorials of this project show."""

_PACKED = "sequences are packed, never padded"
_BY_TOKENS = "micro-batches are always filled by tokens"
_NO_GRADIENTS = (
    "these passes keep no gradients, so they fit wherever the update does; actor.max_tokens_per_micro_batch bounds them"
)
_FUSED = "log-probs are always fused with the output projection"
_ENGINE = "the engine sees to it"
_SEQUENCE = "parallel.sequence_parallel_size"
_OFFLOAD_PARAM = "memory_optimization.param_offload"
_OFFLOAD_OPTIMIZER = "memory_optimization.optimizer_offload"
_CHECKPOINTING = "memory_optimization.gradient_checkpointing"


def _optimizer(prefix: str, section: str) -> dict[str, Spelling]:
    """Upstream's keys below `actor_rollout_ref.actor` and `critic` that mean the same for both models."""
    lr = to(f"{section}.lr")
    schedule = to(f"{section}.lr_schedule")
    clip = to(f"{section}.gradient_clip")
    micro = depends(
        f"{section}.max_tokens_per_micro_batch", rule=_micro_batch(section), how="times (max_prompt_length + max_response_length)"
    )
    return {
        f"{prefix}.optim.lr": lr,
        f"{prefix}.optim.lr_warmup_steps": to(
            f"{section}.lr_warmup_steps", convert=_no_warmup_if_negative, how="negative becomes 0: no warm-up"
        ),
        f"{prefix}.optim.lr_warmup_steps_ratio": always(0, why=f"warm-up is given in steps, {section}.lr_warmup_steps"),
        f"{prefix}.optim.lr_scheduler_type": schedule,
        f"{prefix}.optim.warmup_style": schedule,
        f"{prefix}.optim.min_lr_ratio": to(f"{section}.min_lr_ratio"),
        f"{prefix}.optim.weight_decay": to(f"{section}.weight_decay"),
        f"{prefix}.optim.betas": depends(f"{section}.beta1", f"{section}.beta2", rule=_betas, how="one element each"),
        f"{prefix}.optim.clip_grad": clip,
        f"{prefix}.grad_clip": clip,
        f"{prefix}.ppo_mini_batch_size": to(f"{section}.mini_batch_size"),
        f"{prefix}.ppo_micro_batch_size_per_gpu": micro,
        f"{prefix}.ppo_micro_batch_size": micro,
        f"{prefix}.ppo_max_token_len_per_gpu": to(f"{section}.max_tokens_per_micro_batch"),
        f"{prefix}.use_dynamic_bsz": always(True, why=_BY_TOKENS),
        f"{prefix}.ppo_epochs": to("actor.ppo_epochs" if section == "actor" else "critic.epochs"),
    }


def _log_prob_passes(prefix: str) -> dict[str, Spelling]:
    return {
        f"{prefix}.log_prob_micro_batch_size_per_gpu": automatic(_NO_GRADIENTS),
        f"{prefix}.log_prob_micro_batch_size": automatic(_NO_GRADIENTS),
        f"{prefix}.log_prob_max_token_len_per_gpu": automatic(_NO_GRADIENTS),
        f"{prefix}.log_prob_use_dynamic_bsz": always(True, why=_BY_TOKENS),
    }


def _custom_reward(prefix: str) -> dict[str, Spelling]:
    return {
        f"{prefix}.path": depends(
            "reward.function", "reward.type", rule=_reward_function(prefix), how="PATH:NAME, and type custom"
        ),
        f"{prefix}.name": depends(rule=_reward_function_name(prefix), how="NAME of the row above; compute_score if not given"),
        f"{prefix}.reward_kwargs": to("reward.function_kwargs"),
    }


UPSTREAM_SPELLINGS: dict[str, Spelling] = {
    # data
    "data.tokenizer": to("model.tokenizer_path"),
    "data.trust_remote_code": to("model.trust_remote_code"),
    "data.train_max_samples": to("data.max_train_rows", convert=_all_if_not_positive, how="-1 becomes null: all"),
    "data.val_max_samples": to("data.max_val_rows", convert=_all_if_not_positive, how="-1 becomes null: all"),
    "data.apply_chat_template_kwargs.enable_thinking": to("model.enable_thinking"),
    "data.dataloader_num_workers": automatic("data.prefetch batches are read ahead"),
    "data.filter_overlong_prompts_workers": automatic("prompts are counted while they are read"),
    "data.val_batch_size": automatic("the engine batches validation prompts by rollout.max_num_seqs"),
    "data.gen_batch_size": always(None, why="a step generates data.train_batch_size prompts"),
    "data.return_raw_chat": automatic("messages always stay with their rows"),
    "data.reward_fn_key": always("data_source", why="rewards get the column data_source"),
    "data.validation_shuffle": always(False, why="held-out rows keep their order"),
    # model
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.tokenizer_path": to("model.tokenizer_path"),
    "actor_rollout_ref.model.trust_remote_code": to("model.trust_remote_code"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to(_CHECKPOINTING),
    "actor_rollout_ref.model.use_remove_padding": always(True, why=_PACKED),
    "actor_rollout_ref.model.use_fused_kernels": always(True, why=_FUSED),
    "actor_rollout_ref.actor.checkpoint.async_save": to("training.async_save"),
    "critic.checkpoint.async_save": to("training.async_save"),
    "actor_rollout_ref.model.use_shm": always(False, why="model files are read where they are"),
    "actor_rollout_ref.hybrid_engine": always(True, why="trainer and rollout share the device"),
    # actor
    **_optimizer("actor_rollout_ref.actor", "actor"),
    "actor_rollout_ref.actor.clip_ratio": to(*_CLIP, how="clip_ratio_low and clip_ratio_high beside it win", weak=True),
    "actor_rollout_ref.actor.clip_ratio_low": to("actor.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": to("actor.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": to("actor.dual_clip"),
    "actor_rollout_ref.actor.entropy_coeff": to("actor.entropy_coef"),
    "actor_rollout_ref.actor.loss_agg_mode": to("actor.loss_aggregation"),
    _KL_LOSS: depends("algorithm.kl_loss_coef", rule=_use_kl_loss, how="False: 0; True without kl_loss_coef: 0.001"),
    _KL_LOSS_COEF: depends("algorithm.kl_loss_coef", rule=_with_kl_loss("algorithm.kl_loss_coef"), how="if use_kl_loss"),
    "actor_rollout_ref.actor.kl_loss_type": depends(
        "algorithm.kl_estimator",
        rule=_with_kl_loss("algorithm.kl_estimator"),
        how="if use_kl_loss; kl: k1, mse: k2, low_var_kl: k3",
    ),
    "actor_rollout_ref.actor.shuffle": always(False, why="mini-batches follow the order of the batch"),
    "actor_rollout_ref.actor.use_torch_compile": automatic(_ENGINE),
    "actor_rollout_ref.actor.fsdp_config.param_offload": to(_OFFLOAD_PARAM),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": to(_OFFLOAD_OPTIMIZER),
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": to(
        "parallel.fsdp_size", convert=_all_if_not_positive, how="-1 becomes null: all ranks"
    ),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": always("fp32", "float32", why="master weights are float32"),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": to("parallel.tensor_model_parallel_size"),
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": to("parallel.pipeline_model_parallel_size"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": to(_SEQUENCE),
    # reference
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": to(_SEQUENCE, weak=True),
    "critic.ulysses_sequence_parallel_size": to(_SEQUENCE, weak=True),
    "actor_rollout_ref.ref.fsdp_config.param_offload": to(_OFFLOAD_PARAM, weak=True),
    **_log_prob_passes("actor_rollout_ref.ref"),
    # rollout
    **_log_prob_passes("actor_rollout_ref.rollout"),
    "actor_rollout_ref.rollout.name": to("rollout.engine", how="hf becomes native"),
    "actor_rollout_ref.rollout.mode": automatic("the native engine has one mode"),
    "actor_rollout_ref.rollout.n": to("rollout.n"),
    "actor_rollout_ref.rollout.temperature": to("rollout.temperature"),
    "actor_rollout_ref.rollout.top_p": to("rollout.top_p"),
    "actor_rollout_ref.rollout.top_k": to(
        "rollout.top_k", convert=lambda value: -1 if value == 0 else value, how="0 becomes -1: off"
    ),
    "actor_rollout_ref.rollout.seed": to("rollout.seed"),
    "actor_rollout_ref.rollout.ignore_eos": to("rollout.ignore_eos"),
    "actor_rollout_ref.rollout.dtype": to("model.dtype"),
    "actor_rollout_ref.rollout.prompt_length": to("data.max_prompt_length"),
    "actor_rollout_ref.rollout.response_length": to("data.max_response_length"),
    "actor_rollout_ref.rollout.max_model_len": to("rollout.max_model_len"),
    "actor_rollout_ref.rollout.max_num_seqs": to("rollout.max_num_seqs"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "actor_rollout_ref.rollout.max_num_batched_tokens": automatic(_ENGINE),
    "actor_rollout_ref.rollout.enable_chunked_prefill": automatic(_ENGINE),
    "actor_rollout_ref.rollout.enforce_eager": to("rollout.enforce_eager"),
    "actor_rollout_ref.rollout.load_format": automatic("the engine shares the trainer's weights"),
    "actor_rollout_ref.rollout.free_cache_engine": always(True, why="the key-value cache is always freed for the update"),
    "actor_rollout_ref.rollout.calculate_log_probs": always(True, why="log-probs are always recorded"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": to("rollout.val_temperature"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": to("rollout.val_top_p"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": always(
        -1, 0, why="validation samples with val_temperature and val_top_p alone"
    ),
    "actor_rollout_ref.rollout.val_kwargs.n": to("rollout.val_n"),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": depends(
        "rollout.val_temperature", rule=_do_sample, how="False: 0; True needs a val_temperature above 0"
    ),
    "actor_rollout_ref.rollout.multi_turn.enable": to("multi_turn.enable"),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": to("multi_turn.max_turns"),
    # algorithm
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std"),
    "algorithm.use_kl_in_reward": to("algorithm.kl_in_reward"),
    "algorithm.kl_penalty": depends(
        "algorithm.kl_estimator", rule=_kl_penalty, how="with KL in the reward; kl: k1, mse: k2, low_var_kl: k3"
    ),
    "algorithm.kl_ctrl.type": to("algorithm.kl_controller"),
    "algorithm.kl_ctrl.kl_coef": to("algorithm.kl_coef"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_target"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon"),
    # critic
    **_optimizer("critic", "critic"),
    "critic.model.path": to("critic.path"),
    "critic.cliprange_value": to("critic.value_clip"),
    "critic.model.tokenizer_path": automatic("the critic reads the actor's tokens"),
    "critic.model.trust_remote_code": to("model.trust_remote_code"),
    "critic.model.enable_gradient_checkpointing": to(_CHECKPOINTING),
    "critic.model.use_remove_padding": always(True, why=_PACKED),
    "critic.model.fsdp_config.param_offload": to(_OFFLOAD_PARAM),
    "critic.model.fsdp_config.optimizer_offload": to(_OFFLOAD_OPTIMIZER),
    "critic.forward_micro_batch_size_per_gpu": automatic(
        "these passes keep no gradients, so they fit wherever the update does; critic.max_tokens_per_micro_batch bounds them"
    ),
    # reward
    **_custom_reward("custom_reward_function"),
    **_custom_reward("reward.custom_reward_function"),
    "reward_model.launch_reward_fn_async": automatic("rewards are scored in their own processes"),
    # trainer
    "trainer.project_name": to("tracking.project"),
    "trainer.experiment_name": to("tracking.experiment"),
    "trainer.logger": to("tracking.backends"),
    "trainer.total_epochs": to("training.max_epochs"),
    "trainer.total_training_steps": to("training.total_steps"),
    "trainer.test_freq": to("training.eval_interval", convert=_never_if_not_positive, how="-1 becomes 0: never"),
    "trainer.save_freq": to("training.save_interval", convert=_never_if_not_positive, how="-1 becomes 0: never"),
    "trainer.val_before_train": to("training.eval_before_training"),
    "trainer.critic_warmup": to("critic.warmup_steps"),
    "trainer.nnodes": to("parallel.nnodes"),
    "trainer.n_gpus_per_node": to("parallel.n_gpus_per_node"),
    "trainer.device": to("training.device"),
    "trainer.default_local_dir": to("training.output_dir"),
    "trainer.resume_mode": depends(
        "training.resume", rule=_resume_mode, how="disable becomes never, resume_path the folder of resume_from_path"
    ),
    "trainer.resume_from_path": depends(rule=_resume_from, how="read with resume_mode=resume_path"),
    "trainer.max_actor_ckpt_to_keep": to("training.keep_last", convert=_keep_all_if_null, how="null becomes 0: all"),
    "trainer.max_critic_ckpt_to_keep": to("training.keep_last", convert=_keep_all_if_null, how="null becomes 0: all"),
    "trainer.balance_batch": always(True, why="work is always balanced by tokens"),
    "trainer.log_val_generations": automatic("tracking.log_samples trajectories of each step are written"),
    "trainer.del_local_ckpt_after_load": always(False, why="training.keep_last alone deletes checkpoints"),
}
"""Keys of upstream training scripts."""

SPELLINGS: dict[str, Spelling] = {**TUTORIAL_SPELLINGS, **UPSTREAM_SPELLINGS}

UPSTREAM_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "rollout.n": 1,
    "data.train_batch_size": 1024,
    "actor.mini_batch_size": 256,
    "data.filter_overlong_prompts": False,
    "training.max_epochs": 30,
    "training.eval_interval": 0,
    "training.save_interval": 0,
}
"""Where upstream's default differs and training would come out differently: named when a script written for it is read."""
