"""Time of one training step (forward, backward, AdamW): this engine against a padded Hugging Face model.

    python benchmarks/train_step.py [--sequences 64 --prompt 24 --response 64 --repeats 7 --profile]
    python benchmarks/train_step.py --device cuda --large

The reference is what most trainers do: sequences padded to the longest, `model(input_ids, attention_mask)` with
SDPA, logits of the response positions, `log_softmax`, backward, `torch.optim.AdamW`. Both sides train the same
weights on the same tokens with a REINFORCE-like loss; response lengths are uniform in [response / 2, response]
unless --fixed-length. Runs alternate, medians are printed. With `--threads 1` they are CPU seconds of the
process, which other work on the machine disturbs least; else seconds by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.config.schema import ModelConfig, OptimizerConfig
from verl.data.batch import TokenBatch
from verl.engines.train.base import LossResult, ModelOutputs
from verl.engines.train.fsdp import FSDPEngine
from verl.engines.train.loading import quiet_transformers

SMALL = {
    "hidden 64, 2 layers": dict(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1000,
    ),
    "hidden 256, 4 layers": dict(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=1000,
    ),
}
LARGE = {
    "Qwen3-0.6B shape": dict(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
}


@dataclass(frozen=True)
class PolicyGradient:
    """Sum of -logprob * weight over trained tokens, the weight alternating in sign."""

    needs_entropy: bool = False

    def count(self, batch: TokenBatch) -> float:
        return float(batch.loss_mask.sum())

    def __call__(self, batch: TokenBatch, outputs: ModelOutputs) -> LossResult:
        return LossResult(total=-(outputs.logprobs * batch.advantages * batch.loss_mask).sum(), metrics={})


def make_batch(args: argparse.Namespace, vocab: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    low = args.response if args.fixed_length else args.response // 2
    lengths = args.prompt + torch.randint(low, args.response + 1, (args.sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    batch = TokenBatch(cu, input_ids=torch.randint(0, vocab, (int(cu[-1]),), generator=generator))
    sign = 1.0 - 2.0 * (batch.sequence_index() % 2)
    return batch.with_columns(loss_mask=batch.positions() >= args.prompt, advantages=sign)


def padded_step(folder: str, batch: TokenBatch, args: argparse.Namespace) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def pad(values: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values.split(batch.lengths.tolist()), batch_first=True).to(args.device)

    ids, loss_mask, advantages = pad(batch.input_ids), pad(batch.loss_mask), pad(batch.advantages)
    attention_mask = pad(torch.ones_like(batch.input_ids))
    rows = max(1, args.micro_tokens // ids.shape[1])

    def step() -> None:
        for start in range(0, len(ids), rows):
            part = slice(start, start + rows)
            keep = ids.shape[1] - args.prompt + 1
            logits = model(ids[part], attention_mask=attention_mask[part], logits_to_keep=keep).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, ids[part, args.prompt :, None])[..., 0]
            weight = (advantages[part] * loss_mask[part])[:, args.prompt :]
            (-(logprobs * weight).sum() / loss_mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def packed_step(folder: str, batch: TokenBatch, args: argparse.Namespace) -> Callable[[], None]:
    engine = FSDPEngine(
        ModelConfig(path=folder),
        optimizer=OptimizerConfig(lr=1e-5),
        device=args.device,
        max_tokens_per_micro_batch=args.micro_tokens,
    )

    def step() -> None:
        engine.forward_backward(batch, PolicyGradient())
        engine.optimizer_step()

    return step


def timed(step: Callable[[], None], args: argparse.Namespace) -> float:
    clock = time.process_time if args.threads == 1 and args.device == "cpu" else time.perf_counter
    start = clock()
    step()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--fixed-length", action="store_true")
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--large", action="store_true", help="a 0.6B model instead of the two tiny ones")
    parser.add_argument("--profile", action="store_true", help="print the operators that take longest instead")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    from transformers import AutoModelForCausalLM, Qwen3Config

    for title, shape in (LARGE if args.large else SMALL).items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder, quiet_transformers():
            config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            batch = make_batch(args, shape["vocab_size"])
            steps = {"packed": packed_step(folder, batch, args), "padded": padded_step(folder, batch, args)}
        if args.profile:
            steps["packed"]()
            with torch.profiler.profile() as profile:
                steps["packed"]()
            print(title, profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=45))
            continue
        times: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(args.repeats + 1):
            for name, step in steps.items():
                seconds = timed(step, args)
                if repeat:  # the first run of each warms up
                    times[name].append(seconds)
        packed, padded = (statistics.median(times[name]) for name in ("packed", "padded"))
        print(
            f"{title}: {batch.num_sequences} sequences, {batch.num_tokens} tokens | packed {packed * 1e3:.1f} ms, "
            f"padded Hugging Face {padded * 1e3:.1f} ms, ratio {padded / packed:.2f} | {batch.num_tokens / packed:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
