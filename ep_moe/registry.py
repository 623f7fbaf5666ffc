"""The registry of backends: names, and import strings of their classes.

A backend's module is imported when the backend is used. Layers and the selection of backends import none.

Other packages register backends as entry points in the groups `ep_moe.dispatchers`, `ep_moe.experts` and
`ep_moe.fused`, with import strings of the same form. If such a plug-in fails, its error becomes the reason why it
cannot run, and other backends stay usable.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from ep_moe.checks import did_you_mean
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.renamed import renamed_in

Kind = Literal["dispatchers", "experts", "fused"]

# "experts" is in order of preference: `experts="auto"` takes the first kernel that can run a layer, no fused kernel
_BUILT_IN: dict[Kind, dict[str, str]] = {
    "dispatchers": {
        "local": "ep_moe.all2all.torch_collectives:LocalDispatcher",
        "allgather": "ep_moe.all2all.torch_collectives:AllGatherDispatcher",
        "deepep": "ep_moe.all2all.deepep:DeepEPDispatcher",
        "deepep_static": "ep_moe.all2all.deepep:DeepEPStaticDispatcher",
        "flashinfer_nvlink": "ep_moe.all2all.flashinfer_nvlink:FlashInferNVLinkDispatcher",
        "hierarchical": "ep_moe.all2all.hierarchical:HierarchicalDispatcher",
        "hierarchical_nvlink": "ep_moe.all2all.hierarchical_static:HierarchicalNVLinkDispatcher",
        "hierarchical_static": "ep_moe.all2all.hierarchical_static:HierarchicalStaticDispatcher",
        "nvlink_p2p": "ep_moe.all2all.nvlink_p2p.dispatcher:NVLinkP2PDispatcher",
        "pplx": "ep_moe.all2all.pplx:PplxDispatcher",
        "torch_a2a": "ep_moe.all2all.torch_collectives:TorchAll2AllDispatcher",
    },
    "experts": {
        "bf16_triton": "ep_moe.experts.hopper.experts:Bf16TritonExperts",
        "fp8_tensor_triton": "ep_moe.experts.hopper.experts_fp8:Fp8TensorTritonExperts",
        "fp8_channel_triton": "ep_moe.experts.hopper.experts_fp8:Fp8ChannelTritonExperts",
        "fp8_block_triton": "ep_moe.experts.hopper.experts_fp8:Fp8BlockTritonExperts",
        "fp8_dynamic_triton": "ep_moe.experts.hopper.experts_fp8:Fp8DynamicTritonExperts",
        "w4a16_triton": "ep_moe.experts.hopper.experts_4bit:W4A16TritonExperts",
        "w4a8_triton": "ep_moe.experts.hopper.experts_4bit:W4A8TritonExperts",
        "flashinfer_cutlass": "ep_moe.experts.flashinfer.cutlass:FlashInferCutlassExperts",
        "flashinfer_cutedsl": "ep_moe.experts.flashinfer.cutedsl:FlashInferCuteDslExperts",
        "flashinfer_trtllm": "ep_moe.experts.flashinfer.trtllm:FlashInferTrtllmExperts",
        "reference": "ep_moe.experts.reference:ReferenceExperts",
    },
    "fused": {
        "flashinfer_mega_bf16": "ep_moe.experts.fused.flashinfer_mega:FlashInferMegaBf16",
        "flashinfer_mega_fp8": "ep_moe.experts.fused.flashinfer_mega:FlashInferMegaFp8",
        "flashinfer_trtllm_monolithic": "ep_moe.experts.fused.flashinfer_trtllm:FlashInferTrtllmMonolithic",
    },
}

# transports whose library `pip install ep-moe[gpu]` does not install
BUILT_APART = frozenset({"deepep", "deepep_static", "pplx"})

# values of `all2all=` and `experts=` that are no backend names
_RESERVED = {"auto": "the choice of the best", "inside": "the transport of fused kernels"}

# the base class of each kind of backend
_BASES: dict[Kind, str] = {
    "dispatchers": "ep_moe.all2all.base:Dispatcher",
    "experts": "ep_moe.experts.base:Experts",
    "fused": "ep_moe.experts.fused.base:FusedExperts",
}


def targets(kind: Kind) -> dict[str, str]:
    """List the known backends of a kind.

    Args:
        kind: "dispatchers", "experts" or "fused".

    Returns:
        "module:Class" by name. Plug-ins come last.
    """
    return _BUILT_IN[kind] | _plugins(kind)


def built_in(kind: Kind) -> list[str]:
    """List the backends of this package.

    Args:
        kind: "dispatchers", "experts" or "fused".

    Returns:
        Their names.
    """
    return list(_BUILT_IN[kind])


def is_plugin(kind: Kind, name: str) -> bool:
    """Return whether a backend comes from another package.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        True unless the backend is one of this package.
    """
    return name not in _BUILT_IN[kind]


@functools.cache
def _plugins(kind: Kind) -> dict[str, str]:
    """Return the entry points of other packages. Cached, because the search reads all installed packages' metadata."""
    found: dict[str, str] = {}
    taken = _RESERVED | _BUILT_IN[kind]
    if kind != "dispatchers":  # `experts=` takes names of both expert and fused kernels
        taken |= _BUILT_IN["experts"] | _BUILT_IN["fused"] | (_plugins("experts") if kind == "fused" else {})
    try:
        points = list(entry_points(group=f"ep_moe.{kind}"))
    except Exception as error:  # any installed package may have broken metadata
        warnings.warn(
            f"entry points of group ep_moe.{kind} cannot be read: {in_one_line(error)}", UserWarning, stacklevel=2
        )
        points = []
    for point in points:
        first = (taken | found).get(point.name)
        if first is None:
            found[point.name] = point.value
        elif first != point.value:
            warnings.warn(
                f"entry point {point.name!r} in group ep_moe.{kind} is {point.value}, and {first} has that name; it is "
                f"ignored until its package gives it another name",
                UserWarning,
                stacklevel=2,
            )
    return found


