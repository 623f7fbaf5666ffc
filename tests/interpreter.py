"""Triton's interpreter, in which kernels run without a GPU, is tried before tests go by it: NumPy 2.4 breaks that of
Triton 3.6, and Triton 3.9's own takes no mask that was joined from two."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest
import torch


def interpreter_problem() -> str | None:
    """Why kernels cannot run here, None if they can: on a GPU, or in the interpreter, which is switched on."""
    if torch.cuda.is_available():
        return None
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        return "kernels may be imported for Triton's compiler already; set TRITON_INTERPRET=1, or run this file alone"
    os.environ["TRITON_INTERPRET"] = "1"  # read as kernels are imported
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    probe = importlib.import_module("tests.interpreter_triton").copy
    given, out = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    try:
        probe[(1,)](given, out, 3, SIZE=4)
    except triton.runtime.errors.InterpreterError as error:
        return f"the interpreter of Triton {triton.__version__} fails with NumPy {np.__version__}: {error}"
    assert out.tolist() == [0, 1, 2, 0]
    return None
