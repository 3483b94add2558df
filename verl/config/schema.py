"""The configuration: typed, flat, strict. One dataclass a section; the string under each field says what it
means, in which unit, and why the default is what it is. `verl config` prints this table.

Spellings of other frameworks are translated in `verl.config.spellings`; nothing else maps names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """Hugging Face folder, or hub id. Required."""
    tokenizer_path: str | None = None
    """Where the tokenizer is, when not with the model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype: float32, bfloat16 or auto (bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slower).
    Master weights are float32 in either case."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it; None leaves their default."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Parquet, JSONL, JSON or CSV files, folders that hold them (train.*), or `hf:NAME[:SPLIT]` of the hub. Required to train."""
    val_files: list[str] = field(default_factory=list)
    """Held-out rows, same forms (a folder's test.*). Empty: no validation."""
    prompt_key: str | None = None
    """Column of the prompt. None: `prompt`, else `question`, else `problem`."""
    answer_key: str | None = None
    """Column of the ground truth. None: `reward_model.ground_truth`, else `answer`, else `solution`."""
    system_prompt: str | None = None
    """Put before plain-text prompts; None adds nothing."""
    instruction: str | None = None
    """Appended to plain-text prompts, after a space (how to format the answer, say)."""
    apply_chat_template: bool = True
    """False: plain-text prompts go to the model as they are (base models)."""
    train_batch_size: int = 256
    """Prompts a step."""
    max_prompt_length: int = 512
    """Tokens; longer prompts are dropped before training, or an error: see filter_overlong_prompts."""
    max_response_length: int = 512
    """Tokens the policy may generate per answer."""
    filter_overlong_prompts: bool = True
    """Drop prompts over max_prompt_length and say how many; False makes such a row an error."""
    shuffle: bool = True
    """A new seeded order each epoch."""
    seed: int | None = None
    """Of the order; None takes training.seed."""
    max_train_rows: int | None = None
    """Use the first rows only."""
    max_val_rows: int | None = None
    """Use the first rows only."""
    prefetch: int = 2
    """Batches read and tokenised ahead in a background thread; 0 does it in line."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    adv_estimator: Literal["grpo", "gae"] = "grpo"
    """grpo or gae (which is PPO: it trains a critic)."""
    gamma: float = 1.0
    """Discount a token. 1: answers are short episodes with one reward."""
    lam: float = 1.0
    """GAE's lambda. 1: no bias from the critic."""
    norm_adv_by_std: bool = True
    """GRPO: divide by the group's standard deviation. False is Dr.GRPO's numerator."""
    whiten_advantages: bool = True
    """GAE: normalise advantages over the batch's trained tokens."""
    kl_in_reward: bool = False
    """Subtract kl_coef * KL(policy, reference) from the token rewards (PPO's classic form)."""
    kl_coef: float = 0.001
    """Coefficient of the KL in the reward; where the adaptive controller starts."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """fixed or adaptive (Ziegler et al. 2019)."""
    kl_target: float = 0.1
    """Adaptive: KL a sequence, in nats, to hold."""
    kl_horizon: int = 10000
    """Adaptive: sequences over which the coefficient adapts."""
    kl_loss_coef: float = 0.0
    """Coefficient of a KL term in the loss (GRPO's beta). 0 needs no reference model, so saves one."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """k1, k2, k3 or abs; k1 and abs are for the reward only."""
    old_logprobs: Literal["auto", "trainer", "generator"] = "auto"
    """Where the ratio's denominator comes from: auto (the policy itself when a step is one update, else trainer),
    trainer (a forward pass before the updates) or generator (what the rollout engine recorded)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1e-6
    """AdamW's peak learning rate. `verl sft` takes 1e-5 unless this is set."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """constant, linear or cosine, after warm-up."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of lr."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay, multiplied by the learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients, an optimizer step."""
    beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients, an optimizer step."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    gradient_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens in one forward/backward pass; a memory setting that cannot change the result."""


@dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimizerConfig):
    mini_batch_size: int | None = None
    """Prompts an optimizer step. None: the whole batch, one strictly on-policy update."""
    ppo_epochs: int = 1
    """Passes over each batch."""
    clip_low: float = 0.2
    """PPO clip: ratio not rewarded below 1 - clip_low."""
    clip_high: float = 0.2
    """PPO clip: ratio not rewarded above 1 + clip_high."""
    dual_clip: float | None = 3.0
    """Bound of the ratio for negative advantages (Ye et al. 2020); None switches it off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. Above 0 entropy costs a little time."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """token-mean, seq-mean-token-mean, seq-mean-token-sum, or seq-mean-token-sum-norm (divided by max_response_length)."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig):
    lr: float = 1e-5
    """Larger than the actor's: the value head starts from nothing."""
    path: str | None = None
    """Model the critic starts from. None: the actor's."""
    mini_batch_size: int | None = None
    """Prompts an optimizer step. None: the actor's."""
    epochs: int = 1
    """Passes over each batch."""
    value_clip: float | None = 0.5
    """Value may move this far from its old prediction in one batch (PPO value clipping); None switches it off."""
    loss_coef: float = 1.0
    """Scales the value loss."""
    warmup_steps: int = 0
    """Steps in which only the critic is trained."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["auto", "native", "vllm", "sglang", "tgi"] = "auto"
    """native, vllm, sglang, tgi, or auto: vllm where it is installed and there is a GPU, else native."""
    n: int = 8
    """Samples a prompt."""
    temperature: float = 1.0
    """Of training rollouts. The trainer's log-probs use the same one."""
    top_p: float = 1.0
    """Sample from the fewest tokens that hold this probability; 1: off. Truncating training rollouts biases the ratios."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: off."""
    min_p: float = 0.0
    """Leave out tokens below this share of the most likely one's probability; 0: off."""
    max_num_seqs: int = 256
    """Sequences decoded at once."""
    max_model_len: int | None = None
    """Prompt plus response, tokens. None: max_prompt_length + max_response_length."""
    kv_cache_tokens: int | None = None
    """Size of the key-value cache in tokens. None: from free memory on a GPU, what max_num_seqs needs on a CPU."""
    kv_cache_block_size: int = 16
    """Tokens a cache block."""
    gpu_memory_utilization: float = 0.5
    """vLLM: share of a GPU's memory generation may use, weights and cache together."""
    enforce_eager: bool = False
    """vLLM: no CUDA graphs and no compilation. Starts minutes earlier, decodes slower."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end an answer, besides the tokenizer's end of sequence."""
    ignore_eos: bool = False
    """Go on after an end of sequence, up to max_response_length (for benchmarks)."""
    min_tokens: int = 0
    """No end of sequence before this many tokens."""
    seed: int | None = None
    """Of sampling; None takes training.seed."""
    val_n: int = 1
    """Samples a held-out prompt."""
    val_temperature: float = 0.0
    """0: greedy, so validation repeats exactly."""
    val_top_p: float = 1.0
    """top_p of validation; it counts only with val_temperature above 0."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    type: Literal["accuracy", "custom"] = "accuracy"
    """accuracy, or `custom`: what `function` returns. Setting `function` alone means custom."""
    function: str | None = None
    """`package.module:name` or `path/to/file.py:name`, called as
    (data_source, solution_str, ground_truth, extra_info) -> float or dict with a `score`."""
    function_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the function by name."""
    scale: float = 1.0
    """Multiplies every reward."""
    format_score: float = 0.0
    """accuracy: reward of a well-formed wrong answer."""
    answer_format: Literal["strict", "flexible"] = "flexible"
    """accuracy: strict (`#### N` or \\boxed{}) or flexible (these first, else the last number)."""
    workers: int = 0
    """Scoring processes. 0: as many as cores, 4 at most. Built-in rewards that cannot hang run in the driver."""
    timeout_s: float = 10.0
    """Deadline of one call; a call over it is killed, counted and given failure_reward."""
    failure_reward: float = 0.0
    """Reward of a sample whose scoring failed."""


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    names: list[str] = field(default_factory=list)
    """Tools the model may call."""


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    enable: bool = False
    """Let the model, its tools and a user take turns in one episode."""
    max_turns: int = 8
    """Assistant turns at most."""
    context_window_size: int | None = None
    """Tokens of history kept; None: all."""
    state_tracking: bool = False
    """Keep a dialogue state that rewards and tools can read."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    total_steps: int | None = None
    """Training steps. None: max_epochs decide."""
    max_epochs: int = 1
    """Passes over the data; total_steps ends earlier."""
    seed: int = 0
    """Of everything that is random."""
    runtime: Literal["auto", "local", "ray"] = "auto"
    """local (all in this process, on one device), ray (processes of a Ray cluster, which is joined or started) or auto: ray
    where `parallel` asks for several processes, else local."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto, cpu or cuda."""
    worker_timeout_s: float = 3600.0
    """Ray: a call on the workers that takes longer counts as hung, and ends the run with a message that names the ranks."""
    output_dir: str | None = None
    """Folder of the run: config, metrics, plots, checkpoints. None: runs/{tracking.experiment}."""
    save_interval: int | None = None
    """Steps between checkpoints. None: at the end only; 0: never."""
    async_save: bool = False
    """Go on training while a checkpoint is written, from a copy in host memory; the next save waits for it. Its folder has
    its name, and counts, only when it is complete."""
    keep_last: int = 2
    """Checkpoints kept, besides the one that the run was resumed from; 0 keeps all."""
    keep_best: int = 0
    """Checkpoints kept besides those for their score in validation; 0: none. Above 0 the link `best`, beside `last` in the
    run's folder of checkpoints, follows the best. Only a step that is both validated and saved has a score."""
    best_metric: str | None = None
    """The score of keep_best, as it is logged: val/accuracy, val/reward, val/pass@4 and so on. None: val/accuracy, with
    reward.type=custom val/reward, in `verl sft` val/loss. Of val/loss, val/truncated and val/response_length less is better."""
    eval_interval: int | None = None
    """Steps between validations. None: at the start and at the end; 0: never."""
    eval_before_training: bool = True
    """Validate once before the first step, so that the curve has its start."""
    resume: str = "auto"
    """auto (go on from output_dir's last checkpoint, if any), never, or a checkpoint folder. true and false: auto, never."""
    last_link: str | None = "checkpoints/last"
    """A link kept at this path to the newest complete checkpoint of the newest run; null for none."""
    max_restarts: int = 0
    """Ray: how often a run starts again from its last checkpoint after a worker died or hung."""
    max_policy_lag: int = 0
    """Policy versions a sample may be old. 0: strictly on-policy."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = 1
    """Devices that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Devices that the layers are spread over."""
    sequence_parallel_size: int = 1
    """Devices that share each row of tokens, and exchange them for attention heads (Ulysses): for long sequences."""
    data_parallel_size: int | None = None
    """Ranks that share a batch, each with a slice of the model (FSDP). None: what the devices leave; one on CPUs."""
    fsdp_size: int | None = None
    """Ranks that hold one sliced copy of the model; between such groups it is replicated (HSDP). None: all ranks."""
    rollout_devices: int | None = None
    """Of all devices this many only generate, each with the whole model, and take the weights from the others (separated); on
    CPUs so many more processes. None: generation and training take turns on the same devices (colocated)."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int | None = None
    """GPUs used on each machine. None: all present."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    param_offload: bool = False
    """Parameters of every model are in host memory except while they are used: the critic's during generation, say."""
    optimizer_offload: bool = False
    """Adam's moments and float32 master weights are in host memory except during the optimizer step."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass. The same switch as gradient_checkpointing."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: about a third more time for a fraction of the memory."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    project: str = "verl"
    """Name under which trackers group runs."""
    experiment: str | None = None
    """Name of the run. None: {algorithm}-{model name}."""
    backends: list[Literal["console", "tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["console"])
    """console, tensorboard, wandb, mlflow. JSONL and CSV are always written."""
    log_samples: int = 2
    """Trajectories of each step written to samples.jsonl with their rewards."""
    plots: bool = True
    """Draw the curves (PNG) at the end."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory_optimization: MemoryConfig = field(default_factory=MemoryConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
