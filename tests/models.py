"""Tiny random Hugging Face models and a tiny tokenizer, made in milliseconds, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

FAMILIES = ("qwen2", "qwen3", "llama", "smollm3", "mistral", "gemma", "gemma2", "gemma3")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "Tom has 3 apples and buys 12 more. How many apples does he have? 3 + 12 = 15 #### 15",
    "Question: what is 27 + 48? Answer: 75",
    "The quick brown fox jumps over the lazy dog, 1234567890 times.",
]


def tiny_config(family: str, **overrides):
    """Two layers, hidden 32, vocabulary 128, grouped-query attention; sliding windows of 6 where the family has them."""
    import transformers as hf

    common = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attention_dropout=0.0,
    )
    classes = {
        "qwen2": (hf.Qwen2Config, {"tie_word_embeddings": False}),
        "qwen3": (hf.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
        "llama": (hf.LlamaConfig, {"tie_word_embeddings": True}),
        "smollm3": (hf.SmolLM3Config, {"tie_word_embeddings": True, "no_rope_layers": [1, 0]}),
        "mistral": (hf.MistralConfig, {"sliding_window": 6}),
        "gemma": (hf.GemmaConfig, {"head_dim": 16}),
        "gemma2": (
            hf.Gemma2Config,
            {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
        ),
        "gemma3": (
            hf.Gemma3TextConfig,
            {
                "head_dim": 16,
                "sliding_window": 6,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    }
    config_class, special = classes[family]
    return config_class(**{**common, **special, **overrides})


def tiny_model(family: str = "qwen3", *, seed: int = 0, scale: float = 15.0, **overrides) -> torch.nn.Module:
    """A random causal language model (eager attention). `scale` multiplies matrices, so that outputs are far from uniform."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms and biases get random values too, or a mistake about them would go unseen.
                parameter.copy_(parameter * scale if parameter.ndim > 1 else parameter + 0.1 * torch.randn_like(parameter))
    return model.eval()


def save_tiny_model(folder: Path, family: str = "qwen3", *, seed: int = 0, tokenizer: bool = False, **overrides) -> Path:
    """Save `tiny_model` (and, with `tokenizer`, `tiny_tokenizer` with a vocabulary to match) under `folder`."""
    if tokenizer:
        tok = tiny_tokenizer()
        tok.save_pretrained(folder)
        overrides = {"vocab_size": len(tok), "eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id, **overrides}
    tiny_model(family, seed=seed, **overrides).save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer(vocab_size: int = 400):
    """A byte-level BPE tokenizer with a ChatML template, trained on three lines; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
