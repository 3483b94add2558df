"""The package as users get it: import cost, declared dependencies, wheel contents, and commands that exist."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import verl

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def python(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def pins(name: str, version: str) -> dict[str, Requirement]:
    """Requirements of a file that apply to a Python version, by name."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    found = [Requirement(line) for line in lines]
    return {r.name: r for r in found if r.marker is None or r.marker.evaluate({"python_version": version})}


def test_import_is_quick_and_loads_no_torch():
    script = "import time; t = time.perf_counter(); import verl; print(time.perf_counter() - t)"
    assert min(float(python(script)) for _ in range(3)) < 0.5
    heavy = "[m for m in ('torch', 'transformers', 'numpy', 'ray') if m in sys.modules]"
    assert python(f"import sys, verl; print({heavy})") == "[]"


def test_version_prints():
    assert python("import verl; print(verl.__version__)") == verl.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", verl.__version__)
    command = Path(sys.executable).with_name("verl")
    assert subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.strip() == verl.__version__


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cuda.txt"])
@pytest.mark.parametrize("version", PYTHONS)
def test_requirements_pin_every_dependency_within_its_range(file, version):
    pinned = pins(file, version)
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        (specifier,) = pinned[wanted.name].specifier
        assert specifier.operator == "==" and wanted.specifier.contains(specifier.version), (
            f"{wanted} against {pinned[wanted.name]}"
        )


def test_every_import_is_declared():
    """Third-party modules that the package imports are dependencies, or belong to an extra."""
    distributions = {
        "hydra": "hydra-core",
        "yaml": "pyyaml",
        "PIL": "pillow",
        "megatron": "megatron-core",
        "huggingface_hub": "huggingface-hub",
    }
    extras = [text for group in PROJECT["optional-dependencies"].values() for text in group]
    declared = {Requirement(text).name for text in [*PROJECT["dependencies"], *extras]}
    imported = set()
    for path in Path(verl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.split(".")[0] for name in names}
    foreign = imported - set(sys.stdlib_module_names) - {"verl"}
    assert {"torch", "transformers", "yaml"} <= foreign
    assert {distributions.get(name, name) for name in foreign} - declared == set()


def test_wheel_holds_every_module_and_preset(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "verl", source / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("verl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for suffix in ("py", "yaml") for path in (ROOT / "verl").rglob(f"*.{suffix}")}
    assert expected - names == set()
    assert any(name.startswith("verl/config/presets/") and name.endswith(".yaml") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def shell_lines(page: Path) -> list[str]:
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_readme_shows_the_two_commands():
    lines = shell_lines(ROOT / "README.md")
    for command in ("make quickstart", "make test"):
        assert any(line.startswith(command) for line in lines), f"README.md shows no `{command}`"


def test_commands_in_the_documentation_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    helped = subprocess.run([sys.executable, "-m", "verl.cli", "--help"], capture_output=True, text=True, check=True).stdout
    verbs = set(re.findall(r"^ +([a-z]+) ", helped, flags=re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    wrong = []
    for page in pages:
        for line in shell_lines(page):
            checks = {
                r"\bmake ([a-z-]+)": lambda target: target in targets,
                r"^verl ([a-z]+)": lambda verb: verb in verbs,
                r"\bpython3? -m (verl[\w.]*)": lambda module: find_spec(module) is not None,
                r"\b(?:python3?|bash) ((?:examples|benchmarks|verl|scripts)/\S+\.(?:py|sh))": lambda path: (
                    ROOT / path
                ).is_file(),
            }
            wrong += [
                f"{page.name}: {line}"
                for pattern, exists in checks.items()
                for found in re.findall(pattern, line)
                if not exists(found)
            ]
    assert wrong == []


def test_install_script_refuses_an_old_python_in_one_line(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    command = ["bash", ROOT / "scripts" / "install.sh"]
    for interpreter, words in (
        (old, "is Python 3.8.1; verl needs Python 3.10 or newer"),
        ("no-such-python", "no no-such-python on this machine"),
    ):
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(interpreter), "VENV": str(tmp_path / "venv")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()
