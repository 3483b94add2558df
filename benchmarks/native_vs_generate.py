"""Tokens per second of the native rollout engine and of `transformers` `generate`, on the same weights, in one run.

    python benchmarks/native_vs_generate.py --model quickstart --threads 1

Both make the same number of tokens (8 prompts x 8 samples, no end of sequence), in alternating rounds within one
process. The native engine also returns exact log-probs; `generate` is not asked for them. A shared machine makes wall
time noisy, so CPU seconds are reported too. `--model` is `quickstart` (hidden 128), `4m` (hidden 256) or a folder.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from verl.engines.rollout.base import GenerationRequest, SamplingParams
from verl.engines.rollout.native import NativeEngine

SHAPES = {
    # vocabulary, hidden, MLP, head size, layers
    "quickstart": (512, 64, 192, 16, 3),
    "4m": (1024, 256, 1024, 64, 4),
}


def load_model(name: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    if name in SHAPES:
        vocab_size, hidden_size, intermediate_size, head_dim, layers = SHAPES[name]
        config = Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            head_dim=head_dim,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return Qwen3ForCausalLM(config).eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """(wall, CPU) seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="native rollout engine against transformers generate")
    parser.add_argument("--model", default="quickstart", help="quickstart, 4m or a Hugging Face folder")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--layout", default="auto", choices=("auto", "rows", "paged"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    model = load_model(args.model)
    total = args.prompts * args.samples * args.new_tokens
    prompts = torch.randint(10, model.config.vocab_size, (args.prompts, args.prompt_len))
    sampling = SamplingParams(max_tokens=args.new_tokens, n=args.samples, ignore_eos=True)
    requests = [GenerationRequest(request_id=i, prompt_ids=p, sampling=sampling) for i, p in enumerate(prompts.tolist())]
    engine = NativeEngine(
        model,
        None,
        max_num_seqs=args.prompts * args.samples,
        max_model_len=args.prompt_len + args.new_tokens,
        layout=args.layout,
    )

    def native() -> None:
        made = sum(len(c.token_ids) for c in engine.generate(requests))
        assert made == total, made

    repeated = prompts.repeat_interleave(args.samples, 0)
    settings = {"do_sample": True, "top_k": 0, "min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}

    def generate() -> None:
        with torch.no_grad():
            out = model.generate(repeated, attention_mask=torch.ones_like(repeated), pad_token_id=0, **settings)
        assert out.shape[0] * (out.shape[1] - args.prompt_len) == total, out.shape

    runs: dict[str, Callable[[], None]] = {"native": native, "generate": generate}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(timed(run))

    print(f"{args.model}: {args.prompts} x {args.samples} x {args.new_tokens} tokens, {torch.get_num_threads()} threads")
    medians = {}
    for name, values in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        medians[name] = wall, cpu
        print(f"{name:10s} wall {wall:.3f} s  CPU {cpu:.3f} s  {total / wall:,.0f} tok/s  {total / cpu:,.0f} tok/CPU-s")
    (wall, cpu), (hf_wall, hf_cpu) = medians["native"], medians["generate"]
    print(f"native is {hf_wall / wall:.2f}x as fast in wall time, {hf_cpu / cpu:.2f}x in CPU time")


if __name__ == "__main__":
    main()
