"""The native engine's forward pass against Hugging Face's, family by family and layout by layout."""

from __future__ import annotations

import pytest
import torch
from native_models import CONFIGS, logprob_error, make_engine, prompts, reference_logits, requests_of, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from verl.engines.rollout.base import SamplingParams
from verl.engines.rollout.native import decoder as decoder_module
from verl.engines.rollout.native.attention import causal_bias
from verl.engines.rollout.native.spec import DecoderSpec
from verl.errors import UserError


@pytest.mark.parametrize("layout", ["rows", "paged"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logprobs_equal_hugging_face(name: str, layout: str) -> None:
    model = tiny_model(name)
    # Longer than the window of 6 both in the prompt and in the response.
    asked = prompts(1, 5, 13, 20)
    engine = make_engine(model, layout=layout)
    completions = engine.generate(requests_of(asked, SamplingParams(max_tokens=16, n=2, ignore_eos=True)))
    assert len(completions) == 8
    for completion in completions:
        assert logprob_error(model, asked[completion.request_id], completion) < 1e-4


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-window-biases", "gemma2", "gemma3"])
def test_windows_matter_in_these_models(name: str) -> None:
    """The test above would not see a missing window if the models did not care."""
    model = tiny_model(name)
    (prompt,) = prompts(20)
    windowed = reference_logits(model, prompt, [5])
    config = CONFIGS[name]()
    config.sliding_window = 64
    wide = type(model)(config).eval()
    wide.load_state_dict(model.state_dict())
    assert (windowed - reference_logits(wide, prompt, [5])).abs().max() > 0.01


def test_spec_reads_each_family() -> None:
    specs = {name: DecoderSpec.from_module(tiny_model(name)) for name in CONFIGS}
    assert specs["mistral-window"].windows == (6, 6, 6)
    assert specs["qwen3-window-biases"].windows == (None, 6, 6)
    assert specs["gemma2"].windows == (6, None, 6)
    assert specs["llama"].windows == (None, None, None)
    assert specs["gemma3"].rope_kinds == ("sliding_attention", "full_attention", "sliding_attention")
    assert specs["gemma2"].attention_softcap == 3.0
    assert specs["gemma3"].attention_softcap is None
    assert specs["gemma"].norm_offset == 1.0 and specs["qwen3"].norm_offset == 0.0
    assert [name for name, spec in specs.items() if spec.qk_norm] == ["qwen3", "qwen3-window-biases", "gemma3", "gemma3-untied"]


def test_unknown_architecture_is_one_clear_line() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10))
    with pytest.raises(UserError, match=r"'gpt2'.*qwen3.*vllm") as caught:
        make_engine(model)
    assert "\n" not in str(caught.value)


def test_length_dependent_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=8,
        rope_parameters=rope,
    )
    with pytest.raises(UserError, match="rope_type='dynamic'"):
        make_engine(Qwen3ForCausalLM(config))


def test_adapters_are_refused_rather_than_ignored() -> None:
    class Adapter(torch.nn.Linear):
        """Stands for any layer that computes more than its weight."""

    model = tiny_model()
    model.model.layers[0].self_attn.v_proj = Adapter(48, 32, bias=False)
    with pytest.raises(UserError, match=r"v_proj.*merge"):
        make_engine(model)


def test_bfloat16_is_close_to_hugging_face() -> None:
    model = tiny_model().to(torch.bfloat16)
    asked = prompts(9, 12)
    for layout in ("rows", "paged"):
        engine = make_engine(model, layout=layout)
        completions = engine.generate(requests_of(asked, SamplingParams(max_tokens=16, n=4, ignore_eos=True, seed=1)))
        errors = torch.tensor([logprob_error(model, asked[c.request_id], c) for c in completions])
        # Two bf16 programs differ by their roundings alone; logits are around 10 here, one ulp is 0.06.
        assert errors.mean() < 0.25


def test_causal_bias_by_hand() -> None:
    bias = causal_bias(torch.tensor([0, 3]), 5, None, torch.float32)
    assert (bias[:, 0, 0] == 0).tolist() == [[True, False, False, False, False], [True, True, True, True, False]]
    bias = causal_bias(torch.tensor([0, 3]), 5, 2, torch.float32)
    assert (bias[:, 0, 0] == 0).tolist() == [[True, False, False, False, False], [False, False, True, True, False]]


def test_small_projections_are_merged_without_a_change(monkeypatch) -> None:
    requests = requests_of(prompts(3, 4), SamplingParams(max_tokens=6, n=2, temperature=0.8, seed=5))
    for family in ("qwen3-window-biases", "gemma2"):
        model = tiny_model(family)
        merged = make_engine(model)
        assert len(merged._decoder._layers[0].qkv) == len(merged._decoder._layers[0].gate_up) == 1
        with monkeypatch.context() as patch:
            patch.setattr(decoder_module, "_MERGED_ELEMENTS", 0)
            apart = make_engine(model)
            expected = apart.generate(requests)
        assert len(apart._decoder._layers[0].qkv) == 3
        for mine, theirs in zip(merged.generate(requests), expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        assert [c.logprobs for c in merged.generate(requests)] != [c.logprobs for c in expected]


def test_parameters_are_shared_not_copied(monkeypatch) -> None:
    monkeypatch.setattr(decoder_module, "_MERGED_ELEMENTS", 0)
    model = tiny_model("llama")
    engine = make_engine(model)
    decoder = engine._decoder
    assert decoder._embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert decoder._head.data_ptr() == model.lm_head.weight.data_ptr()
    for mine, theirs in zip(decoder._layers, model.model.layers, strict=True):
        assert mine.qkv[0].weight.data_ptr() == theirs.self_attn.q_proj.weight.data_ptr()
        assert mine.down.weight.data_ptr() == theirs.mlp.down_proj.weight.data_ptr()
