"""Which modules import backends, and the libraries that backends drive.

The registry's table says which files are backends, so a new backend needs no entry here.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ep_moe import registry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ep_moe"
KINDS = ("dispatchers", "experts", "fused")
BACKENDS = {target.partition(":")[0] for kind in KINDS for target in registry._BUILT_IN[kind].values()}
# modules that may use libraries of kernels, of transports and of metrics
DRIVERS = ("ep_moe.all2all", "ep_moe.experts", "ep_moe.bench", "ep_moe.metrics")
CHOOSERS = ("ep_moe.layer", "ep_moe.layer_tools", "ep_moe.layer_parts", "ep_moe.execution", "ep_moe.selection", "ep_moe.context", "ep_moe.cli.app", "ep_moe.integrations")  # fmt: skip  # noqa: E501
# besides pyproject's dependencies: the command's entry module, what torch and transformers install, the driver, PEFT,
# and pytest for `ep_moe.testing`
OWN = {"ep_moe_command", "torch", "triton", "cuda", "nvidia", "huggingface_hub", "peft", "pytest"}


def imported(text: str) -> Iterator[str]:
    """Yield the modules and names that a source file imports at any depth."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def declared() -> set[str]:
    """Return the dependencies by module name, without those for GPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [re.match(r"[\w-]+", text).group() for text in (*project["dependencies"], *extras["hf"], *extras["plot"])]
    return {name.replace("-", "_") for name in names}


def problems(module: str, text: str) -> list[str]:
    found, known = set(), {"ep_moe", *declared(), *OWN, *sys.stdlib_module_names}
    for name in imported(text):
        if within(module, CHOOSERS) and name in BACKENDS:
            found.add(f"{module} imports the backend {name}; load it by its name, with ep_moe.registry.load")
        if name.partition(".")[0] not in known and not within(module, DRIVERS):
            found.add(f"{module} imports {name}; only files below {', '.join(DRIVERS)} may")
    return sorted(found)


MODULES = {
    ".".join(("ep_moe", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_backends_and_their_libraries_are_imported_where_they_may_be() -> None:
    assert len(BACKENDS) > 10
    assert set(MODULES) >= BACKENDS
    found = [line for module, path in MODULES.items() for line in problems(module, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "text", "word"),
    [
        ("ep_moe.layer", "from ep_moe.all2all import pplx", "the backend ep_moe.all2all.pplx"),
        ("ep_moe.selection.resolve", "def f():\n    import ep_moe.experts.reference", "the backend ep_moe.experts"),
        ("ep_moe.execution.graphs", "from ep_moe.experts.hopper.experts import Bf16TritonExperts", "the backend"),
        ("ep_moe.layer", "import flashinfer.comm", "imports flashinfer.comm"),
        ("ep_moe.weights.slots", "def f():\n    from deep_ep import Buffer", "imports deep_ep"),
    ],
)
def test_what_may_not_be_is_found(module: str, text: str, word: str) -> None:
    assert any(word in line for line in problems(module, text))


def test_what_may_be_is_not() -> None:
    assert not problems("ep_moe.all2all.pplx", "import pplx_kernels")
    assert not problems("ep_moe.testing.x", "import ep_moe.experts.reference\nimport numpy, tqdm, transformers, triton")
