"""Rule 1 of the architecture: algorithms, rewards and data know nothing of devices, clusters or engines."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import verl

FORBIDDEN = ("torch.distributed", "ray", "vllm", "sglang", "megatron")
PACKAGE = Path(verl.__file__).parent
FILES = sorted(path for part in ("algorithms", "rewards", "data") for path in (PACKAGE / part).rglob("*.py"))


def mentioned_modules(source):
    """Dotted names a file imports, in any position, or reaches through another module (`torch.distributed.x`)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def forbidden_in(source):
    return sorted({bad for name in mentioned_modules(source) for bad in FORBIDDEN if f"{name}.".startswith(f"{bad}.")})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_forbidden_import(path):
    assert forbidden_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ray", ["ray"]),
        ("import torch.distributed as dist", ["torch.distributed"]),
        ("from torch import distributed", ["torch.distributed"]),
        ("from torch.distributed.tensor import DTensor", ["torch.distributed"]),
        ("import torch\ntorch.distributed.barrier()", ["torch.distributed"]),
        ("def f():\n    from vllm import LLM", ["vllm"]),
        ("import importlib\nimportlib.import_module('megatron.core')", ["megatron"]),
        ("import sglang.srt, ray", ["ray", "sglang"]),
        ("import rayon\nfrom torch import distributions\nimport torch", []),
    ],
)
def test_the_check_sees_what_it_should(source, found):
    assert forbidden_in(source) == found


def test_importing_the_algorithms_loads_no_engine():
    # What the files above import in turn must not bring one in either (torch imports its own torch.distributed).
    code = "import sys, verl.algorithms.select; print([m for m in ('ray', 'vllm', 'sglang', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
