"""What each memory switch saves and what it costs, and what slicing (FSDP2) costs on one GPU.

    python benchmarks/memory_switches.py [--layers 28] [--tokens 65536] [--output results.json]

A Qwen3-0.6B-shaped model with random weights is trained on packed rows: one update is one optimizer step over `--tokens`
tokens in micro-batches of `--micro_batch` tokens. Each setting runs in a process of its own. Printed: GPU memory between
calls (what generation or another model can use is the rest), the peak within an update, and the median time of an update
after warm-up, beside the first setting's. Needs one CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS: dict[str, dict] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "optimizer_offload": {"optimizer_offload": True},
    "param_offload": {"param_offload": True},
    "both offloads": {"param_offload": True, "optimizer_offload": True},
    "both and checkpointing": {"param_offload": True, "optimizer_offload": True, "gradient_checkpointing": True},
    "FSDP2 on one rank": {"sharding": "always"},
    "FSDP2, both offloads": {"sharding": "always", "param_offload": True, "optimizer_offload": True},
}


def build_model(folder: Path, layers: int, device: str = "cuda") -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )
    Qwen3ForCausalLM(config).to(device).bfloat16().save_pretrained(folder)


def measure(folder: str, setting: dict, tokens: int, micro_batch: int, updates: int) -> dict[str, float]:
    import torch

    from verl.algorithms.losses import SFTLoss
    from verl.config.schema import ModelConfig, OptimizerConfig
    from verl.data.batch import TokenBatch
    from verl.engines.train.fsdp import FSDPEngine

    if "sharding" in setting:
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"})
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    options = {key: value for key, value in setting.items() if key != "dtype"}
    engine = FSDPEngine(
        ModelConfig(path=folder, dtype=setting.get("dtype", "bfloat16")),
        optimizer=OptimizerConfig(lr=1e-6),
        max_tokens_per_micro_batch=micro_batch,
        device="cuda",
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    length = 1024
    batch = TokenBatch(
        torch.arange(0, tokens + 1, length),
        input_ids=torch.randint(0, 150000, (tokens,), generator=generator),
        loss_mask=torch.arange(tokens) % length >= length // 4,
    )
    loss = SFTLoss()
    seconds = []
    for step in range(2 + updates):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with engine.resident():
            engine.forward_backward(batch, loss)
            with engine.resident(optimizer=True):
                engine.optimizer_step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "rest_gib": torch.cuda.memory_allocated() / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "seconds": statistics.median(seconds[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--micro_batch", type=int, default=16384)
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", help="names of settings")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        folder, name = args.one
        print(json.dumps(measure(folder, SETTINGS[name], args.tokens, args.micro_batch, args.updates)))
        return
    import torch

    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), args.layers)
        torch.cuda.empty_cache()
        results = {}
        for name in args.only or SETTINGS:
            sizes = ("--tokens", args.tokens, "--micro_batch", args.micro_batch, "--updates", args.updates)
            command = [sys.executable, __file__, "--one", folder, name, *map(str, sizes)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: failed\n{done.stderr[-2000:]}")
                continue
            results[name] = json.loads(done.stdout.splitlines()[-1])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.layers} layers, {args.tokens} tokens an update")
    print(f"{'setting':<24} {'at rest GiB':>12} {'peak GiB':>10} {'s/update':>10} {'time':>7}")
    first = next(iter(results.values()))
    for name, r in results.items():
        ratio = r["seconds"] / first["seconds"]
        print(f"{name:<24} {r['rest_gib']:>12.2f} {r['peak_gib']:>10.2f} {r['seconds']:>10.3f} {ratio:>6.2f}x")
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