def check(kind: Kind, name: str) -> None:
    """Raise ConfigError unless a backend is known.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Raises:
        ConfigError: the name is unknown. The message lists the known names.
    """
    if name not in targets(kind):
        hint = did_you_mean(name, targets(kind))
        raise ConfigError(f"no backend among {kind} is named {name!r}{hint}; there are {', '.join(targets(kind))}")


def load(kind: Kind, name: str) -> Any:
    """Import and return the class of a backend. The library that it uses is not imported.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        The class.

    Raises:
        ConfigError: the name is unknown.
        BackendUnavailable: the import failed, or the object is no valid backend class of this kind.
    """
    check(kind, name)
    target = targets(kind)[name]
    try:
        backend = _named(target)
        problem = _class_problem(backend, _named(_BASES[kind]))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken installation may raise anything, even SystemExit
        raise BackendUnavailable(f"{target} does not import: {in_one_line(error)}") from error
    if problem is not None:
        raise BackendUnavailable(f"{target} {problem}")
    return backend


def _named(target: str) -> Any:
    module, _, attribute = target.partition("[")[0].strip().partition(":")  # drops an entry point's extras, "[...]"
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def _class_problem(backend: Any, base: Any) -> str | None:
    """Return None, or the reason why an object is no valid backend class. base: the base class of its kind"""
    if not inspect.isclass(backend) or not issubclass(backend, base):
        return f"is no subclass of {base.__module__}.{base.__name__}"
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        return f"does not define {', '.join(missing)}"
    declared = next(hint for kind in base.__mro__ if (hint := inspect.get_annotations(kind).get("capabilities")))
    wanted = declared.removeprefix("ClassVar[").removesuffix("]")
    found = getattr(backend, "capabilities", None)
    extended: Any = next((kind for kind in type(found).__mro__ if kind.__name__ == wanted), None)
    if extended is None:
        return f"has no capabilities: a class attribute that is a {wanted}"
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not name:
        return f"has no name: a class attribute that errors call it by, got {name!r}"
    try:
        extended.check(found)
    except ConfigError as error:
        return f"has capabilities that make no sense: {error}"
    return None


def in_one_line(error: BaseException) -> str:
    """Return an exception's class and message in one line.

    Args:
        error: Any exception.

    Returns:
        "Class: message", or "Class" without a message.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unsupported_reason(kind: Kind, name: str) -> str | None:
    """Return why a backend cannot run in this installation.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        None if it can run, else the reason.

    Raises:
        ConfigError: the name is unknown.
    """
    check(kind, name)
    try:
        backend = load(kind, name)
    except BackendUnavailable as error:
        return str(error)
    return query_unsupported_reason(kind, name, backend.available)


def query_unsupported_reason(kind: Kind, name: str, ask: Callable[[], Any]) -> str | None:
    """Call a backend's method that returns why it cannot run, and check the answer.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.
        ask: The method. It returns None if the backend can run, else the reason.

    Returns:
        None, or the reason. An answer of another type is a reason too, and so is an exception of a plug-in. An
        exception of a backend of this package is raised.
    """
    try:
        reason = ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        if not is_plugin(kind, name):
            raise  # a bug of this package
        kind_of, _, text = in_one_line(error).partition(": ")
        return f"it raised {kind_of} when it was asked whether it can run: {text}"
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    return f"it answered {reason!r} when it was asked whether it can run: None or the reason why not is expected"


def without_flashinfer() -> str | None:
    """Return why backends of FlashInfer cannot run, if it is not installed.

    Returns:
        None if FlashInfer is installed, else a reason that a backend's `available()` can return.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; pip install ep-moe[gpu]"
    return None


def available(kind: Kind, name: str) -> bool:
    """Return whether a backend can run in this installation.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        True if `unsupported_reason` is None.
    """
    return unsupported_reason(kind, name) is None


if not TYPE_CHECKING:  # type checkers see only the new names
    __getattr__ = renamed_in(__name__, {"why_not": ("unsupported_reason", unsupported_reason)})
