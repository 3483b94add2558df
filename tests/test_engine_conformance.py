"""What every rollout engine must do alike. An engine whose library is absent is skipped, and the reason is shown."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from verl.data.types import Completion
from verl.engines.hybrid import check_arrival, fingerprint
from verl.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams, TokenEvent
from verl.errors import UserError

VOCAB = 61
ENDS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": ENDS,
    "pad_token_id": 0,
}
CONFIGS = {"tied": Qwen3Config(**SHAPE, tie_word_embeddings=True), "untied": LlamaConfig(**SHAPE, tie_word_embeddings=False)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32


def model_of(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager").to(DTYPE).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def letters() -> PreTrainedTokenizerFast:
    """Token i is the i-th character from '0' on, and text is characters without spaces."""
    tokenizer = Tokenizer(models.WordLevel({chr(ord("0") + i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(ord("0") + ENDS))


def native(folder: Path, tokenizer: Any, module: nn.Module) -> RolloutEngine:
    from verl.engines.rollout.native import NativeEngine

    return NativeEngine(module.to(DEVICE), tokenizer, max_num_seqs=8, max_model_len=256)


def vllm(folder: Path, tokenizer: Any, module: nn.Module) -> RolloutEngine:
    from verl.engines.rollout.vllm import VLLMEngine

    return VLLMEngine(
        str(folder),
        tokenizer,
        device=torch.device(DEVICE),
        dtype=DTYPE,
        max_num_seqs=8,
        max_model_len=256,
        memory_share=0.1,
        enforce_eager=True,
    )


MAKERS: dict[str, Callable[[Path, Any, nn.Module], RolloutEngine]] = {"native": native, "vllm": vllm}


class Rig:
    """An engine and the Hugging Face model whose weights it should have."""

    def __init__(self, maker: Callable[[Path, Any, nn.Module], RolloutEngine], kind: str, folder: Path) -> None:
        self.kind, self.folder, self.tokenizer, self._maker = kind, folder, letters(), maker
        model_of(kind).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = model_of(kind)
        self.engine = maker(folder, self.tokenizer, model_of(kind))

    def weights(self, seed: int) -> list[tuple[str, Tensor]]:
        return [(name, p.detach().to(DEVICE)) for name, p in model_of(self.kind, seed).named_parameters()]

    def update(self, seed: int, version: int) -> None:
        self.model = model_of(self.kind, seed)
        self.engine.load_weights(self.weights(seed), version)

    def reference(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
        """[tokens, vocabulary] logits of Hugging Face's forward pass."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        return logits / (temperature or 1.0)

    def error(self, prompt: Sequence[int], completion: Completion, temperature: float = 1.0) -> float:
        logprobs = self.reference(prompt, completion.token_ids, temperature).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return (expected - torch.tensor(completion.logprobs)).abs().max().item()

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """By Hugging Face, one prompt at a time."""
        answers = []
        for prompt in prompts:
            with torch.no_grad():
                out = self.model.generate(
                    torch.tensor([prompt]), do_sample=False, max_new_tokens=steps, eos_token_id=None, pad_token_id=0
                )
            answers.append(out[0, len(prompt) :].tolist())
        return answers


