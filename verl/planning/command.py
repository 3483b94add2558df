"""`verl plan`: what a model needs of GPU memory, and the settings with which it fits."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint.manager import resolve_checkpoint
from verl.errors import UserError

if TYPE_CHECKING:
    from verl.planning.layout import Layout
    from verl.planning.memory import Estimate, ModelShape, Switches, Tracer, Workload

_WIDTH = 80
_MAX_GPUS = 1 << 17
"""No cluster is larger, and a search over more would take minutes."""
_LAYER_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads"),
)


def main(argv: Sequence[str]) -> None:
    """GPU memory that training a model takes, by part, and a layout, micro-batch and memory switches with which it fits.
    Needs no GPU, and no weights: of a model folder only config.json is read."""
    args = _parser().parse_args(argv)
    _check(args)
    memory = _gpu_memory(args.gpu_memory)
    config = _model_config(args.model)
    from verl.observe.console import quiet_third_party
    from verl.planning import activations, layout
    from verl.planning import memory as sizes

    quiet_third_party()
    _check_layers(args.model, config)
    try:
        shape = sizes.model_shape(config)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"MODEL {args.model}: config.json describes no model ({' '.join(str(error).split())})") from None
    workload = _workload(args)
    trace = activations.tracer(config)
    choice = layout.choose(shape, trace, workload, gpus=args.gpus, memory=memory * sizes.GIB)
    if not choice.fits:
        print(f"error: {_what_would_help(args, shape, trace, workload, choice.best, memory)}", file=sys.stderr)
        sys.exit(1)
    print(report(args.model, shape, workload, choice.best, memory, overrides(args, choice.best)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl plan", description=main.__doc__)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder (config.json is enough) or hub id")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs in all (default 1)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU, GiB (default: of the GPU found)")
    parser.add_argument("--prompt-length", type=int, metavar="N", help="tokens (default: data.max_prompt_length's)")
    parser.add_argument("--response-length", type=int, metavar="N", help="tokens (default: data.max_response_length's)")
    parser.add_argument("--critic", action="store_true", help="a critic is trained as well (PPO)")
    parser.add_argument("--reference", action="store_true", help="a reference model is kept as well (KL terms)")
    parser.add_argument("--sft", action="store_true", help="supervised fine-tuning: nothing is generated")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="model.dtype (default bfloat16)")
    return parser


def _check(args: argparse.Namespace) -> None:
    for option in ("gpus", "gpu_memory", "prompt_length", "response_length"):
        value = getattr(args, option)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{option.replace('_', '-')} {value:g}: must be above 0")
    if args.gpus > _MAX_GPUS:
        raise UserError(f"--gpus {args.gpus}: plans are made for up to {_MAX_GPUS}")
    for option in ("critic", "reference"):
        if args.sft and getattr(args, option):
            raise UserError(f"--sft and --{option} exclude each other: supervised fine-tuning has one model")


def _gpu_memory(given: float | None) -> float:
    """GiB of a GPU."""
    if given is not None:
        return given
    import torch

    if not torch.cuda.is_available():
        raise UserError("--gpu-memory is missing, and torch sees no GPU here: give the GiB of one (80, say)")
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def _model_config(model: str) -> Any:
    """The Hugging Face configuration. Raises UserError for what is no model."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file() and any(folder.glob("**/step_*")):
        folder = resolve_checkpoint(folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"MODEL {model}: the folder has no config.json; give a Hugging Face model folder")
        try:
            if not isinstance(json.loads((folder / "config.json").read_text()), dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise UserError(f"MODEL {model}: config.json is not a JSON object ({error})") from None
    elif folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1 or not model:
        raise UserError(f"MODEL {model}: no such folder; give a Hugging Face model folder or a hub id like owner/name")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from verl.engines.train.loading import MODEL_TYPES, quiet_transformers

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else model)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UserError(f"MODEL {model}: cannot be loaded ({' '.join(str(error).split())})") from None
    if config.model_type not in MODEL_TYPES:
        raise UserError(f"MODEL {model}: model_type {config.model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
    return config


def _check_layers(model: str, config: Any) -> None:
    for key in (*_LAYER_SIZES, "head_dim"):
        if (value := getattr(config, key, None)) is None and key == "head_dim":
            continue  # of some families it follows from the others
        if not isinstance(value, int) or value < 1:
            raise UserError(f"MODEL {model}: {key}={value!r} in config.json must be a whole number above 0")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        raise UserError(f"MODEL {model}: num_key_value_heads={groups} in config.json does not divide num_attention_heads={heads}")
    if getattr(config, "quantization_config", None):
        raise UserError(f"MODEL {model}: its weights are quantized, which cannot be trained; give the model they were made from")


def _workload(args: argparse.Namespace) -> Workload:
    import torch

    from verl.config.schema import Config
    from verl.engines.rollout.native.engine import FREE_MEMORY_SHARE
    from verl.planning.activations import kernel_groups_keys
    from verl.planning.memory import Workload

    defaults = Config()
    return Workload(
        prompt=args.prompt_length or defaults.data.max_prompt_length,
        response=args.response_length or defaults.data.max_response_length,
        dtype=getattr(torch, args.dtype),
        critic=args.critic,
        reference=args.reference,
        generates=not args.sft,
        max_sequences=defaults.rollout.max_num_seqs,
        cache_share=FREE_MEMORY_SHARE,
        groups_keys=kernel_groups_keys(),
    )


def overrides(args: argparse.Namespace, best: Estimate) -> list[str]:
    """What to add to `verl train`, as `key=value`; defaults of the configuration are left out."""
    from verl.planning.layout import gpus_per_node

    plan = best.plan
    found: dict[str, object] = {}
    if plan.layout.gpus > 1:
        found["parallel.n_gpus_per_node"] = gpus_per_node(plan.layout.gpus)
        nodes = plan.layout.gpus // gpus_per_node(plan.layout.gpus)
        found |= {"parallel.nnodes": nodes} if nodes > 1 else {}
        found["parallel.data_parallel_size"] = plan.layout.data
    if plan.layout.tensor > 1:
        found["parallel.tensor_model_parallel_size"] = plan.layout.tensor
    if plan.layout.pipeline > 1:
        found["parallel.pipeline_model_parallel_size"] = plan.layout.pipeline
    found["actor.max_tokens_per_micro_batch"] = plan.micro_batch
    if args.critic:
        found |= {"algorithm.adv_estimator": "gae", "critic.max_tokens_per_micro_batch": plan.micro_batch}
    if args.reference:
        found["algorithm.kl_loss_coef"] = 0.001
    found |= {f"memory_optimization.{name}": "true" for name in switched_on(plan.switches)}
    if args.dtype != "bfloat16":
        found["model.dtype"] = args.dtype
    if args.prompt_length:
        found["data.max_prompt_length"] = args.prompt_length
    if args.response_length:
        found["data.max_response_length"] = args.response_length
    return [f"{key}={value}" for key, value in found.items()]


def switched_on(switches: Switches) -> list[str]:
    """Names of the memory switches that are on, cheapest first."""
    return [name for name in ("param_offload", "gradient_checkpointing", "optimizer_offload") if getattr(switches, name)]


def report(model: str, shape: ModelShape, workload: Workload, best: Estimate, memory: float, keys: Sequence[str]) -> str:
    """The tables and the overrides, in lines of up to 80 columns."""
    from verl.planning.layout import USABLE_SHARE
    from verl.planning.memory import GIB

    usable = memory * USABLE_SHARE
    peak, plan = best.peak, best.plan
    rows = [
        ("weights", peak.weights),
        ("gradients", peak.gradients),
        ("optimizer (Adam, float32 masters)", peak.optimizer),
        ("activations", peak.activations),
        ("logits and probabilities", peak.logits),
        ("layers gathered from slices", peak.gathered),
        ("other models, generator, libraries", peak.others),
    ]
    lines = [
        _shortened(f"{Path(model).name or model}: {_count(shape.parameters)} parameters, {_name(workload.dtype)}"),
        f"{_gpus(plan.layout.gpus)} of {memory:g} GiB, of which {usable:.1f} are counted on",
        "",
        f"Peak of training, GiB a GPU: {peak.moment}",
        *(f"  {name:<36} {value / GIB:>8.2f}" for name, value in rows if value),
        f"  {'total':<36} {peak.total / GIB:>8.2f}  {_bar(peak.total / GIB / memory)}",
        f"Between updates {best.rest / GIB:.2f} GiB",
    ]
    if workload.generates:
        cache = best.cache_bytes(usable * GIB, workload)
        tokens = int(cache / best.key_value_token)
        lines += [
            f"Key-value cache for generation {cache / GIB:.2f} GiB: {tokens:,} tokens,",
            f"  {tokens // workload.sequence:,} sequences of {workload.sequence:,}",
        ]
    lines += [
        "",
        f"Layout: {_layout(plan.layout)}",
        f"  (usual at this size: {usual_layout(shape.parameters)})",
        f"Micro-batches of {plan.micro_batch:,} tokens",
        f"Memory switches: {', '.join(switched_on(plan.switches)) or 'none needed'}",
        "",
        "Overrides:",
        *_wrapped(keys),
    ]
    return "\n".join(lines)


def usual_layout(parameters: int) -> str:
    """The rule of thumb by size, for comparison: the layout that a plan recommends is the cheapest that fits its estimate."""
    if parameters < 10e9:
        return "data-parallel alone"
    if parameters <= 100e9:
        return "2- to 4-way tensor-parallel"
    return "tensor-parallel with pipeline stages"


def _what_would_help(
    args: argparse.Namespace, shape: ModelShape, trace: Tracer, workload: Workload, nearest: Estimate, memory: float
) -> str:
    """One line: what is missing, and how many GPUs would do."""
    from verl.planning import layout
    from verl.planning.memory import GIB

    usable = memory * layout.USABLE_SHARE
    needed = (usable + nearest.shortage(usable * GIB, workload) / GIB) / layout.USABLE_SHARE
    start = (
        f"{Path(args.model).name or args.model} ({_count(shape.parameters)} parameters) does not fit "
        f"{_gpus(args.gpus)} of {memory:g} GiB, with every switch on and the smallest micro-batch: it needs "
        f"{math.ceil(needed)} GiB a GPU"
    )
    copy = shape.parameters * workload.dtype.itemsize / GIB
    if more := layout.enough_gpus(shape, trace, workload, gpus=args.gpus, memory=memory * GIB):
        return f"{start}, or {more} GPUs of this size (--gpus {more})"
    without = replace(workload, generates=False)
    fits = layout.choose(shape, trace, without, gpus=args.gpus, memory=memory * GIB).fits
    more = args.gpus if fits else layout.enough_gpus(shape, trace, without, gpus=args.gpus, memory=memory * GIB)
    if workload.generates and more:
        option = "" if workload.critic or workload.reference else " (--sft)"
        return (
            f"{start}; more GPUs do not help, since with several of them generation keeps a whole copy of the weights "
            f"({copy:.0f} GiB) on each; without generation{option} {_gpus(more)} would do"
        )
    return f"{start}; more GPUs do not help, a shorter --response-length or --prompt-length may"


def _layout(layout: Layout) -> str:
    if layout.gpus == 1:
        return "one GPU, no parallelism"
    parts = [f"{layout.data} data-parallel (FSDP slices)" if layout.data > 1 else ""]
    parts += [f"{layout.tensor} tensor-parallel" if layout.tensor > 1 else ""]
    parts += [f"{layout.pipeline} pipeline stages" if layout.pipeline > 1 else ""]
    return " x ".join(part for part in parts if part)


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _bar(share: float) -> str:
    """20 cells: the share of a GPU that is full."""
    full = min(20, round(20 * share))
    return f"[{'#' * full}{'.' * (20 - full)}] {share:.0%}"


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH else "..." + line[3 - _WIDTH :]


def _wrapped(keys: Sequence[str]) -> list[str]:
    """Shell lines of up to 80 columns, joined by backslashes."""
    lines, line = [], "  "
    for key in keys:
        if len(line) + len(key) + 3 > _WIDTH and line.strip():
            lines.append(line.rstrip() + " \\")
            line = "  "
        line += key + " "
    return [*lines, line.rstrip()]
