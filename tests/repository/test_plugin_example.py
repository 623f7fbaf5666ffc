"""examples/plugin, installed into a folder of its own, works there like any package's backends."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

from ep_moe import Activation, EPContext, ExpertMap, MoEConfig, MoELayer, registry
from ep_moe.all2all.capabilities import DispatcherCapabilities
from ep_moe.experts.base import ExpertsCapabilities
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.testing import check_dispatcher, check_experts, distributed

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"
FILES = {name: PLUGIN / "example_backends" / f"{name}.py" for name in ("transport", "kernel")}
NAMED = {"all2all": "gather_sum", "experts": "expert_loop"}
CONFIG = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)
MAPS = {"linear": ExpertMap.linear(4, 2), "a rank without experts": ExpertMap.from_ranks([[0, 1, 2, 3], []], 4)}


# --- the installed package --------------------------------------------------------------------------------------------


@pytest.mark.skipif(TorchrunEnv.present(), reason="starts its own ranks")
# not importlib.util.find_spec: asked for pip, setuptools would leave distutils of the standard library in this process
@pytest.mark.skipif(not all(map(PathFinder.find_spec, ("pip", "setuptools"))), reason="needs pip and setuptools")
def test_the_installed_package_serves_a_layer_and_passes_the_contracts(tmp_path):
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed, source]
    _run([sys.executable, "-m", "pip", "install", *map(str, options)], tmp_path)
    code = f"from {__name__} import in_a_fresh_process; in_a_fresh_process({str(installed)!r})"
    path = os.pathsep.join([str(installed), str(ROOT)])
    _run([sys.executable, "-c", code], tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def _run(command: list[str], folder: Path, **variables: str) -> None:
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def in_a_fresh_process(installed: str) -> None:
    """Check the kernel while the ranks of the transport's checks wait for each other."""
    kernel = registry.load("experts", NAMED["experts"])
    assert Path(sys.modules[kernel.__module__].__file__).is_relative_to(installed)
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_local_ranks, f"{__name__}:on_a_rank", 2)
        assert check_experts(kernel, device="cpu", activations=[Activation.SWIGLU], hidden=128, inner=128) == len(
            kernel.capabilities.dtypes
        )
        ranks.result()


def on_a_rank() -> None:
    with EPContext.from_groups(device="cpu", deadline_s=20) as context:
        table = {(row.all2all, row.experts): row for row in MoELayer(CONFIG, context).explain()}
        plugins = table[NAMED["all2all"], NAMED["experts"]]
        assert plugins.status == "possible", plugins
        assert "registered by another package" in plugins.reason
        for name, expert_map in MAPS.items():
            y, gradient = _trained(context, expert_map, **NAMED)
            wanted, of_wanted = _trained(context, expert_map, all2all="allgather", experts="reference")
            torch.testing.assert_close(y, wanted, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(gradient, of_wanted, msg=lambda text, name=name: f"{name}, gradient: {text}")
    check_dispatcher(registry.load("dispatchers", NAMED["all2all"]), top_ks=(3,), dtypes=(torch.bfloat16,))


def _trained(context: EPContext, expert_map: ExpertMap, **backends: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's output, and the gradients of all its parameters in one row."""
    torch.manual_seed(0)
    layer = MoELayer(CONFIG, context, expert_map=expert_map, **backends)
    assert (layer.choice.all2all, layer.choice.experts) == (backends["all2all"], backends["experts"])
    y = layer(torch.randn(5 + context.layout.rank, CONFIG.hidden_size))
    y.square().sum().backward()
    return y.detach(), torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])


# --- faults that the contracts must find ------------------------------------------------------------------------------


def _with_fault(name: str, right: str, wrong: str) -> type:
    """Return the backend class of a copy of its file in which `right` is replaced by `wrong`."""
    text = FILES[name].read_text()
    assert text.count(right) == 1, right
    space = {"__name__": f"faulty_{name}"}
    exec(compile(text.replace(right, wrong), str(FILES[name]), "exec"), space)
    return space[{"transport": "GatherSumDispatcher", "kernel": "ExpertLoop"}[name]]


@distributed(2)
@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        (".float().sum(0)", ".float()[1:].sum(0)", "uneven and empty ranks"),  # combine omits rank 0
        ("if problem is not None:", "if False:", "rank 0's problem was not raised"),
    ],
    ids=["a rank is forgotten", "a problem is forgotten"],
)
def test_a_fault_of_the_transport_is_found(right, wrong, sentence, world_size):
    with pytest.raises(AssertionError, match=sentence):
        check_dispatcher(_with_fault("transport", right, wrong), top_ks=(2,), dtypes=(torch.bfloat16,), deadline_s=10)


def test_a_fault_of_the_kernel_is_found():
    faulty = _with_fault("kernel", "received.weights[row, column]", "received.weights[row, 0]")
    with pytest.raises(AssertionError, match="times what rounding may cause"):
        check_experts(faulty, device="cpu", activations=[Activation.SWIGLU])


# --- the guide --------------------------------------------------------------------------------------------------------


GUIDE = (ROOT / "docs" / "how-to" / "backend.md").read_text()
CONTRACT = (ROOT / "docs" / "reference" / "backend_contract.md").read_text()


@pytest.mark.parametrize("name", FILES)
def test_the_guide_shows_the_file(name):
    assert f"```python\n{FILES[name].read_text()}```" in GUIDE


def test_the_contract_says_the_defaults_of_capabilities():
    kernel, transport = ExpertsCapabilities, DispatcherCapabilities
    assert set(kernel.schemes) == {"none"}
    assert '| `schemes` | `{"none"}` |' in CONTRACT
    assert f"| `alignment_bytes` of a kernel | {kernel.alignment_bytes} |" in CONTRACT
    assert f"| `alignment_bytes` of a transport | {transport.alignment_bytes} |" in CONTRACT
    assert f"| `scale_alignment_bytes` of a transport | {transport.scale_alignment_bytes} |" in CONTRACT
    said = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", CONTRACT, re.MULTILINE))))
    for field in [*dataclasses.fields(kernel), *dataclasses.fields(transport)]:
        assert field.default in (False, None, frozenset()) or field.name in said, field.name
