"""Test modules with kernels where Triton is missing: they import, and a launch names what is missing."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from ep_moe.errors import BackendUnavailable
from ep_moe.runtime.triton_compat import Missing

WITHOUT = """
    import pkgutil, importlib, sys
    sys.modules["triton"] = None  # as if it was not installed
    import ep_moe
    for module in pkgutil.walk_packages(ep_moe.__path__, "ep_moe."):
        if "__main__" in module.name or module.name.startswith("ep_moe.integrations"):
            continue
        importlib.import_module(module.name)
    import torch
    from ep_moe.errors import BackendUnavailable
    from ep_moe.experts.hopper import gemm_skinny, gemm_streaming, route_sort
    from ep_moe.quant import fp8
    from ep_moe.runtime import triton_compat
    from ep_moe.runtime.waiting import Waiting
    assert not triton_compat.HAS_GLUON
    assert isinstance(route_sort._place_pairs, Waiting)
    ids = torch.zeros(4, 2, dtype=torch.int32)
    for launch in (
        lambda: fp8.launch_round_by(torch.ones(4), 1.0, torch.empty(4)),
        lambda: route_sort._place_pairs[(1,)](1),
        lambda: route_sort.copy_rows(torch.ones(4, 8), ids, torch.ones(4, 8)),
        lambda: gemm_streaming.stream[(1,)](1),
    ):
        try:
            launch()
        except BackendUnavailable as error:
            assert "needs " in str(error) and "install the triton" in str(error), error
        else:
            raise AssertionError("launched")
    assert not fp8.round_blocks(torch.zeros(2, 128))[0].float().any()  # the torch form serves
"""


def test_everything_imports_and_a_launch_names_what_is_missing():
    subprocess.run([sys.executable, "-c", textwrap.dedent(WITHOUT)], check=True)


def test_placeholders_are_named_decorated_with_and_never_launched():
    tl = Missing("Triton", ImportError("No module named 'triton'"))

    @tl.jit(do_not_specialize=["size"])
    def plain(x, size: tl.constexpr):
        return tl.load(x)

    @tl.jit
    def other(x):
        return x

    for kernel in (plain, other):
        with pytest.raises(BackendUnavailable, match=r"needs Triton, which is not there \(No module named 'triton'\)"):
            kernel[(1,)](3)
    with pytest.raises(BackendUnavailable, match="kernel 'other'"):
        other[(1,)]
    assert not hasattr(tl, "__wrapped__")
