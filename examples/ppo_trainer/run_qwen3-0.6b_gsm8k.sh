#!/usr/bin/env bash
# PPO with a critic on GSM8K. Prepare the data first, from the repository's root:
#   python examples/data_preprocess/gsm8k.py --output_path ./data/gsm8k_processed
# Arguments are overrides: bash run_qwen3-0.6b_gsm8k.sh training.total_steps=10 model.path=FOLDER
# Paths are relative to the repository's root.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-$(command -v python || command -v python3)}" -m verl.trainer.main_ppo --config config/gsm8k_ppo.yaml "$@"
