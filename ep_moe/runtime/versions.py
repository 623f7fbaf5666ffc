"""Versions of libraries with which this project's tests ran. `constraints-*.txt` pin the first of each list.

Other versions may work. `ep-moe doctor` reports an installed version that was not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

ON_GPUS: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.11.0",),
    "triton": ("3.6.0",),
    "transformers": ("5.24.0", "5.17.0"),
    "flashinfer-python": ("0.7.2.post1",),
}
ON_CPU: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.13.0",),
    "triton": ("3.6.0",),
    "transformers": ("5.24.0",),
}
# Only some of the tests ran: those of CI's second leg, or of tools/compatibility.py. With Triton 3.7.1 and 3.9.0 only
# those of waiting loops and launches.
IN_PART: Mapping[str, tuple[str, ...]] = {"torch": ("2.14.1", "2.11.0"), "triton": ("3.7.1", "3.8.0", "3.9.0")}
# Minor versions of Triton whose launcher takes arguments as `runtime.launch_cache` passes them, by their sources.
# tests/unit/runtime/test_launch_cache.py checks the installed version.
LAUNCHERS = ("3.6", "3.7", "3.8", "3.9")


def installed(package: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def how_run(package: str, found: str | None) -> str:
    """Say how a version of a package was tested, or which versions were.

    Args:
        package: Name of a distribution.
        found: Its version, None if it is not installed.

    Returns:
        "on GPUs", "on CPU", both, "on CPU in part", or "not run" with the versions that were; "" for a package that is
        in no list.
    """
    of_places = {"on GPUs": ON_GPUS, "on CPU": ON_CPU, "on CPU in part": IN_PART}
    lists = {where: known.get(package, ()) for where, known in of_places.items()}
    number = found and release(found)
    places = [where for where, versions in lists.items() if number in versions]
    if places or not any(lists.values()):
        return " and ".join(places)
    were = "; ".join(f"{', '.join(versions)} {where}" for where, versions in lists.items() if versions)
    return f"not run; run were {were}" if found else f"run were {were}"


def launcher_known(triton: str) -> bool:
    """Return whether a version of Triton is one of `LAUNCHERS`."""
    return ".".join(triton.split(".")[:2]) in LAUNCHERS


def release(version: str) -> str:
    """Return a version without its build: "2.13.0" for "2.13.0+cpu"."""
    return version.partition("+")[0]
