"""Accuracy of base, SFT and RL in the quick start, over seeds.

    python benchmarks/quickstart_seeds.py --seeds 0 1 2

Runs `python -m verl.quickstart` once a seed and prints held-out accuracy (greedy, 300 problems) and run time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(seed: int, folder: Path) -> tuple[list[float], float]:
    """(accuracies of base, SFT and RL; seconds) of one run."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "verl.quickstart", "--output", str(folder), "--seed", str(seed)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"seed {seed} failed:\n{result.stderr[-3000:]}")
    summaries = json.loads((folder / "results.json").read_text())
    return [s["accuracy"] for s in summaries], time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(f"{'seed':>4}{'base %':>9}{'SFT %':>9}{'RL %':>9}{'RL - SFT':>11}{'seconds':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            (base, sft, rl), seconds = run(seed, Path(scratch, str(seed)))
            print(
                f"{seed:>4}{100 * base:>9.1f}{100 * sft:>9.1f}{100 * rl:>9.1f}{100 * (rl - sft):>+11.1f}{seconds:>10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