@pytest.fixture(scope="module", params=list(CONFIGS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=list(MAKERS))
def rig(request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    if request.param != "native" and importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return Rig(MAKERS[request.param], kind, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def first_weights(rig: Rig) -> Iterator[None]:
    rig.update(0, 0)
    yield
    assert rig.engine.generate([]) == []


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def requests_of(asked: Sequence[Sequence[int]], **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **sampling})
    return [GenerationRequest(request_id=i, prompt_ids=p, sampling=params) for i, p in enumerate(asked)]


def by_sample(completions: Sequence[Completion]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(c.request_id, c.sample_index): tuple(c.token_ids) for c in completions}


def test_greedy_equals_hugging_face(rig: Rig) -> None:
    asked = prompts(5, 17, 9)
    completions = rig.engine.generate(requests_of(asked, temperature=0, max_tokens=24))
    assert [list(c.token_ids) for c in completions] == rig.greedy(asked, 24)
    assert max(rig.error(asked[c.request_id], c) for c in completions) < 1e-3


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprobs_are_those_of_the_distribution_sampled_from(rig: Rig, temperature: float) -> None:
    asked = prompts(3, 12)
    completions = rig.engine.generate(requests_of(asked, temperature=temperature, n=3, seed=7))
    assert [(c.request_id, c.sample_index) for c in completions] == [(r, s) for r in range(2) for s in range(3)]
    assert max(rig.error(asked[c.request_id], c, temperature) for c in completions) < 1e-3


def test_logprobs_of_truncated_distributions_are_renormalised(rig: Rig) -> None:
    [prompt] = prompts(6)
    [c] = rig.engine.generate(requests_of([prompt], top_k=4, seed=1))
    top = rig.reference(prompt, c.token_ids).topk(4)
    for place, token_id in enumerate(c.token_ids):
        index = top.indices[place].tolist().index(token_id)
        assert c.logprobs[place] == pytest.approx(float(top.values[place].log_softmax(-1)[index]), abs=1e-3)


def test_samples_follow_the_distribution(rig: Rig) -> None:
    """Two thousand samples of one token: chi-squared against the model's probabilities."""
    [prompt] = prompts(6)
    completions = rig.engine.generate(requests_of([prompt], max_tokens=1, n=2000, seed=3))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB).double()
    expected = rig.reference(prompt, [0]).softmax(-1)[0].double() * 2000
    common = expected >= 5
    differences = torch.cat([(counts - expected)[common], (counts - expected)[~common].sum()[None]])
    sizes = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic, freedom = float((differences**2 / sizes).sum()), len(sizes) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_seeds_and_company(rig: Rig) -> None:
    """A sample depends on its request's seed and its number alone."""
    asked = requests_of(prompts(4, 9, 14), n=3, seed=11)
    together = by_sample(rig.engine.generate(asked))
    alone: dict[tuple[int, int], tuple[int, ...]] = {}
    for request in reversed(asked):
        alone |= by_sample(rig.engine.generate([request]))
    assert alone == together and len(set(together.values())) == 9
    other = by_sample(rig.engine.generate(requests_of(prompts(4, 9, 14), n=3, seed=12)))
    assert set(other.values()).isdisjoint(together.values())
    unseeded = [by_sample(rig.engine.generate(requests_of(prompts(4), n=2))) for _ in range(2)]
    assert set(unseeded[0].values()).isdisjoint(unseeded[1].values())


def test_ends_of_an_answer(rig: Rig) -> None:
    asked = prompts(5, 8)
    free = rig.engine.generate(requests_of(asked, n=8, seed=0, max_tokens=25))
    assert all(len(c.token_ids) == 25 and c.finish_reason == "length" for c in free)
    assert any(ENDS in c.token_ids for c in free)
    ended = rig.engine.generate(requests_of(asked, n=8, seed=0, max_tokens=25, ignore_eos=False))
    for whole, c in zip(free, ended, strict=True):
        length = list(whole.token_ids).index(ENDS) + 1 if ENDS in whole.token_ids else 25
        assert list(c.token_ids) == list(whole.token_ids[:length])
        assert c.finish_reason == ("stop" if ENDS in whole.token_ids else "length")
    stop_id = free[0].token_ids[4]
    [first, *_] = rig.engine.generate(requests_of(asked, n=8, seed=0, max_tokens=25, stop_token_ids=(stop_id,)))
    assert list(first.token_ids) == list(free[0].token_ids[: free[0].token_ids.index(stop_id) + 1])
    many = tuple(range(3, 40))
    late = rig.engine.generate(requests_of(asked, n=8, seed=0, max_tokens=25, stop_token_ids=many, min_tokens=6))
    assert all(not set(many) & set(c.token_ids[:6]) for c in late) and min(len(c.token_ids) for c in late) == 7


def test_stop_strings_end_the_answer_where_they_are_complete(rig: Rig) -> None:
    asked = prompts(5, 8)
    free = rig.engine.generate(requests_of(asked, n=4, seed=0, max_tokens=25))
    texts = [rig.tokenizer.decode(c.token_ids) for c in free]
    stop = texts[2][6:9]
    stopped = rig.engine.generate(requests_of(asked, n=4, seed=0, max_tokens=25, stop=("~~", stop)))
    for c, text in zip(stopped, texts, strict=True):
        end = text.find(stop) + len(stop) if stop in text else 25
        assert rig.tokenizer.decode(c.token_ids) == text[:end]
        assert c.finish_reason == ("stop" if stop in text else "length")


def test_streaming_gives_every_token_once_and_then_the_completion(rig: Rig) -> None:
    tokens: dict[tuple[int, int], list[TokenEvent]] = {}
    finished = 0
    for item in rig.engine.stream(requests_of(prompts(4, 9), n=3, max_tokens=15, ignore_eos=False), tokens=True):
        if isinstance(item, TokenEvent):
            tokens.setdefault((item.request_id, item.sample_index), []).append(item)
            continue
        events = tokens.pop((item.request_id, item.sample_index))
        assert [e.token_id for e in events] == list(item.token_ids)
        assert [e.logprob for e in events] == list(item.logprobs)
        finished += 1
    assert finished == 6 and not tokens


def test_cancelled_requests_come_back_with_what_they_have(rig: Rig) -> None:
    asked = requests_of(prompts(4, 9), n=4, seed=1, max_tokens=40)
    full = by_sample(rig.engine.generate(asked))
    done: list[Completion] = []
    seen = 0
    for item in rig.engine.stream(asked, tokens=True):
        if isinstance(item, Completion):
            done.append(item)
            continue
        seen += 1
        if seen == 40:
            rig.engine.cancel(1)
            rig.engine.cancel(99)  # which does not exist
    reasons = {(c.request_id, c.sample_index): c.finish_reason for c in done}
    assert reasons == {(r, s): "length" if r == 0 else "cancelled" for r in range(2) for s in range(4)}
    for c in done:
        assert tuple(c.token_ids) == full[c.request_id, c.sample_index][: len(c.token_ids)]
        assert len(c.token_ids) < 40 or c.request_id == 0


def test_cancel_from_another_thread(rig: Rig) -> None:
    done: list[Completion] = []
    started = threading.Event()

    def consume() -> None:
        for item in rig.engine.stream(requests_of(prompts(4), n=2, max_tokens=250), tokens=True):
            started.set()
            if isinstance(item, Completion):
                done.append(item)

    thread = threading.Thread(target=consume)
    thread.start()
    assert started.wait(60)
    rig.engine.cancel(0)
    thread.join(60)
    assert [c.finish_reason for c in done] == ["cancelled"] * 2 and 0 < len(done[0].token_ids) < 250


def test_closing_a_stream_frees_the_engine(rig: Rig) -> None:
    asked = requests_of(prompts(4), n=4, seed=2)
    expected = by_sample(rig.engine.generate(asked))
    stream = rig.engine.stream(asked, tokens=True)
    next(stream)
    with pytest.raises(RuntimeError, match="one stream at a time"):
        rig.engine.generate(asked)
    with pytest.raises(RuntimeError, match="cannot sleep"):
        rig.engine.sleep()
    stream.close()
    assert by_sample(rig.engine.generate(asked)) == expected


def test_the_weights_in_use_are_those_of_the_model(rig: Rig) -> None:
    for seed in (0, 5):
        rig.update(seed, seed)
        wanted = {name: int(fingerprint(tensor)) for name, tensor in rig.weights(seed)}
        assert {name: int(fingerprint(tensor)) for name, tensor in rig.engine.named_weights()} == wanted
        check_arrival(wanted, rig.engine, seed)
        assert rig.engine.policy_version == seed
    name = next(iter(wanted))
    with pytest.raises(RuntimeError, match=f"1 weights arrived changed, {name} first"):
        check_arrival(wanted | {name: wanted[name] + 1}, rig.engine, 5)


def test_after_an_update_it_is_as_a_fresh_engine(rig: Rig) -> None:
    """Twenty prompts, greedily, each long enough to have filled blocks of the prefix cache before."""
    asked = prompts(*range(130, 170, 2))
    before = rig.engine.generate(requests_of(asked, temperature=0))
    rig.update(1, 1)
    after = rig.engine.generate(requests_of(asked, temperature=0))
    assert [list(c.token_ids) for c in after] == rig.greedy(asked, 16)
    assert by_sample(after) != by_sample(before)
    assert max(rig.error(asked[c.request_id], c) for c in after) < 1e-3
    assert {version for c in after for version in c.policy_versions} == {1}


def test_some_weights_alone_can_be_updated(rig: Rig) -> None:
    """The output head and its like have copies of their own in some engines."""
    asked = prompts(7)
    for part in ("embed", "q_proj", "up_proj", "norm", "lm_head"):
        chosen = [(name, tensor) for name, tensor in rig.weights(9) if part in name]
        with torch.no_grad():
            for name, tensor in chosen:
                rig.model.get_parameter(name).copy_(tensor)
        rig.engine.load_weights(chosen, 1)
        [c] = rig.engine.generate(requests_of(asked, temperature=0))
        assert rig.error(asked[0], c) < 1e-3, part


def test_weights_that_come_during_a_stream(rig: Rig) -> None:
    """Every token carries the version that made it, and its log-prob is that version's over the whole prefix."""
    asked = prompts(6, 9)
    old = rig.model
    steps = 0
    completions = []
    for item in rig.engine.stream(requests_of(asked, n=2, max_tokens=20, seed=4), tokens=True):
        if isinstance(item, Completion):
            completions.append(item)
            continue
        steps += 1
        if steps == 20:
            rig.update(1, 1)
    new = rig.model
    assert {v for c in completions for v in c.policy_versions} == {0, 1}
    for c in completions:
        assert list(c.policy_versions) == sorted(c.policy_versions)
        for version, model in ((0, old), (1, new)):
            rig.model = model
            logprobs = rig.reference(asked[c.request_id], c.token_ids).log_softmax(-1)
            for place, (token_id, made_by) in enumerate(zip(c.token_ids, c.policy_versions, strict=True)):
                if made_by == version:
                    assert c.logprobs[place] == pytest.approx(float(logprobs[place, token_id]), abs=1e-3)


def test_weights_of_another_model_are_refused(rig: Rig) -> None:
    with pytest.raises(KeyError, match=r"no parameter 'model\.unknown'"):
        rig.engine.load_weights([("model.unknown", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\), expected \(64,\)"):
        rig.engine.load_weights([("model.norm.weight", torch.zeros(3))], 1)


def test_sleep_and_wake(rig: Rig) -> None:
    asked = requests_of(prompts(6, 9), n=2, seed=5)
    expected = by_sample(rig.engine.generate(asked))
    for _ in range(2):
        rig.engine.sleep()
        rig.engine.sleep()
        rig.engine.wake()
        rig.engine.wake()
        rig.update(0, 0)
        assert by_sample(rig.engine.generate(asked)) == expected


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty prompt"),
        ([1, VOCAB], {}, f"token id {VOCAB}, outside the model's vocabulary"),
        ([1] * 250, {}, "exceeds max_model_len=256"),
        ([1], {"temperature": -1.0}, "temperature=-1.0 cannot work"),
        ([1], {"top_p": 0.0}, "top_p=0.0 cannot work"),
        ([1], {"n": 0}, "n=0 cannot work"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_run(rig: Rig, prompt: list[int], sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rig.engine.stream(requests_of([prompt], **sampling))
