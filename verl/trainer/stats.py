"""Statistics of a step that no loss reports."""

from __future__ import annotations

import torch

from verl.config.schema import Config
from verl.controller import WorkerGroup
from verl.data.batch import TokenBatch
from verl.observe.metrics import Last, Max, Mean, Metrics, Min, Sum


def batch_metrics(batch: TokenBatch, seconds: float) -> Metrics:
    """Lengths and throughput of one step that took `seconds`."""
    responses = batch.response_lengths()
    prompts = batch.lengths - responses
    return {
        "response_length/mean": Mean(float(responses.sum()), len(batch)),
        "response_length/max": Max(float(responses.max())),
        "response_length/min": Min(float(responses.min())),
        "response_length/clip_ratio": Mean(float(batch.truncated.sum()), len(batch)),
        "prompt_length/mean": Mean(float(prompts.sum()), len(batch)),
        "perf/total_num_tokens": Sum(batch.num_tokens),
        "perf/tokens_per_s": Last(batch.num_tokens / seconds),
    }


def policy_kl_sample(actor: WorkerGroup, batch: TokenBatch, config: Config) -> Metrics:
    """How far this step moved the policy: k3 estimate of KL(before, after) in nats a token, on a sixteenth of the
    sequences (four at least), so that it costs little. The log-probs before are the trainer's where they were
    computed, else the generator's; with truncated sampling those are of another distribution, and nothing is said.

    With x = log after - log before, tokens drawn before: KL(before, after) = E[exp(x) - 1 - x] (Schulman 2020, k3).
    """
    truncated = (
        config.rollout.top_p < 1 or config.rollout.top_k > 0 or config.rollout.min_p > 0 or config.rollout.temperature == 0
    )
    if "old_logprobs" not in batch and truncated:
        return {}
    stride = max(1, min(16, len(batch) // 4))
    sample = batch.select(torch.arange(0, len(batch), stride))
    before = sample.old_logprobs if "old_logprobs" in sample else sample.generator_logprobs
    log_ratio = (actor.compute_log_probs(sample) - before)[sample.loss_mask].double()
    k3 = log_ratio.exp() - 1 - log_ratio
    return {"actor/policy_kl": Mean(float(k3.sum()), k3.numel())}
