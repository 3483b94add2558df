"""Every row of the spellings table, how rows meet each other, and what is understood but refused."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config import ANY, Config, config_from_dict
from verl.config.fields import FIELDS, flat_values
from verl.config.spellings import SPELLINGS, TUTORIAL_SPELLINGS, UPSTREAM_DEFAULTS, UPSTREAM_SPELLINGS
from verl.config.support import NOT_YET
from verl.errors import ConfigError

NEEDED: dict[str, Any] = {"model.path": "m", "data.train_files": ["d"]}
KL = "actor_rollout_ref.actor.use_kl_loss"


def resolve(keys: dict[str, Any], *, needed: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """What differs from the defaults, and the lines printed without warnings and the note on upstream's defaults."""
    lines: list[str] = []
    base = NEEDED if needed is None else needed
    config = config_from_dict(base, keys, purpose=ANY, printer=lines.append)
    defaults = flat_values(Config()) | base
    changed = {key: value for key, value in flat_values(config).items() if value != defaults[key]}
    kept = [line for line in lines if "warning: " not in line and "different upstream" not in line]
    return changed, kept


def refusal(keys: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def actor_or_critic(prefix: str, section: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {
        f"{prefix}.optim.lr": ("2e-6", {f"{section}.lr": 2e-6}),
        f"{prefix}.optim.lr_warmup_steps": (-1, {}),
        f"{prefix}.optim.lr_warmup_steps_ratio": (0.0, {}),
        f"{prefix}.optim.lr_scheduler_type": ("cosine", {f"{section}.lr_schedule": "cosine"}),
        f"{prefix}.optim.warmup_style": ("cosine", {f"{section}.lr_schedule": "cosine"}),
        f"{prefix}.optim.min_lr_ratio": (0.1, {f"{section}.min_lr_ratio": 0.1}),
        f"{prefix}.optim.weight_decay": (0.1, {f"{section}.weight_decay": 0.1}),
        f"{prefix}.optim.betas": ([0.8, 0.95], {f"{section}.beta1": 0.8, f"{section}.beta2": 0.95}),
        f"{prefix}.optim.clip_grad": (0.5, {f"{section}.gradient_clip": 0.5}),
        f"{prefix}.grad_clip": (0.5, {f"{section}.gradient_clip": 0.5}),
        f"{prefix}.ppo_mini_batch_size": (64, {f"{section}.mini_batch_size": 64}),
        # 4 sequences x (512 + 512) tokens
        f"{prefix}.ppo_micro_batch_size_per_gpu": (4, {f"{section}.max_tokens_per_micro_batch": 4096}),
        f"{prefix}.ppo_micro_batch_size": (2, {f"{section}.max_tokens_per_micro_batch": 2048}),
        f"{prefix}.ppo_max_token_len_per_gpu": (9000, {f"{section}.max_tokens_per_micro_batch": 9000}),
        f"{prefix}.use_dynamic_bsz": (True, {}),
        f"{prefix}.ppo_epochs": (2, {"actor.ppo_epochs" if section == "actor" else "critic.epochs": 2}),
    }


def log_prob_passes(prefix: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {
        f"{prefix}.log_prob_micro_batch_size_per_gpu": (8, {}),
        f"{prefix}.log_prob_micro_batch_size": (8, {}),
        f"{prefix}.log_prob_max_token_len_per_gpu": (8192, {}),
        f"{prefix}.log_prob_use_dynamic_bsz": (True, {}),
    }


CLIP = {"actor.clip_low": 0.1, "actor.clip_high": 0.1}
BOTH_CLIPS = {"actor.gradient_clip": 0.5, "critic.gradient_clip": 0.5}
RR, AA = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "algorithm.grpo_beta": (0.1, {"algorithm.kl_loss_coef": 0.1}),
    "grpo_beta": (0.15, {"algorithm.kl_loss_coef": 0.15}),
    "algorithm.value_clip": (0.4, {"critic.value_clip": 0.4}),
    "algorithm.clip_epsilon": (0.1, CLIP),
    "actor.clip_epsilon": (0.1, CLIP),
    "clip_epsilon": (0.1, CLIP),
    "actor.model.path": ("Qwen/Qwen2-7B-Instruct", {"model.path": "Qwen/Qwen2-7B-Instruct"}),
    "actor.model.dtype": ("bfloat16", {"model.dtype": "bfloat16"}),
    "data.dataset_path": ("./data/x", {"data.train_files": ["./data/x"]}),
    "data.train_path": ("./x.parquet", {"data.train_files": ["./x.parquet"]}),
    "data.val_path": ("./y.parquet", {"data.val_files": ["./y.parquet"]}),
    "data.batch_size": (64, {"data.train_batch_size": 64}),
    "data.seq_len": (301, {"data.max_prompt_length": 150, "data.max_response_length": 151}),
    "training.learning_rate": (2e-6, {"actor.lr": 2e-6}),
    "actor.learning_rate": (2e-6, {"actor.lr": 2e-6}),
    "critic.learning_rate": (2e-6, {"critic.lr": 2e-6}),
    "training.batch_size": (64, {"data.train_batch_size": 64}),
    "training.gradient_clip": (0.5, BOTH_CLIPS),
    "gradient_clip": (0.5, BOTH_CLIPS),
    "actor_rollout_ref.model_name_or_path": ("q", {"model.path": "q"}),
    "actor_rollout_ref.actor_lr": (2e-6, {"actor.lr": 2e-6}),
    "actor_rollout_ref.rollout_batch_size": (64, {"rollout.max_num_seqs": 64}),
    "actor_rollout_ref.num_rollout_per_prompt": (2, {"rollout.n": 2}),
    "reward_model.type": ("Accuracy", {}),
    "reward_model.reward_scale": (2.0, {"reward.scale": 2.0}),
    "reward.reward_scale": (2.0, {"reward.scale": 2.0}),
    "critic.critic_lr": (5e-6, {"critic.lr": 5e-6}),
    "critic.value_loss_coef": (0.1, {"critic.loss_coef": 0.1}),
    "trainer.algorithm": ("PPO", {"algorithm.adv_estimator": "gae"}),
    "trainer.total_steps": (10, {"training.total_steps": 10}),
    "trainer.save_interval": (5, {"training.save_interval": 5}),
    "tools": ([], {}),
    "memory_optimization.dtype": ("bfloat16", {"model.dtype": "bfloat16"}),
    "data.tokenizer": ("t", {"model.tokenizer_path": "t"}),
    "data.trust_remote_code": (True, {"model.trust_remote_code": True}),
    "data.train_max_samples": (-1, {}),
    "data.val_max_samples": (100, {"data.max_val_rows": 100}),
    "data.apply_chat_template_kwargs.enable_thinking": (False, {"model.enable_thinking": False}),
    "data.dataloader_num_workers": (8, {}),
    "data.filter_overlong_prompts_workers": (8, {}),
    "data.val_batch_size": (None, {}),
    "data.gen_batch_size": (None, {}),
    "data.return_raw_chat": (True, {}),
    "data.reward_fn_key": ("data_source", {}),
    "data.validation_shuffle": (False, {}),
    "actor_rollout_ref.model.path": ("q", {"model.path": "q"}),
    "actor_rollout_ref.model.tokenizer_path": ("t", {"model.tokenizer_path": "t"}),
    "actor_rollout_ref.model.trust_remote_code": (True, {"model.trust_remote_code": True}),
    "actor_rollout_ref.actor.checkpoint.async_save": (True, {"training.async_save": True}),
    "critic.checkpoint.async_save": (True, {"training.async_save": True}),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (True, {"memory_optimization.gradient_checkpointing": True}),
    "actor_rollout_ref.model.use_remove_padding": (True, {}),
    "actor_rollout_ref.model.use_fused_kernels": (True, {}),
    "actor_rollout_ref.model.use_shm": (False, {}),
    "actor_rollout_ref.hybrid_engine": (True, {}),
    **actor_or_critic(AA, "actor"),
    f"{AA}.clip_ratio": (0.1, CLIP),
    f"{AA}.clip_ratio_low": (0.1, {"actor.clip_low": 0.1}),
    f"{AA}.clip_ratio_high": (0.28, {"actor.clip_high": 0.28}),
    f"{AA}.clip_ratio_c": (10.0, {"actor.dual_clip": 10.0}),
    f"{AA}.entropy_coeff": (0.01, {"actor.entropy_coef": 0.01}),
    f"{AA}.loss_agg_mode": ("seq-mean-token-sum", {"actor.loss_aggregation": "seq-mean-token-sum"}),
    f"{AA}.use_kl_loss": (True, {"algorithm.kl_loss_coef": 0.001}),
    f"{AA}.shuffle": (False, {}),
    f"{AA}.use_torch_compile": (False, {}),
    f"{AA}.fsdp_config.param_offload": (False, {}),
    f"{AA}.fsdp_config.optimizer_offload": (False, {}),
    "actor_rollout_ref.ref.fsdp_config.param_offload": (True, {"memory_optimization.param_offload": True}),
    f"{AA}.fsdp_config.fsdp_size": (2, {"parallel.fsdp_size": 2}),
    f"{AA}.fsdp_config.model_dtype": ("fp32", {}),
    f"{AA}.megatron.tensor_model_parallel_size": (1, {}),
    f"{AA}.megatron.pipeline_model_parallel_size": (1, {}),
    **log_prob_passes("actor_rollout_ref.ref"),
    **log_prob_passes(RR),
    f"{RR}.name": ("hf", {"rollout.engine": "native"}),
    f"{RR}.mode": ("async", {}),
    f"{RR}.n": (4, {"rollout.n": 4}),
    f"{RR}.temperature": (0.7, {"rollout.temperature": 0.7}),
    f"{RR}.top_p": (0.9, {"rollout.top_p": 0.9}),
    f"{RR}.top_k": (0, {}),
    f"{RR}.seed": (3, {"rollout.seed": 3}),
    f"{RR}.ignore_eos": (True, {"rollout.ignore_eos": True}),
    f"{RR}.dtype": ("bfloat16", {"model.dtype": "bfloat16"}),
    f"{RR}.prompt_length": (100, {"data.max_prompt_length": 100}),
    f"{RR}.response_length": (100, {"data.max_response_length": 100}),
    f"{RR}.max_model_len": (4096, {"rollout.max_model_len": 4096}),
    f"{RR}.max_num_seqs": (64, {"rollout.max_num_seqs": 64}),
    f"{RR}.gpu_memory_utilization": (0.6, {"rollout.gpu_memory_utilization": 0.6}),
    f"{RR}.max_num_batched_tokens": (8192, {}),
    f"{RR}.enable_chunked_prefill": (True, {}),
    f"{RR}.enforce_eager": (True, {"rollout.enforce_eager": True}),
    f"{RR}.load_format": ("dummy", {}),
    f"{RR}.free_cache_engine": (True, {}),
    f"{RR}.calculate_log_probs": (True, {}),
    f"{RR}.val_kwargs.temperature": (0.6, {"rollout.val_temperature": 0.6}),
    f"{RR}.val_kwargs.top_p": (0.7, {"rollout.val_top_p": 0.7}),
    f"{RR}.val_kwargs.top_k": (-1, {}),
    f"{RR}.val_kwargs.n": (4, {"rollout.val_n": 4}),
    f"{RR}.val_kwargs.do_sample": (False, {}),
    f"{RR}.multi_turn.enable": (False, {}),
    f"{RR}.multi_turn.max_assistant_turns": (5, {"multi_turn.max_turns": 5}),
    "algorithm.norm_adv_by_std_in_grpo": (False, {"algorithm.norm_adv_by_std": False}),
    "algorithm.use_kl_in_reward": (True, {"algorithm.kl_in_reward": True}),
    "algorithm.kl_penalty": ("kl", {}),
    "algorithm.kl_ctrl.type": ("fixed", {}),
    "algorithm.kl_ctrl.kl_coef": (0.01, {"algorithm.kl_coef": 0.01}),
    "algorithm.kl_ctrl.target_kl": (0.2, {"algorithm.kl_target": 0.2}),
    "algorithm.kl_ctrl.horizon": (500, {"algorithm.kl_horizon": 500}),
    **actor_or_critic("critic", "critic"),
    "critic.model.path": ("c", {"critic.path": "c"}),
    "critic.cliprange_value": (0.2, {"critic.value_clip": 0.2}),
    "critic.model.tokenizer_path": ("t", {}),
    "critic.model.trust_remote_code": (True, {"model.trust_remote_code": True}),
    "critic.model.enable_gradient_checkpointing": (True, {"memory_optimization.gradient_checkpointing": True}),
    "critic.model.use_remove_padding": (True, {}),
    "critic.model.fsdp_config.param_offload": (False, {}),
    "critic.model.fsdp_config.optimizer_offload": (False, {}),
    "critic.forward_micro_batch_size_per_gpu": (8, {}),
    "custom_reward_function.path": ("r.py", {"reward.function": "r.py:compute_score", "reward.type": "custom"}),
    "custom_reward_function.name": ("f", {}),
    "reward.custom_reward_function.path": ("r.py", {"reward.function": "r.py:compute_score", "reward.type": "custom"}),
    "reward.custom_reward_function.name": ("f", {}),
    "reward_model.launch_reward_fn_async": (True, {}),
    "trainer.project_name": ("p", {"tracking.project": "p"}),
    "trainer.experiment_name": ("e", {"tracking.experiment": "e"}),
    "trainer.logger": (["console", "wandb"], {"tracking.backends": ["console", "wandb"]}),
    "trainer.total_epochs": (15, {"training.max_epochs": 15}),
    "trainer.total_training_steps": (None, {}),
    "trainer.test_freq": (-1, {"training.eval_interval": 0}),
    "trainer.save_freq": (-1, {"training.save_interval": 0}),
    "trainer.val_before_train": (False, {"training.eval_before_training": False}),
    "trainer.critic_warmup": (5, {"critic.warmup_steps": 5}),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (2, {"parallel.sequence_parallel_size": 2}),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (2, {"parallel.sequence_parallel_size": 2}),
    "critic.ulysses_sequence_parallel_size": (2, {"parallel.sequence_parallel_size": 2}),
    "trainer.nnodes": (1, {}),
    "trainer.n_gpus_per_node": (1, {"parallel.n_gpus_per_node": 1}),
    "trainer.device": ("cuda", {"training.device": "cuda"}),
    "trainer.default_local_dir": ("out", {"training.output_dir": "out"}),
    "trainer.resume_mode": ("disable", {"training.resume": "never"}),
    "trainer.resume_from_path": (None, {}),
    "trainer.max_actor_ckpt_to_keep": (None, {"training.keep_last": 0}),
    "trainer.max_critic_ckpt_to_keep": (3, {"training.keep_last": 3}),
    "trainer.balance_batch": (True, {}),
    "trainer.log_val_generations": (10, {}),
    "trainer.del_local_ckpt_after_load": (False, {}),
}
"""Row -> a value that works alone, and what it changes."""

NOT_ALONE: dict[str, tuple[Any, str]] = {
    "max_turns": (8, "not supported"),
    "context_window_size": (4096, "not supported"),
    "state_tracking": (True, "not supported"),
    f"{AA}.kl_loss_coef": (0.01, "no effect upstream without"),
    f"{AA}.kl_loss_type": ("low_var_kl", "no effect upstream without"),
    "custom_reward_function.reward_kwargs": ({"a": 1}, "reward.function_kwargs has no effect"),
    "reward.custom_reward_function.reward_kwargs": ({"a": 1}, "reward.function_kwargs has no effect"),
}
"""Rows that are refused on their own; tests below show them in company."""


def test_examples_cover_the_table():
    assert set(EXAMPLES) | set(NOT_ALONE) == set(SPELLINGS)
    assert not set(EXAMPLES) & set(NOT_ALONE)
    assert not set(TUTORIAL_SPELLINGS) & set(UPSTREAM_SPELLINGS)


def test_rows_name_canonical_keys_and_are_none_themselves():
    assert {target for row in SPELLINGS.values() for target in row.targets} <= set(FIELDS)
    assert not set(SPELLINGS) & set(FIELDS)
    assert set(UPSTREAM_DEFAULTS) <= set(FIELDS)


@pytest.mark.parametrize("key", EXAMPLES)
def test_row(key: str):
    value, expected = EXAMPLES[key]
    needed = {name: given for name, given in NEEDED.items() if name not in expected}
    changed, lines = resolve({key: value}, needed=needed)
    assert changed == expected
    assert set(expected) <= set(SPELLINGS[key].targets)
    assert len(lines) == 1  # printed exactly once
    assert lines[0].startswith((f"config: {key} -> ", f"config: {key}={value} -> ", f"config: {key}={value}: "))


@pytest.mark.parametrize("key", NOT_ALONE)
def test_row_that_needs_company(key: str):
    value, part = NOT_ALONE[key]
    assert part in refusal({key: value})


@pytest.mark.parametrize("key", [k for k, row in SPELLINGS.items() if row.how.startswith("only ")])
def test_switch_with_one_position_refuses_the_other(key: str):
    other = not EXAMPLES[key][0] if isinstance(EXAMPLES[key][0], bool) else 7
    assert f"{key}={other} cannot be had" in refusal({key: other})


def test_line_format():
    assert resolve({"data.train_path": "x"}, needed={})[1] == ["config: data.train_path -> data.train_files"]
    assert resolve({"trainer.test_freq": -1})[1] == ["config: trainer.test_freq=-1 -> training.eval_interval=0"]
    assert resolve({"algorithm.adv_estimator": "PPO"})[1] == ["config: algorithm.adv_estimator=PPO -> gae"]


def test_two_spellings_must_agree():
    message = refusal({"actor.lr": 1e-5, "training.learning_rate": 2e-5})
    assert message == "actor.lr=1e-05 and training.learning_rate=2e-05 both set actor.lr; keep one of them"
    assert resolve({"actor.lr": 1e-5, "training.learning_rate": "1e-5"})[0] == {"actor.lr": 1e-5}
    assert "both set memory_optimization.gradient_checkpointing" in refusal(
        {"actor_rollout_ref.model.enable_gradient_checkpointing": True, "critic.model.enable_gradient_checkpointing": False}
    )


def test_seq_len_leaves_what_is_given():
    assert resolve({"data.seq_len": 512, "data.max_prompt_length": 200})[0] == {
        "data.max_prompt_length": 200,
        "data.max_response_length": 312,
    }
    assert resolve({"data.seq_len": 300, "data.max_response_length": 200})[0] == {
        "data.max_prompt_length": 100,
        "data.max_response_length": 200,
    }
    message = refusal({"data.seq_len": 512, "data.max_prompt_length": 200, "data.max_response_length": 200})
    assert "data.max_prompt_length + data.max_response_length = 200 + 200 = 400" in message
    assert "expected a whole number" in refusal({"data.seq_len": "long"})


def test_stronger_source_may_give_both_lengths():
    config = config_from_dict(
        NEEDED | {"data.seq_len": 512}, {"data.max_prompt_length": 64, "data.max_response_length": 32}, printer=[].append
    )
    assert (config.data.max_prompt_length, config.data.max_response_length) == (64, 32)


def test_micro_batch_uses_the_lengths_wherever_they_come_from():
    keys = {f"{AA}.ppo_micro_batch_size_per_gpu": 8, "data.seq_len": 100}
    assert resolve(keys)[0]["actor.max_tokens_per_micro_batch"] == 800
    changed, lines = resolve(keys | {f"{AA}.ppo_max_token_len_per_gpu": 5000})
    assert changed["actor.max_tokens_per_micro_batch"] == 5000
    assert f"config: {AA}.ppo_micro_batch_size_per_gpu=8: no effect, actor.max_tokens_per_micro_batch=5000 is given" in lines


def test_specific_settings_win_over_general_ones():
    assert resolve({"gradient_clip": 0.5, "actor.gradient_clip": 2.0})[0] == {
        "actor.gradient_clip": 2.0,
        "critic.gradient_clip": 0.5,
    }
    assert resolve({f"{AA}.clip_ratio": 0.1, f"{AA}.clip_ratio_high": 0.28})[0] == {
        "actor.clip_low": 0.1,
        "actor.clip_high": 0.28,
    }
    assert "both set actor.gradient_clip" in refusal({"gradient_clip": 0.5, "training.gradient_clip": 0.7})


def test_kl_loss_flags():
    coef, kind = f"{AA}.kl_loss_coef", f"{AA}.kl_loss_type"
    assert resolve({KL: True, coef: 0.01, kind: "mse"})[0] == {"algorithm.kl_loss_coef": 0.01, "algorithm.kl_estimator": "k2"}
    assert resolve({KL: True, coef: 0.01, kind: "low_var_kl"})[0] == {"algorithm.kl_loss_coef": 0.01}
    changed, lines = resolve({KL: False, coef: 0.01, kind: "mse"})
    assert changed == {}
    assert f"config: {coef}=0.01: no effect with {KL}=False" in lines
    assert f"no effect upstream without {KL}=True" in refusal({coef: 0.01})
    assert "serves the reward only" in refusal({KL: True, coef: 0.01, kind: "kl"})


def test_gae_with_kl_in_reward():
    keys = {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.02,
        KL: False,
    }
    assert resolve(keys)[0] == {
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_in_reward": True,
        "algorithm.kl_estimator": "k1",
        "algorithm.kl_controller": "adaptive",
        "algorithm.kl_coef": 0.02,
    }


@pytest.mark.parametrize("prefix", ["custom_reward_function", "reward.custom_reward_function"])
def test_custom_reward(prefix: str):
    keys = {f"{prefix}.path": "a/r.py", f"{prefix}.name": "grade", f"{prefix}.reward_kwargs": {"k": 1}}
    assert resolve(keys)[0] == {
        "reward.type": "custom",
        "reward.function": "a/r.py:grade",
        "reward.function_kwargs": {"k": 1},
    }
    assert resolve({f"{prefix}.path": None, f"{prefix}.name": "grade"})[0] == {}


def test_validation_sampling_flags():
    do_sample, temperature = f"{RR}.val_kwargs.do_sample", f"{RR}.val_kwargs.temperature"
    assert resolve({do_sample: True, temperature: 0.6})[0] == {"rollout.val_temperature": 0.6}
    assert "is greedy" in refusal({do_sample: True})
    assert "both set rollout.val_temperature" in refusal({do_sample: False, temperature: 0.6})


def test_resume_flags(tmp_path):
    keys = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(tmp_path)}
    assert resolve(keys)[0] == {"training.resume": str(tmp_path)}
    assert "write auto, disable, or resume_path" in refusal({"trainer.resume_mode": "resume_path"})
    assert f"write training.resume={tmp_path}" in refusal({"trainer.resume_from_path": str(tmp_path)})


def test_upstream_defaults_that_differ_are_named():
    lines: list[str] = []
    config_from_dict(NEEDED, {"trainer.total_epochs": 3, "algorithm.adv_estimator": "grpo"}, printer=lines.append)
    (line,) = [line for line in lines if "different upstream" in line]
    assert "rollout.n=8 (upstream 1)" in line
    assert "adv_estimator" not in line
    assert "max_epochs" not in line
    config_from_dict(NEEDED, {"trainer.total_steps": 3}, printer=lines.append)
    assert len([line for line in lines if "different upstream" in line]) == 1


REFUSED: dict[str, list[Any]] = {
    "algorithm.adv_estimator": ["rloo", "REINFORCE_PLUS_PLUS"],
    "rollout.engine": ["sglang", "tgi"],
    "reward.type": ["multi_step"],
    "training.runtime": ["ray"],
    "reward.steps_weight": [[0.3, 0.3, 0.4]],
    "tools.names": ["calculator", ["calculator"]],
    "data.truncation": ["left"],
    f"{AA}.policy_loss.loss_mode": ["gspo"],
    f"{AA}.strategy": ["megatron"],
    "critic.strategy": ["megatron"],
    "actor_rollout_ref.model.target_modules": ["all-linear"],
    "reward_model.reward_manager": ["dapo"],
    "reward.reward_manager.name": ["dapo"],
    f"{AA}.megatron.expert_model_parallel_size": [2],
}


@pytest.mark.parametrize("key", NOT_YET)
def test_what_is_not_supported_is_refused(key: str):
    boolean = key in FIELDS and FIELDS[key].type is bool
    for value in REFUSED.get(key, [True] if boolean else [2]):
        message = refusal({key: value})
        assert "is understood but not supported in this version; " + NOT_YET[key].instead in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{RR}.name", "sglang"),
        ("tools", ["calculator"]),
        ("max_turns", 8),
        ("state_tracking", True),
        ("reward_model.type", "multi_step"),
    ],
)
def test_refusal_names_what_the_user_wrote(key: str, value: Any):
    assert refusal({key: value}).startswith(f"{key}={value} is understood but not supported")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.model.lora_rank", 0),
        (f"{RR}.tensor_model_parallel_size", 1),
        ("reward.calculator", False),
        (f"{AA}.strategy", "fsdp2"),
    ],
)
def test_switches_that_are_off_pass_with_a_line(key: str, value: Any):
    changed, lines = resolve({key: value})
    assert changed == {}
    assert lines == [f"config: {key}={value}: as always in this version"]


