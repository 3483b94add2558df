"""GGUF to a Hugging Face folder: same logits, same tokens, nothing left of the quantised form."""

import importlib
import json

import gguf
import numpy as np
import pytest
import torch
from models import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.errors import UserError
from verl.models.gguf import convert_gguf, find_gguf

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A projection in llama.cpp's order: the two halves of a rotary pair lie side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model) -> None:
    """A Llama model as a GGUF file, written field by field from the format's definition."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "Ġa"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_TENSORS.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs == "attn_q":
                weight = interleaved(weight, config.num_attention_heads)
            if theirs == "attn_k":
                weight = interleaved(weight, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(model, folder that holds its GGUF file)"""
    torch.manual_seed(0)
    config = tiny_config("llama", rms_norm_eps=1e-5)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf", model)
    return model, folder


def test_a_tiny_llama_keeps_its_logits_tokens_and_template(tiny, tmp_path):
    model, folder = tiny
    out = convert_gguf(folder / "tiny.gguf", tmp_path / "out")
    copy = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi a"}], tokenize=False) == "<|im_start|>Hi a<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>Hi a<|im_end|>")["input_ids"]) == [
        "<|im_start|>",
        "H",
        "i",
        "Ġa",
        "<|im_end|>",
    ]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_config_is_that_of_a_plain_model(tiny, tmp_path):
    out = convert_gguf(tiny[1], tmp_path / "new" / "out", dtype="bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == "bfloat16"
    assert config["eos_token_id"] == 2
    assert not [key for key in config if "quant" in key or key.startswith("_")]
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_package_name_finds_the_file_it_carries(tiny, tmp_path, monkeypatch):
    package = tmp_path / "tiny_gguf_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('is found without being imported')")
    (package / "model.gguf").write_bytes((tiny[1] / "tiny.gguf").read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert find_gguf("tiny-gguf-package") == package / "model.gguf"


def test_bad_sources_say_what_to_do(tiny, tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UserError, match="is not a GGUF file"):
        find_gguf(tmp_path / "text.gguf")
    with pytest.raises(UserError, match=r"neither a \.gguf file, nor a folder, nor an installed package"):
        find_gguf("no_such_package_at_all")
    (tmp_path / "two").mkdir()
    with pytest.raises(UserError, match=r"holds no \.gguf file"):
        find_gguf(tmp_path / "two")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"holds 2 GGUF files; name one: .*a\.gguf"):
        find_gguf(tmp_path / "two")
    with pytest.raises(UserError, match="cannot read it"):
        convert_gguf(tmp_path / "two" / "a.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="is not empty"):
        convert_gguf(tiny[1], tmp_path / "two")
