"""Test the versions that were run: the list in the package, constraint files, and `ep-moe doctor`'s lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ep_moe.cli import doctor
from ep_moe.cli.app import app
from ep_moe.runtime import versions
from ep_moe.runtime.versions import ON_CPU, ON_GPUS, how_run, launcher_known

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("file", "known"), [("constraints-gpu.txt", ON_GPUS), ("constraints-cpu.txt", ON_CPU)])
def test_constraint_files_pin_the_first_of_each_list(file, known):
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins
    assert {name: known[name][0] for name in pins} == pins


def test_ci_installs_the_triton_that_was_run_on_gpus():
    assert f"triton=={ON_GPUS['triton'][0]}" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    ("package", "found", "said"),
    [
        ("torch", "2.11.0+cu130", "on GPUs"),
        ("torch", "2.13.0+cpu", "on CPU"),
        ("triton", "3.6.0", "on GPUs and on CPU"),
        ("torch", "9.0.0", "not run; run were 2.11.0 on GPUs; 2.13.0 on CPU; 2.14.1"),
        ("torch", "2.14.1+cu130", "on CPU in part"),
        ("triton", "3.8.0", "on CPU in part"),
        ("torch", "2.11.01", "not run; run were"),
        ("triton", None, "run were 3.6.0 on GPUs"),
        ("flashinfer-python", None, "run were 0.7.2.post1 on GPUs"),
        ("numpy", "2.0", ""),
    ],
)
def test_how_a_version_was_run(package, found, said):
    assert how_run(package, found).startswith(said)
    assert bool(said) is bool(how_run(package, found))


def test_launchers():
    assert launcher_known("3.6.0")
    assert launcher_known("3.8.0+git1")
    assert not launcher_known("3.60.0")
    assert not launcher_known("4.0.0")
    run = (*ON_CPU["triton"], *versions.IN_PART["triton"])
    assert {version.rpartition(".")[0] for version in run} == set(versions.LAUNCHERS)


def test_doctor_says_what_was_not_run(monkeypatch):
    found = {"torch": "9.1.0", "triton": "4.0.0", "transformers": "5.24.0"}
    monkeypatch.setattr(doctor, "installed", found.get)
    monkeypatch.setattr(torch, "__version__", found["torch"])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "torch 9.1.0 not run; run were 2.11.0 on GPUs" in text
    assert re.search(r"triton 4\.0\.0 not run; [^_]*its launcher is not known", text)
    assert "transformers 5.24.0 on GPUs and on CPU" in text
    assert "flashinfer-python not installed run were 0.7.2.post1 on GPUs" in text
