#!/usr/bin/env bash
# GRPO on math word problems, from any folder:
#   bash run_qwen2-7b_math.sh [--config FILE] [section.key=value ...]
# FILE is relative to where you are; data, model and output paths are relative to the repository's root.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
config="$root/config/math_train.yaml"
arguments=()
while (($#)); do
    case "$1" in
        --config=*) config="${1#--config=}" ;;
        --config)
            if (($# < 2)); then
                echo "error: --config needs the path of a YAML file" >&2
                exit 2
            fi
            config="$2"
            shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[[ "$config" == /* ]] || config="$PWD/$config"

python="${PYTHON:-$(command -v python || command -v python3)}"
cd "$root"
exec "$python" -m verl.trainer.main_ppo --config "$config" ${arguments[@]+"${arguments[@]}"}
