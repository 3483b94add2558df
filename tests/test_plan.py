"""`verl plan`: estimates against measured memory, counts against real models, and the choice of a layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.models import FAMILIES, tiny_config
from verl.config import load_config
from verl.config.purpose import SFT as SFT_COMMAND
from verl.config.purpose import TRAIN
from verl.planning.activations import tracer
from verl.planning.command import usual_layout
from verl.planning.layout import SWITCHES, USABLE_SHARE, choose, layouts, micro_batches
from verl.planning.memory import GIB, Layout, Plan, Switches, Workload, estimate, model_shape, state_bytes

WIDTH = 80


def qwen3_600m():
    import transformers as hf

    return hf.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )


def llama_70b():
    import transformers as hf

    sizes = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    return hf.LlamaConfig(vocab_size=128256, tie_word_embeddings=False, **sizes)


MEASURED_WITH = "python benchmarks/memory_switches.py --layers 28 --tokens 65536 --micro_batch 16384"
"""On one H200 with torch 2.11, whose attention kernel repeats key-value heads; sequences of 1,024 tokens."""
MEASURED = [
    # dtype, switches, GiB at the peak of an update, GiB between updates
    ("bfloat16", {}, 49.41, 7.84),
    ("float32", {}, 95.84, 6.73),
    ("bfloat16", {"gradient_checkpointing": True}, 14.34, 7.84),
    ("bfloat16", {"optimizer_offload": True}, 42.75, 1.17),
    ("bfloat16", {"param_offload": True}, 49.41, 6.73),
    ("bfloat16", {"param_offload": True, "optimizer_offload": True}, 42.75, 0.06),
    ("bfloat16", {"param_offload": True, "optimizer_offload": True, "gradient_checkpointing": True}, 10.06, 0.06),
]

SFT = Workload(prompt=512, response=512, generates=False, groups_keys=False)
ONE = Plan(layout=Layout(), switches=Switches(), micro_batch=16384)


class Model:
    def __init__(self, config):
        self.shape, self.trace = model_shape(config), tracer(config)

    def estimate(self, workload=SFT, plan=ONE):
        return estimate(self.shape, self.trace, workload, plan)

    def peak(self, workload=SFT, plan=ONE):
        return self.estimate(workload, plan).peak.total

    def choose(self, workload, gpus, gib):
        return choose(self.shape, self.trace, workload, gpus=gpus, memory=gib * GIB)


@pytest.fixture(scope="module")
def small():
    return Model(qwen3_600m())


@pytest.fixture(scope="module")
def large():
    return Model(llama_70b())


@pytest.mark.parametrize(("dtype", "switches", "peak", "rest"), MEASURED)
def test_measured_memory(small, dtype, switches, peak, rest):
    workload = replace(SFT, dtype=getattr(torch, dtype))
    found = small.estimate(workload, replace(ONE, switches=Switches(**switches)))
    assert found.peak.total / GIB == pytest.approx(peak, rel=0.15)
    assert found.rest / GIB == pytest.approx(rest, rel=0.15, abs=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_exactly(family):
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    module = AutoModelForCausalLM.from_config(config)
    shape = model_shape(config)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layer = module.base_model.layers[0]
    assert shape.matrices == sum(p.numel() for name, p in layer.named_parameters() if name.split(".")[-2] in names)
    assert shape.is_tied == config.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_family_is_traced(family, dtype):
    model = Model(tiny_config(family))
    workload = replace(SFT, prompt=8, response=8, dtype=dtype)
    peaks = [
        model.estimate(workload, replace(ONE, switches=Switches(gradient_checkpointing=on))).peak.activations
        for on in (False, True)
    ]
    assert peaks[0] > peaks[1] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_trace_counts_what_a_pass_keeps(dtype):
    """Against tensors that a real CPU pass of the same two layers saves."""
    from transformers import AutoModel

    config = tiny_config("llama", num_key_value_heads=4, hidden_size=64, intermediate_size=96)
    rows = 64
    body = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
    known = {p.untyped_storage().data_ptr() for p in body.parameters()}
    saved = {}
    x = body.get_input_embeddings()(torch.zeros(1, rows, dtype=torch.int64)).float()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage  # kept, so that no address comes twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, dtype != torch.float32),
    ):
        body(inputs_embeds=x, use_cache=False)
    total = sum(storage.nbytes() for storage in saved.values())
    workload = replace(SFT, prompt=rows // 2, response=rows // 2, dtype=dtype, groups_keys=True)
    model = Model(config)
    assert estimate(model.shape, model.trace, workload, replace(ONE, micro_batch=rows)).peak.activations == pytest.approx(
        total, rel=0.15
    )


def test_more_tokens_take_more_and_switches_less(small):
    peaks = [small.peak(plan=replace(ONE, micro_batch=tokens)) for tokens in (1024, 4096, 16384, 65536)]
    assert peaks == sorted(peaks) and len(set(peaks)) == 4
    for switch in ("gradient_checkpointing", "optimizer_offload"):
        assert small.peak(plan=replace(ONE, switches=Switches(**{switch: True}))) < small.peak()
    assert small.estimate(plan=replace(ONE, switches=Switches(param_offload=True))).rest < small.estimate().rest
    assert small.peak(replace(SFT, critic=True)) > small.peak(replace(SFT, reference=True)) > small.peak()
    assert small.peak(replace(SFT, groups_keys=True)) < small.peak()


def test_ranks_share_the_load(large):
    layouts_ = [Layout(data=8), Layout(data=16), Layout(data=8, tensor=2), Layout(data=4, tensor=4)]
    peaks = [large.estimate(plan=replace(ONE, layout=layout)).peak for layout in layouts_]
    assert peaks[1].weights == pytest.approx(peaks[0].weights / 2)
    assert peaks[1].activations == pytest.approx(peaks[0].activations)
    assert peaks[2].activations < 0.65 * peaks[0].activations
    assert peaks[3].activations < peaks[2].activations
    stages = large.estimate(plan=replace(ONE, layout=Layout(data=8, pipeline=2))).peak
    # Two micro-batches alive on the first stage, each with half of the layers.
    assert stages.activations == pytest.approx(peaks[0].activations, rel=0.1) and stages.weights < 0.6 * peaks[0].weights


def test_the_state_alone_is_never_more_than_the_estimate(small):
    for switches in SWITCHES:
        for layout in layouts(small.shape, 8):
            plan = Plan(layout=layout, switches=switches, micro_batch=4096)
            assert state_bytes(small.shape, SFT, plan) <= small.peak(plan=plan)


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("gib", [12, 24, 80])
@pytest.mark.parametrize("roles", [{}, {"critic": True, "reference": True}])
def test_what_is_recommended_fits_its_estimate(small, gpus, gib, roles):
    workload = Workload(prompt=512, response=512, **roles)
    choice = small.choose(workload, gpus, gib)
    assert choice.best.plan.layout.gpus == gpus
    if choice.fits:
        assert choice.best == small.estimate(workload, choice.best.plan)
        assert choice.best.peak.total <= gib * GIB * USABLE_SHARE
        cache = choice.best.cache_bytes(gib * GIB * USABLE_SHARE, workload)
        assert cache >= workload.sequence * choice.best.key_value_token
        assert choice.best.generation + cache <= gib * GIB
    else:
        assert choice.best.shortage(gib * GIB * USABLE_SHARE, workload) > 0


def test_no_more_than_is_needed(small):
    plain = small.choose(SFT, 1, 80).best.plan
    assert plain == ONE
    tight = small.choose(SFT, 1, 16).best.plan
    assert tight.switches == Switches(gradient_checkpointing=True) and tight.layout == Layout()
    assert small.choose(SFT, 8, 80).best.plan.layout == Layout(data=8)


def test_a_large_model(large):
    assert not large.choose(SFT, 8, 80).fits
    assert not large.choose(SFT, 1, 24).fits
    plan = large.choose(SFT, 32, 80).best.plan
    assert large.choose(SFT, 32, 80).fits and plan.layout.tensor == plan.layout.pipeline == 1
    # One sequence whose activations fill a GPU needs ranks that share its tokens.
    long = replace(SFT, response=65536)
    choice = large.choose(long, 64, 80)
    assert choice.fits and choice.best.plan.layout.tensor > 1 and choice.best.plan.micro_batch >= long.sequence


def test_layouts_divide_the_model(small):
    found = layouts(small.shape, 16)
    assert found[0] == Layout(data=16)
    assert {layout.gpus for layout in found} == {16}
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
    assert [layout.pipeline for layout in found] == sorted(layout.pipeline for layout in found)
    assert {layout.tensor for layout in layouts(replace(small.shape, key_value_heads=2), 8)} == {1, 2}
    assert micro_batches(5000, (16384, 8192, 4096)) == [16384, 8192]


@pytest.mark.parametrize(
    ("billions", "layout"),
    [
        (0.6, "data-parallel alone"),
        (9.9, "data-parallel alone"),
        (10, "2- to 4-way tensor-parallel"),
        (100, "2- to 4-way tensor-parallel"),
        (101, "tensor-parallel with pipeline stages"),
    ],
)
def test_the_rule_of_thumb_by_size(billions, layout):
    assert usual_layout(int(billions * 1e9)) == layout


def plan_command(capsys, *argv):
    """(exit code, stdout, stderr)"""
    from verl.cli import main

    code = 0
    try:
        main(["plan", *map(str, argv)])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def folder(tmp_path):
    """config.json alone: no weights, no tokenizer."""

    def make(config):
        config.save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--critic", "--reference", "--prompt-length", 4096, "--response-length", 16384),
        ("--gpus", 16, "--dtype", "float32"),
        ("--sft", "--gpus", 2),
    ],
)
def test_report(folder, capsys, options):
    code, out, err = plan_command(capsys, folder(qwen3_600m()), "--gpu-memory", 141, *options)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= WIDTH
    for word in (
        "596 million parameters",
        "weights",
        "optimizer",
        "gradients",
        "activations",
        "total",
        "Layout",
        "usual at this size: data-parallel alone",
    ):
        assert word in out
    assert ("Key-value cache" in out) == ("--sft" not in options)
    keys = out.split("Overrides:\n")[1].replace("\\", "").split()
    assert any(key.startswith("actor.max_tokens_per_micro_batch=") for key in keys)
    keys += ["model.path=model", "data.train_files=[rows.jsonl]"]
    load_config(None, keys, purpose=SFT_COMMAND if "--sft" in options else TRAIN, printer=lambda line: None)


@pytest.mark.parametrize(
    "options", [("--gpus", 8, "--gpu-memory", 80), ("--gpu-memory", 24), ("--gpus", 8, "--gpu-memory", 80, "--sft")]
)
def test_what_does_not_fit(folder, capsys, options):
    code, out, err = plan_command(capsys, folder(llama_70b()), *options)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and err.startswith("error: ") and "70.55 billion" in err and "does not fit" in err
    assert "GiB a GPU" in err and "GPUs" in err
    assert ("--gpus 16" in err) == ("--sft" in options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--gpus", 0), "--gpus 0"),
        (("--gpus", -2), "--gpus -2"),
        (("--gpus", 1_000_000_007), "--gpus 1000000007"),
        (("--gpu-memory", -1), "--gpu-memory -1"),
        (("--gpu-memory", "nan"), "--gpu-memory nan"),
        (("--prompt-length", 0), "--prompt-length 0"),
        (("--response-length", -5), "--response-length -5"),
        (("--sft", "--critic"), "--critic"),
    ],
)
def test_bad_options(folder, capsys, options, named):
    code, out, err = plan_command(capsys, folder(tiny_config("llama")), "--gpu-memory", 80, *options)
    assert (code, out) == (2, "") and err.count("\n") == 1 and named in err


def test_bad_models(tmp_path, capsys):
    def complaint(model):
        code, out, err = plan_command(capsys, model, "--gpu-memory", 80)
        assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith(f"error: MODEL {model}: ")
        return err

    assert "no such folder" in complaint(tmp_path / "nowhere")
    assert "no config.json" in complaint(tmp_path)
    file = tmp_path / "config.json"
    for text in ("{", "[]"):
        file.write_text(text)
        assert "not a JSON object" in complaint(tmp_path)
    file.write_text(json.dumps({"model_type": "gpt2"}))
    assert "'gpt2' is not supported" in complaint(tmp_path)
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 0}))
    assert "num_hidden_layers=0" in complaint(tmp_path)
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": "many"}))
    assert "hidden_size" in complaint(tmp_path)
    for key, value in {
        "head_dim": 0,
        "intermediate_size": 0,
        "hidden_act": "nope",
        "num_key_value_heads": 3,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "rope_parameters": {"rope_type": "nope", "rope_theta": 1e4},
    }.items():
        config = tiny_config("qwen3").to_dict() | {key: value}
        file.write_text(json.dumps(config))
        assert "nope" in (said := complaint(tmp_path)) or key in said or "quantized" in said


def test_a_run_stands_for_its_newest_checkpoint(tmp_path, capsys):
    step = tmp_path / "run" / "checkpoints" / "step_000002"
    tiny_config("qwen3").save_pretrained(step)
    manifest = {"step": 2, "serial": 1, "files": {}, "validation": {}}
    (step / "manifest.json").write_text(json.dumps({"checkpoint": manifest}))
    code, out, _ = plan_command(capsys, tmp_path / "run", "--gpu-memory", 80)
    assert code == 0 and "Layout:" in out


def test_a_reference_that_is_planned_is_asked_for(folder, capsys):
    code, out, _ = plan_command(capsys, folder(tiny_config("qwen3")), "--gpu-memory", 80, "--reference")
    assert code == 0 and "algorithm.kl_loss_coef=0.001" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own memory is taken")
def test_memory_has_to_be_given_without_a_gpu(folder, capsys):
    code, _, err = plan_command(capsys, folder(tiny_config("llama")))
    assert code == 2 and "--gpu-memory is missing" in err
