"""The wheel holds everything that the package needs, and works without the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from ep_moe.parallel.groups import TorchrunEnv

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="once is enough")


def build(source, out):
    """Build a wheel offline by whichever builder is installed. Return its path."""
    for module, arguments in (
        ("pip", ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", out, source]),
        ("build", ["--wheel", "--no-isolation", "-o", out, source]),
    ):
        # not importlib.util.find_spec: asked for pip, setuptools would leave distutils of the standard library in this
        # process
        if PathFinder.find_spec(module) and PathFinder.find_spec("setuptools"):
            command = [sys.executable, "-m", module, *map(str, arguments)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            assert result.returncode == 0, result.stdout + result.stderr
            return next(out.glob("*.whl"))
    pytest.skip("needs setuptools, and pip or build")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the files that git would keep, so that nothing is written into the checkout."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "ep_moe_command.py"):
        if (ROOT / name).is_file():
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source)
    for name in ("ep_moe", "configs", "docs", "tests", "tools"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    return build(source, root / "out")


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_file_of_the_package(wheel):
    files = {
        str((Path(folder) / name).relative_to(ROOT))
        for folder, _, found in os.walk(ROOT / "ep_moe", followlinks=True)  # ep_moe/configs is a link to configs
        for name in found
        if "__pycache__" not in folder
    }
    packed = {name for name in names(wheel) if not name.split("/")[0].endswith(".dist-info")}
    assert packed == files | {"ep_moe_command.py"}  # no tests and no tools
    assert {"ep_moe/py.typed", "ep_moe/configs/deepseek-v3.toml", "ep_moe/demo/heldout.txt"} <= packed
    assert any(name.startswith("ep_moe/demo/model-") for name in packed)


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_wheel_holds_the_licence(wheel, name):
    assert (ROOT / name).is_file(), f"the checkout has no {name}"
    assert any(f".dist-info/licenses/{name}" in packed for packed in names(wheel))


def test_wheel_declares_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = next(archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert "ep-moe = ep_moe_command:main" in text


USE = """
import sys
from pathlib import Path
import torch
import ep_moe
from ep_moe.config import load_model_config, model_configs
from ep_moe.cli.run import DEMO
from ep_moe.checkpoint.reader import load_layers

assert Path(ep_moe.__file__).is_relative_to(sys.argv[1]), ep_moe.__file__
configs = {name: load_model_config(name) for name in model_configs()}
demo = configs["demo"]
layers = {0: ep_moe.MoELayer(demo.moe, ep_moe.EPContext.local(torch.device("cpu")))}
before = layers[0].expert_weights.w13.clone()
source = load_layers(layers, str(DEMO), demo.family, progress=False)
assert Path(source.folder).is_relative_to(sys.argv[1]), source.folder
assert source.bytes_read > 0
assert not torch.equal(layers[0].expert_weights.w13, before)
print(len(configs), ep_moe.__version__)
"""


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    unpacked = (tmp_path / "unpacked").resolve()
    result = subprocess.run(
        [sys.executable, "-c", USE, str(unpacked)],
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    count, version = result.stdout.split()
    assert int(count) == len(list((ROOT / "configs").glob("*.toml")))
    assert wheel.name.startswith(f"ep_moe-{version}-")
