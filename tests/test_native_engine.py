"""The native engine as its callers see it: `RolloutEngine`, requests in, completions out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from native_models import logprob_error, make_engine, prompts, requests_of, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.data.types import Completion
from verl.engines.rollout.base import GenerationRequest, SamplingParams, TokenEvent
from verl.engines.rollout.native.stops import StopStrings
from verl.errors import UserError

LAYOUTS = ["rows", "paged"]


def letters() -> PreTrainedTokenizerFast:
    """Token i is the i-th character from '0' on (61 of them), and text is characters without spaces."""
    tokenizer = Tokenizer(models.WordLevel({chr(ord("0") + i): i for i in range(61)}, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that characters beyond ASCII take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def by_sample(completions: Sequence[Completion]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(c.request_id, c.sample_index): tuple(c.token_ids) for c in completions}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_generate(layout: str) -> None:
    model = tiny_model()
    asked = prompts(7, 7, 7)
    engine = make_engine(model, layout=layout)
    greedy = SamplingParams(max_tokens=20, temperature=0, top_k=3, ignore_eos=True)
    completions = engine.generate(requests_of(asked, greedy))
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(torch.tensor(asked), do_sample=False, max_new_tokens=20)
    assert [list(c.token_ids) for c in completions] == out[:, 7:].tolist()
    assert max(logprob_error(model, asked[c.request_id], c) for c in completions) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_do_not_depend_on_the_batch(layout: str) -> None:
    model = tiny_model()
    asked = prompts(3, 9, 14, 6, 9)
    mixed = [
        GenerationRequest(request_id=i, prompt_ids=p, sampling=SamplingParams(max_tokens=18, n=3, seed=40 + i, **extra))
        for i, (p, extra) in enumerate(
            zip(
                asked,
                [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 5}, {"min_tokens": 4}],
                strict=True,
            )
        )
    ]
    expected = by_sample(make_engine(model, layout=layout, max_num_seqs=15).generate(mixed))
    assert len(set(map(len, expected.values()))) > 1
    assert by_sample(make_engine(model, layout=layout, max_num_seqs=2).generate(mixed[::-1])) == expected
    engine = make_engine(model, layout=layout, max_num_seqs=4)
    alone: dict[tuple[int, int], tuple[int, ...]] = {}
    for request in mixed:
        alone |= by_sample(engine.generate([request]))
    assert alone == expected


def test_preemption_changes_no_sample() -> None:
    model = tiny_model()
    asked = requests_of(prompts(9, 13, 5), SamplingParams(max_tokens=30, n=3, seed=3, ignore_eos=True))
    roomy = make_engine(model, layout="paged", max_num_seqs=9)
    tight = make_engine(model, layout="paged", max_num_seqs=9, cache_tokens=64)
    expected = roomy.generate(asked)
    completions = tight.generate(asked)
    assert roomy.stats.preemptions == 0 < tight.stats.preemptions
    assert by_sample(completions) == by_sample(expected)
    for c in completions:
        assert logprob_error(model, asked[c.request_id].prompt_ids, c) < 1e-4
    assert tight.blocks_in_use == 0


def test_reading_tokens_every_few_steps_changes_nothing() -> None:
    """What a GPU does to avoid waiting for it after each token: tokens past an end are made and thrown away."""
    model, tokenizer = tiny_model(), letters()
    params = SamplingParams(max_tokens=29, n=3, seed=3, temperature=1.5, min_tokens=3, stop=("Gx",))
    asked = requests_of(prompts(9, 13, 5, 1), params)
    expected = make_engine(model, tokenizer, max_num_seqs=12).generate(asked)
    assert {c.finish_reason for c in expected} == {"stop", "length"}
    for options in ({"layout": "rows", "max_num_seqs": 5}, {"layout": "paged", "cache_tokens": 64}):
        engine = make_engine(model, tokenizer, **options)
        engine._steps_per_read = 8
        completions = engine.generate(asked)
        assert by_sample(completions) == by_sample(expected)
        assert [c.finish_reason for c in completions] == [c.finish_reason for c in expected]
        assert engine.blocks_in_use == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral-window"])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to("cuda", dtype)
    asked = prompts(1, 9, 9, 30)
    engine = make_engine(model, max_num_seqs=5)
    completions = engine.generate(requests_of(asked, SamplingParams(max_tokens=20, n=4, seed=0)))
    assert len(completions) == 16 and engine.blocks_in_use == 0
    # The reference in fp32 on the CPU; rounding bf16 logits of size 10 is worth about 0.05.
    reference = tiny_model(name)
    reference.load_state_dict({key: value.float().cpu() for key, value in model.state_dict().items()})
    errors = torch.tensor([logprob_error(reference, asked[c.request_id], c) for c in completions])
    assert errors.mean() < (1e-3 if dtype == torch.float32 else 0.5)


def test_seeds() -> None:
    model = tiny_model()
    asked = prompts(6, 6)
    asked[1] = asked[0]

    def run(engine_seed: int, seed: int | None) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=12, n=2, seed=seed, ignore_eos=True)
        return list(by_sample(make_engine(model, seed=engine_seed).generate(requests_of(asked, params))).values())

    with_seed = run(0, 5)
    # Equal prompts with equal seeds are equal; samples of one request are not, nor are other seeds.
    assert with_seed[:2] == with_seed[2:] and with_seed[0] != with_seed[1]
    assert run(1, 5) == with_seed and run(0, 6) != with_seed
    without = run(0, None)
    assert len(set(without)) == 4
    assert run(0, None) == without and run(1, None) != without
    engine = make_engine(model)
    params = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
    first, second = (by_sample(engine.generate(requests_of(asked, params))) for _ in range(2))
    assert list(first.values()) == without and set(second.values()).isdisjoint(without)
    engine.requests_served = 0
    assert by_sample(engine.generate(requests_of(asked, params))) == first


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_num_seqs", [16, 3])
def test_shared_prompts_are_computed_once(layout: str, max_num_seqs: int) -> None:
    model = tiny_model()
    long, short = prompts(21, 10)
    engine = make_engine(model, layout=layout, max_num_seqs=max_num_seqs)
    # The first and the last request have the same prompt.
    completions = engine.generate(requests_of([long, short, long], SamplingParams(max_tokens=9, n=5, ignore_eos=True)))
    assert [(c.request_id, c.sample_index) for c in completions] == [(r, s) for r in range(3) for s in range(5)]
    # All but a prompt's last token, which each sample decodes.
    assert engine.stats.prefilled_tokens == 20 + 9
    assert engine.stats.generated_tokens == 15 * 9
    assert engine.blocks_in_use == 0


def test_full_blocks_of_a_group_are_stored_once() -> None:
    (prompt,) = prompts(19)
    engine = make_engine(tiny_model(), layout="paged")
    stream = engine.stream(requests_of([prompt], SamplingParams(max_tokens=2, n=6, ignore_eos=True)), tokens=True)
    next(stream)
    # 18 cached prompt tokens are 4 full blocks of 4, shared, and one partly filled block for each sample.
    assert engine.blocks_in_use == 4 + 6
    list(stream)
    assert engine.blocks_in_use == 0


def test_end_of_sequence_stop_ids_and_min_tokens() -> None:
    model = tiny_model()
    asked = prompts(5, 8)
    engine = make_engine(model, eos_token_ids=[2, 7])

    def run(**extra: Any) -> list[Completion]:
        return engine.generate(requests_of(asked, SamplingParams(max_tokens=25, n=8, seed=0, **extra)))

    for c in run():
        ends = [i for i, t in enumerate(c.token_ids) if t in (2, 7)]
        assert ends == ([len(c.token_ids) - 1] if c.finish_reason == "stop" else [])
        assert c.finish_reason == "stop" or len(c.token_ids) == 25
    free = run(ignore_eos=True)
    assert all(len(c.token_ids) == 25 and c.finish_reason == "length" for c in free)
    assert any(t in (2, 7) for c in free for t in c.token_ids)
    some_id = free[0].token_ids[3]
    stopped = run(ignore_eos=True, stop_token_ids=(some_id,))
    assert stopped[0].finish_reason == "stop" and list(stopped[0].token_ids) == list(
        free[0].token_ids[: len(stopped[0].token_ids)]
    )
    assert stopped[0].token_ids[-1] == some_id
    many = tuple(range(3, 40))
    assert min(len(c.token_ids) for c in run(stop_token_ids=many)) < 6
    late = run(stop_token_ids=many, min_tokens=6)
    assert all(not {2, 7, *many} & set(c.token_ids[:6]) for c in late)
    assert min(len(c.token_ids) for c in late) == 7


def test_min_tokens_logprobs_are_those_of_the_restricted_distribution() -> None:
    model = tiny_model()
    (prompt,) = prompts(5)
    (c,) = make_engine(model).generate(requests_of([prompt], SamplingParams(max_tokens=6, min_tokens=6)))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *c.token_ids]])).logits[0, 4:-1]
    logits[:, 2] = -torch.inf
    expected = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(c.logprobs), expected, atol=1e-4)


def test_stop_strings_end_the_answer_where_they_are_complete() -> None:
    model, tokenizer = tiny_model(), letters()
    asked = prompts(5, 8)
    engine = make_engine(model, tokenizer)
    params: dict[str, Any] = {"max_tokens": 25, "n": 4, "seed": 0, "ignore_eos": True}
    free = engine.generate(requests_of(asked, SamplingParams(**params)))
    texts = [tokenizer.decode(c.token_ids) for c in free]
    stop = texts[2][6:9]
    for c, text in zip(engine.generate(requests_of(asked, SamplingParams(**params, stop=("~~", stop)))), texts, strict=True):
        end = text.find(stop) + len(stop) if stop in text else 25
        assert tokenizer.decode(c.token_ids) == text[:end]
        assert c.finish_reason == ("stop" if stop in text else "length")


@pytest.mark.parametrize("stop", ["</answer>", " é\n", "日本"])
def test_stop_strings_of_many_bytes(stop: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ä日 text, then" + stop + " more")
    stops = StopStrings(tokenizer, ("unseen, and much longer than the other", stop))
    first = next(n for n in range(1, len(ids) + 1) if stops.hit(ids[:n]))
    assert tokenizer.decode(ids[:first]) == "ä日 text, then" + stop


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streaming_gives_every_token_once_and_then_the_completion(layout: str) -> None:
    engine = make_engine(tiny_model(), layout=layout, max_num_seqs=3)
    tokens: dict[tuple[int, int], list[TokenEvent]] = {}
    finished = 0
    for item in engine.stream(requests_of(prompts(4, 9), SamplingParams(max_tokens=15, n=3)), tokens=True):
        if isinstance(item, TokenEvent):
            tokens.setdefault((item.request_id, item.sample_index), []).append(item)
            continue
        events = tokens.pop((item.request_id, item.sample_index))
        assert [e.token_id for e in events] == list(item.token_ids)
        assert [e.logprob for e in events] == list(item.logprobs)
        finished += 1
    assert finished == 6 and not tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cancel_within_the_loop(layout: str) -> None:
    model = tiny_model()
    asked = prompts(4, 9)
    engine = make_engine(model, layout=layout, max_num_seqs=5)
    params = SamplingParams(max_tokens=20, n=4, seed=1, ignore_eos=True)
    full = by_sample(engine.generate(requests_of(asked, params)))
    done: list[Completion] = []
    seen = 0
    for item in engine.stream(requests_of(asked, params), tokens=True):
        if isinstance(item, Completion):
            done.append(item)
            continue
        seen += 1
        # Request 1 has one sample running and three waiting; request 99 does not exist.
        if seen == 23:
            engine.cancel(1)
            engine.cancel(99)
    reasons = {(c.request_id, c.sample_index): c.finish_reason for c in done}
    assert reasons == {(r, s): "length" if r == 0 else "cancelled" for r in range(2) for s in range(4)}
    lengths = sorted(len(c.token_ids) for c in done if c.request_id == 1)
    assert lengths == [0, 0, 0, 5]
    for c in done:
        expected = full[c.request_id, c.sample_index]
        assert tuple(c.token_ids) == expected[: len(c.token_ids)]
    assert engine.blocks_in_use == 0


def test_cancel_from_another_thread() -> None:
    engine = make_engine(tiny_model(), max_model_len=4000)
    done: list[Completion] = []
    started = threading.Event()

    def consume() -> None:
        params = SamplingParams(max_tokens=3900, n=2, ignore_eos=True)
        for item in engine.stream(requests_of(prompts(4), params), tokens=True):
            started.set()
            if isinstance(item, Completion):
                done.append(item)

    thread = threading.Thread(target=consume)
    thread.start()
    assert started.wait(30)
    engine.cancel(0)
    thread.join(30)
    assert [c.finish_reason for c in done] == ["cancelled"] * 2 and 0 < len(done[0].token_ids) < 3900


def test_closing_a_stream_frees_everything() -> None:
    engine = make_engine(tiny_model())
    asked = requests_of(prompts(4), SamplingParams(max_tokens=9, n=4, seed=2, ignore_eos=True))
    stream = engine.stream(asked, tokens=True)
    next(stream)
    with pytest.raises(RuntimeError, match="one stream at a time"):
        engine.generate(asked)
    with pytest.raises(RuntimeError, match="cannot sleep"):
        engine.sleep()
    stream.close()
    assert engine.blocks_in_use == 0
    assert len(engine.generate(asked)) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_loaded_during_a_stream(layout: str) -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    policy = tiny_model(seed=0)
    engine = make_engine(policy, layout=layout, max_num_seqs=3)
    assert engine.policy_version == 0
    asked = prompts(6, 9)
    steps = 0
    completions = []
    for item in engine.stream(requests_of(asked, SamplingParams(max_tokens=10, n=2, ignore_eos=True)), tokens=True):
        if isinstance(item, Completion):
            completions.append(item)
            continue
        steps += 1
        if steps == 12:
            engine.load_weights(new.state_dict().items(), version=5)
    assert {v for c in completions for v in c.policy_versions} == {0, 5}
    mixed = [c for c in completions if len(set(c.policy_versions)) == 2]
    assert len(mixed) == 3
    for c in completions:
        switch = list(c.policy_versions).count(0)
        assert list(c.policy_versions) == [0] * switch + [5] * (10 - switch)
        # Each token's log-prob is that of its version's own full forward pass: no stale cache is left.
        expected = []
        for model in (old, new):
            with torch.no_grad():
                logits = model(torch.tensor([[*asked[c.request_id], *c.token_ids]])).logits[0, len(asked[c.request_id]) - 1 : -1]
            expected.append(logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0])
        assert torch.allclose(torch.tensor(c.logprobs), torch.cat((expected[0][:switch], expected[1][switch:])), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_an_optimizer_step_in_place_is_seen_at_once(name: str) -> None:
    model = tiny_model(name)
    engine = make_engine(model)
    asked = prompts(6)
    request = requests_of(asked, SamplingParams(max_tokens=8, n=2, seed=0, ignore_eos=True))
    before = engine.generate(request)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.load_weights([], version=1)
    after = engine.generate(request)
    assert by_sample(after) != by_sample(before)
    for c in after:
        assert logprob_error(model, asked[0], c) < 1e-4
        assert set(c.policy_versions) == {1}


def test_load_weights_checks_names_and_shapes() -> None:
    engine = make_engine(tiny_model("llama"))
    with pytest.raises(KeyError, match=r"model\.nothing"):
        engine.load_weights([("model.nothing", torch.zeros(1))], version=1)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(1,\), expected \(48,\)"):
        engine.load_weights([("model.norm.weight", torch.zeros(1))], version=1)
    # A tied head may be sent under its own name.
    engine.load_weights([("lm_head.weight", torch.zeros(61, 48))], version=2)
    assert engine.policy_version == 2


def test_sleep_and_wake() -> None:
    engine = make_engine(tiny_model())
    asked = requests_of(prompts(6), SamplingParams(max_tokens=8, n=2, seed=0))
    expected = by_sample(engine.generate(asked))
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        engine.generate(asked)
    engine.wake()
    engine.wake()
    assert by_sample(engine.generate(asked)) == expected


def test_default_ends_of_sequence() -> None:
    model, tokenizer = tiny_model(), letters()
    tokenizer.eos_token = "9"
    model.generation_config.eos_token_id = [4, 5]
    engine = make_engine(model, tokenizer, eos_token_ids=None)
    completions = engine.generate(requests_of(prompts(5), SamplingParams(max_tokens=40, n=30, temperature=2.0)))
    assert {c.token_ids[-1] for c in completions if c.finish_reason == "stop"} == {4, 5, 9}


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5] * 40, {"max_tokens": 25}, "prompt of 40 tokens plus max_tokens=25 exceeds max_model_len=64"),
        ([], {"max_tokens": 5}, "empty prompt"),
        ([5, 61], {"max_tokens": 5}, "token id 61"),
        ([-1], {"max_tokens": 5}, "token id -1"),
        ([5], {"max_tokens": 0}, "max_tokens=0"),
        ([5], {"max_tokens": 5, "n": 0}, "n=0"),
        ([5], {"max_tokens": 5, "temperature": -1.0}, "temperature=-1.0"),
        ([5], {"max_tokens": 5, "temperature": float("nan")}, "temperature=nan"),
        ([5], {"max_tokens": 5, "top_p": 0.0}, "top_p=0.0"),
        ([5], {"max_tokens": 5, "top_k": 0}, "top_k=0"),
        ([5], {"max_tokens": 5, "min_p": 1.5}, "min_p=1.5"),
        ([5], {"max_tokens": 5, "min_tokens": 6}, "min_tokens=6"),
        ([5], {"max_tokens": 5, "stop": ("",)}, "non-empty"),
        ([5], {"max_tokens": 5, "stop": ("x",)}, "needs a tokenizer"),
        ([5], {"max_tokens": 5, "stop_token_ids": (61,)}, "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_run(prompt: list[int], params: dict[str, Any], message: str) -> None:
    engine = make_engine(tiny_model())
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        engine.stream([GenerationRequest(request_id=0, prompt_ids=prompt, sampling=SamplingParams(**params))])
    assert "\n" not in str(caught.value)
    assert engine.stats.prefilled_tokens == 0


def test_request_ids_must_differ() -> None:
    request = requests_of(prompts(4), SamplingParams(max_tokens=2))[0]
    with pytest.raises(UserError, match="request_id=0 is used twice"):
        make_engine(tiny_model()).generate([request, request])


def test_a_cache_too_small_for_one_sequence() -> None:
    with pytest.raises(UserError, match=r"kv_cache_tokens=63 .*max_model_len=64"):
        make_engine(tiny_model(), cache_tokens=63)


def test_nothing_asked() -> None:
    assert make_engine(tiny_model()).generate([]) == []
