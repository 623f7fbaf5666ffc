"""Test how CUDA kernels get their arguments. Nothing is compiled."""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p, string_at

from ep_moe.runtime.nvrtc import Arguments


class Map:
    """A stand-in for a tensor map at an address."""

    def __init__(self, at: int) -> None:
        self.at = at

    def getPtr(self) -> int:  # noqa: N802 (the driver's name)
        return self.at


def test_arguments_lie_where_the_driver_looks():
    given = [
        (Map(512), None), (3, c_int), ((1 << 63) + 5, c_void_p), (-1.5, c_float), (Map(1024), None),
        (-(1 << 31), c_int), (0, c_void_p), (0.0, c_float),
    ]  # fmt: skip
    arguments = Arguments(given)
    places = (c_void_p * len(given)).from_address(arguments.address)
    read = {c_int: lambda at: c_int.from_address(at).value, c_float: lambda at: c_float.from_address(at).value}
    read |= {c_void_p: lambda at: int.from_bytes(string_at(at, 8), "little"), None: int}
    expected = [value.at if kind is None else value for value, kind in given]
    assert [read[kind](at) for (_, kind), at in zip(given, places, strict=True)] == expected
    ends = [at + (4 if kind in (c_int, c_float) else 8) for (_, kind), at in zip(given, places, strict=True) if kind]
    assert len(set(ends)) == len(ends)