def test_override_lifts_what_the_file_asks_for():
    config = config_from_dict(NEEDED | {f"{RR}.name": "sglang"}, {"rollout.engine": "native"}, printer=[].append)
    assert config.rollout.engine == "native"


def test_a_whole_upstream_script():
    keys = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": "d/train.parquet",
        "data.val_files": "d/test.parquet",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 1024,
        "data.filter_overlong_prompts": True,
        "data.truncation": "error",
        "actor_rollout_ref.model.path": "Qwen/Qwen2-7B-Instruct",
        f"{AA}.optim.lr": 1e-6,
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{AA}.ppo_mini_batch_size": 256,
        f"{AA}.ppo_micro_batch_size_per_gpu": 40,
        f"{AA}.use_kl_loss": True,
        f"{AA}.kl_loss_coef": 0.001,
        f"{AA}.kl_loss_type": "low_var_kl",
        f"{AA}.entropy_coeff": 0,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{AA}.fsdp_config.param_offload": False,
        f"{AA}.fsdp_config.optimizer_offload": False,
        f"{RR}.log_prob_micro_batch_size_per_gpu": 40,
        f"{RR}.tensor_model_parallel_size": 1,
        f"{RR}.name": "hf",
        f"{RR}.gpu_memory_utilization": 0.6,
        f"{RR}.n": 5,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 40,
        "actor_rollout_ref.ref.fsdp_config.param_offload": False,
        "algorithm.use_kl_in_reward": False,
        "trainer.critic_warmup": 0,
        "trainer.logger": ["console", "wandb"],
        "trainer.project_name": "verl_grpo_example_gsm8k",
        "trainer.experiment_name": "qwen2_7b_function_rm",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.save_freq": 20,
        "trainer.test_freq": 5,
        "trainer.total_epochs": 15,
    }
    changed, lines = resolve(keys, needed={})
    assert changed == {
        "model.path": "Qwen/Qwen2-7B-Instruct",
        "data.train_files": ["d/train.parquet"],
        "data.val_files": ["d/test.parquet"],
        "data.train_batch_size": 1024,
        "data.max_response_length": 1024,
        "algorithm.kl_loss_coef": 0.001,
        "actor.mini_batch_size": 256,
        "actor.max_tokens_per_micro_batch": 61440,  # 40 x (512 + 1024)
        "rollout.engine": "native",
        "rollout.n": 5,
        "rollout.gpu_memory_utilization": 0.6,
        "memory_optimization.gradient_checkpointing": True,
        "tracking.backends": ["console", "wandb"],
        "tracking.project": "verl_grpo_example_gsm8k",
        "tracking.experiment": "qwen2_7b_function_rm",
        "parallel.n_gpus_per_node": 1,
        "training.save_interval": 20,
        "training.eval_interval": 5,
        "training.max_epochs": 15,
    }
    assert len(lines) == len([key for key in keys if key not in FIELDS])
