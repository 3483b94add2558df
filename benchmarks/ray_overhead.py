"""What `training.runtime=ray` costs a step: a dataflow that does nothing, against the same one in this process.

    OMP_NUM_THREADS=1 python benchmarks/ray_overhead.py [--sequences 512 --tokens 1024 --steps 30 --profile]

A step sends a batch of five columns (token ids, loss mask, log-probs of the generator and the trainer, advantages) to
all ranks and takes it back whole: split, carried there, carried back, gathered. Nothing is computed, so that what Ray takes
over `local` is overhead alone. Batches of a step are made anew, as in training: none can be sent once for all. Medians of
the milliseconds a step after a warm-up.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time

import torch

from verl.controller import LocalRuntime, ResourcePool, Runtime, Worker, WorkerSpec, data_parallel, register
from verl.controller.ray import RayRuntime
from verl.data.batch import TokenBatch

WARM_UP = 5


class Echo(Worker):
    @register(dispatch=data_parallel)
    def echo(self, batch: TokenBatch) -> TokenBatch:
        return batch


def make_batch(sequences: int, tokens: int) -> TokenBatch:
    total = sequences * tokens
    return TokenBatch(
        torch.arange(sequences + 1) * tokens,
        input_ids=torch.randint(0, 150_000, (total,)),
        loss_mask=torch.rand(total) < 0.7,
        generator_logprobs=torch.randn(total),
        old_logprobs=torch.randn(total),
        advantages=torch.randn(total),
    )


def step_times(runtime: Runtime, ranks: int, batches: list[TokenBatch], steps: int, profile: bool) -> list[float]:
    """Milliseconds of each step after the warm-up."""
    group = runtime.spawn(ResourcePool(num_workers=ranks), {"echo": WorkerSpec(Echo)})["echo"]
    times = []
    profiler = cProfile.Profile()
    for step in range(WARM_UP + steps):
        batch = batches[step % len(batches)].select(torch.randperm(len(batches[0])))
        if profile and step == WARM_UP:
            profiler.enable()
        started = time.perf_counter()
        returned = group.echo(batch)
        times.append(1000 * (time.perf_counter() - started))
        if step == 0:
            same = all(torch.equal(getattr(returned, name), getattr(batch, name)) for name in batch.column_names)
            assert same, "the batch came back changed"
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(25)
    runtime.shutdown()
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="where the driver's time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    batches = [make_batch(options.sequences, options.tokens) for _ in range(2)]
    size = sum(getattr(batches[0], name).nbytes for name in batches[0].column_names) / 1e6
    print(f"{options.sequences} sequences x {options.tokens} tokens, {size:.1f} MB a way; median (worst) ms a step")
    for ranks in (1, 2):
        local = step_times(LocalRuntime(), ranks, batches, options.steps, False)
        ray = step_times(RayRuntime(num_cpus=2), ranks, batches, options.steps, options.profile)
        overhead = statistics.median(ray) - statistics.median(local)
        shown = ", ".join(f"{name} {statistics.median(x):.1f} ({max(x):.1f})" for name, x in (("local", local), ("ray", ray)))
        print(f"{ranks} rank{'s' if ranks > 1 else ''}: {shown}, overhead {overhead:.1f}")


if __name__ == "__main__":
    main()
