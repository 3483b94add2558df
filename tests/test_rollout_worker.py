"""The worker that generates: what it holds between calls."""

import pytest

from tests.models import tiny_model, tiny_tokenizer
from verl.config import load_config
from verl.controller import WorkerContext
from verl.data.types import EncodedPrompt, Prompt
from verl.engines.rollout.base import GenerationRequest, SamplingParams
from verl.environments.single_turn import RolloutTask
from verl.workers.rollout import RolloutWorker


@pytest.fixture
def worker(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    base = ["data.train_files=t.parquet", "training.eval_interval=0", "data.max_prompt_length=8", "data.max_response_length=8"]
    config = load_config(None, [f"model.path={tmp_path}", *base], printer=[].append)
    return RolloutWorker(WorkerContext(rank=0, world_size=1, device="cpu", peers={}), config=config)


def test_the_cache_lives_only_while_it_generates(worker):
    sampling = SamplingParams(max_tokens=4, n=2, ignore_eos=True)
    task = RolloutTask(prompt=EncodedPrompt(prompt=Prompt(uid="a:0", messages=()), token_ids=(5, 6, 7)), group_id=0, seed=3)
    first = worker.generate([task], sampling)
    with pytest.raises(RuntimeError, match="the native engine sleeps"):
        worker.engine.generate([GenerationRequest(request_id=0, prompt_ids=[5], sampling=sampling)])
    assert worker.generate([task], sampling) == first
    assert len(first[0]) == 2
