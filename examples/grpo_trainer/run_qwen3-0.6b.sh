#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-0.6B under Ray, on all GPUs present. Prepare the data first, from the repository's root:
#   python examples/data_preprocess/gsm8k.py --output_path ./data/gsm8k_processed
# Arguments are overrides. On CPUs, with a small model and two processes:
#   bash run_qwen3-0.6b.sh model.path=FOLDER parallel.data_parallel_size=2 training.total_steps=3
# Paths are relative to the repository's root.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-$(command -v python || command -v python3)}" -m verl.trainer.main_ppo --config config/qwen3_0.6b_grpo.yaml "$@"
