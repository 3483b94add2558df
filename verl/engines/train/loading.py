"""Hugging Face models: checking a folder cheaply, loading with packed attention, the value head, export."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.schema import ModelConfig
from verl.engines.train import attention, norms
from verl.errors import ConfigError, UserError

MODEL_TYPES = ("qwen2", "qwen3", "llama", "smollm3", "mistral", "gemma", "gemma2", "gemma3_text")
"""`model_type`s whose log-probs are tested against their Hugging Face forward pass. Others may scale their logits
or attend in ways that a packed pass would silently get wrong, so they are refused."""

VALUE_HEAD_FILE = "value_head.safetensors"

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(device: str) -> torch.device:
    """`auto` is the first GPU if there is one. Raises ConfigError for a GPU that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu",) and not device.startswith("cuda"):
        raise ConfigError(f"training.device={device!r}: use auto, cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"training.device={device!r}: torch sees no GPU here; use auto or cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype={dtype!r}: use auto, {' or '.join(_DTYPES)}")
    return _DTYPES[dtype]


def check_model_folder(path: str) -> None:
    """Raise a one-line UserError if `path` cannot be a model; reads no weights, takes about a millisecond.

    A name that is no folder passes if it looks like a hub id (`name` or `owner/name`): only loading can tell.
    """
    if not path:
        raise UserError("model.path is empty: give a Hugging Face model folder or a hub id")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise UserError(f"model.path={path}: no such folder; give a Hugging Face model folder or a hub id like owner/name")
        return
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(f"model.path={path}: the folder has no config.json; give a Hugging Face model folder or a run's")
    try:
        model_type = json.loads(config_file.read_text()).get("model_type")
    except (json.JSONDecodeError, AttributeError) as error:
        raise UserError(f"model.path={path}: config.json is not a JSON object ({error}); save the model again") from None
    _check_model_type(path, model_type)
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise UserError(f"model.path={path}: the folder has no weights (*.safetensors); save the model again or copy them there")


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that the config.json of a model folder names; float32 where it names none."""
    config = json.loads((folder / "config.json").read_text())
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))


def context_length(path: str) -> int | None:
    """Positions that the model at the local folder `path` was made for, rope scaling included; None where it does not say
    or `path` is a hub id."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    config = config.get("text_config") or config
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(positions, int) or not isinstance(factor, int | float):
        return positions
    # Some models state the extended number already (Llama 3.1), others the one before scaling (Qwen2.5 with YaRN).
    return max(positions, int(factor * (original or positions)))


def _check_model_type(path: str, model_type: str | None) -> None:
    if model_type not in MODEL_TYPES:
        raise UserError(f"model.path={path}: model_type {model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")


def load_causal_lm(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The causal language model at `model.path` with packed attention, in evaluation mode. On the meta device it has
    shapes and no weights, and none are read."""
    from transformers import AutoModelForCausalLM

    return _from_pretrained(AutoModelForCausalLM, model, device, dtype)


class ValueModel(nn.Module):
    """A language model's body with a linear head that reads one value from each hidden state.

    The head starts at zero: every value is 0 before the first update, so the first advantages are the rewards
    themselves and not noise, and the body is first moved by the second update.
    """

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.value_head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, D] hidden states -> [N] values, float32."""
        head = self.value_head
        return (hidden.float() @ head.weight.float().t() + head.bias.float())[:, 0]


def load_value_model(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> ValueModel:
    """The body of the model at `model.path`, with the value head found beside it or, failing that, a new one."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    body = _from_pretrained(AutoModel, model, device, dtype)
    with torch.device(device):
        value_model = ValueModel(body, body.config.hidden_size)
    head_file = Path(model.path).expanduser() / VALUE_HEAD_FILE
    if head_file.is_file() and device.type != "meta":
        value_model.value_head.load_state_dict(load_file(str(head_file)))
    value_model.value_head.to(device, dtype)
    return value_model.eval()


def read_config(model: ModelConfig) -> Any:
    """The Hugging Face configuration of the model at `model.path`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(_source(model), trust_remote_code=model.trust_remote_code)


def _source(model: ModelConfig) -> str:
    folder = Path(model.path).expanduser()
    return str(folder) if folder.is_dir() else model.path


def _from_pretrained(auto_class: type, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from safetensors import SafetensorError

    check_model_folder(model.path)
    source = _source(model)
    if device.type == "meta":
        with torch.device("meta"):
            module = auto_class.from_config(read_config(model), dtype=dtype, attn_implementation=attention.register())
        norms.install(module)
        return module.eval()
    try:
        with quiet_transformers():
            module, info = auto_class.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=attention.register(),
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"model.path={model.path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    _check_model_type(model.path, module.config.model_type)
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise UserError(
            f"model.path={model.path}: {len(names)} weights are missing from the files, {names[0]} first; save it again"
        )
    norms.install(module)
    return module.to(device).eval()


def export_model(module: nn.Module, model: ModelConfig, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write `module` and the tokenizer of `model` as a Hugging Face folder; a value head goes into a file beside.

    weights: those to write, by the module's names, where the module itself does not hold them whole.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    has_value_head = isinstance(module, ValueModel)
    body = module.body if has_value_head else module
    state = None
    if weights is not None:
        prefix = "body." if has_value_head else ""
        state = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    with quiet_transformers():
        body.save_pretrained(folder, state_dict=state)
        if state:
            _set_dtype(folder / "config.json", next(iter(state.values())).dtype)
        _export_tokenizer(model, folder)
    if has_value_head:
        head = dict(module.named_parameters()) if weights is None else weights
        head = {k.removeprefix("value_head."): v for k, v in head.items() if k.startswith("value_head.")}
        save_file({k: v.detach().cpu().contiguous() for k, v in head.items()}, folder / VALUE_HEAD_FILE)
    share_permissions(folder)


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """The library writes the dtype of the module, which need not be that of the weights it was given."""
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2, sort_keys=True) + "\n")


def _export_tokenizer(model: ModelConfig, folder: Path) -> None:
    _copy_tokenizer(model, folder)
    if model.chat_template is not None:
        # This file goes before what tokenizer_config.json may hold.
        shutil.copy(Path(model.chat_template).expanduser(), folder / "chat_template.jinja")


def _copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    source = model.tokenizer_path or model.path
    local = Path(source).expanduser()
    if not local.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code).save_pretrained(folder)
        return
    # Files are copied rather than saved again, so that no library version can change the tokenizer on the way.
    for pattern in _TOKENIZER_PATTERNS:
        for file in local.glob(pattern):
            if file.is_file() and file.parent.resolve() != folder.resolve():
                shutil.copy(file, folder / file.name)


def share_permissions(folder: Path, like: str = "config.json") -> None:
    """Give weights the permissions of the file `like`: the safetensors library lets their owner alone read them."""
    mode = (folder / like).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings from transformers and the hub client inside the block."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
        hub.setLevel(hub_level)
