"""Log-probs of the native rollout engine against the trainer's on the same weights, and the engine's speed.

    python benchmarks/engine_parity.py --model DIR --data gsm8k/train.parquet

Answers prompts at temperature 1 and compares the log-prob each token was sampled with to the trainer's, in the
model's compute dtype (bfloat16 on a GPU, float32 on a CPU).
"""

from __future__ import annotations

import argparse
import time

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    from verl.config import config_from_dict
    from verl.controller import WorkerContext
    from verl.data.batch import TokenBatch
    from verl.data.datasets import load_prompt_dataset
    from verl.data.tokenizer import load_tokenizer
    from verl.engines.train.loading import resolve_device
    from verl.observe.console import quiet_third_party
    from verl.trainer.rollouts import rollout_tasks, training_sampling
    from verl.workers.model import ActorWorker
    from verl.workers.rollout import RolloutWorker

    quiet_third_party()
    config = config_from_dict(
        {
            "model.path": args.model,
            "model.dtype": args.dtype,
            "data.train_files": [args.data],
            "data.max_train_rows": args.prompts,
            "data.train_batch_size": 1,
            "data.max_prompt_length": 512,
            "data.max_response_length": args.new_tokens,
            "rollout.n": args.samples,
            "rollout.max_num_seqs": args.prompts * args.samples,
        }
    )
    prompts = load_prompt_dataset(config.data.train_files, config.data, config.model, load_tokenizer(config.model), "train")
    context = WorkerContext(rank=0, world_size=1, device=str(resolve_device("auto")))
    actor = ActorWorker(context, config=config, total_updates=1)
    context.peers["actor"] = actor
    rollout = RolloutWorker(context, config=config)
    tasks = rollout_tasks(prompts.batch(range(len(prompts))), seed=0, step=0)
    for label in ("first", "second"):
        begun = time.perf_counter()
        groups = rollout.generate(tasks, training_sampling(config))
        seconds = time.perf_counter() - begun
        tokens = sum(t.response_length for group in groups for t in group)
        print(f"{label} generation: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")
    batch = TokenBatch.from_trajectories([t for group in groups for t in group])
    for label in ("first", "second"):
        begun = time.perf_counter()
        logprobs = actor.compute_log_probs(batch)
        seconds = time.perf_counter() - begun
        print(f"{label} log-prob pass: {batch.num_tokens} tokens in {seconds:.2f} s, {batch.num_tokens / seconds:,.0f} tokens/s")
    difference = (logprobs - batch.generator_logprobs)[batch.loss_mask].double()
    k3 = (difference.exp() - 1 - difference).mean()
    print(
        f"{actor.engine.compute_dtype}, {difference.numel()} tokens: mean |delta| {difference.abs().mean():.2e}, "
        f"max |delta| {difference.abs().max():.2e}, mean delta {difference.mean():.2e}, k3 {k3:.2e}, "
        f"mean log-prob {logprobs[batch.loss_mask].mean():.3f}"
    )
    if torch.cuda.is_available():
        print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
