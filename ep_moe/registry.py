"""Names of backends and import strings of their classes. Layers and the selection of backends import no backend file.

A third party registers an entry point in the group `ep_moe.dispatchers`, `ep_moe.experts` or `ep_moe.fused`, of the
same form. A fault of such a plug-in is the reason why it cannot run. Other backends stay usable.
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

# kernels: the first that can serve a layer is chosen
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

# whose library `pip install ep-moe[gpu]` on a machine with CUDA does not bring
BUILT_APART = frozenset({"deepep", "deepep_static", "pplx"})

# words that `all2all=` and `experts=` take beside names
_RESERVED = {"auto": "the choice of the best", "inside": "the transport of fused kernels"}

# the class that a backend of a kind extends
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
        "module:Class" by name, plug-ins last.
    """
    return _BUILT_IN[kind] | _plugins(kind)


def built_in(kind: Kind) -> list[str]:
    """List the backends that this package brings.

    Args:
        kind: "dispatchers", "experts" or "fused".

    Returns:
        Their names.
    """
    return list(_BUILT_IN[kind])


def is_plugin(kind: Kind, name: str) -> bool:
    """Say whether another package registered a backend.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        Whether it is none of this package.
    """
    return name not in _BUILT_IN[kind]


@functools.cache
def _plugins(kind: Kind) -> dict[str, str]:
    """Entry points of other packages. Kept, because looking reads the metadata of everything installed."""
    found: dict[str, str] = {}
    taken = _RESERVED | _BUILT_IN[kind]
    if kind != "dispatchers":  # `experts=` names both
        taken |= _BUILT_IN["experts"] | _BUILT_IN["fused"] | (_plugins("experts") if kind == "fused" else {})
    try:
        points = list(entry_points(group=f"ep_moe.{kind}"))
    except Exception as error:  # the metadata of any package may be broken
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
    """Check that a backend is known.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Raises:
        ConfigError: it is unknown; lists the known names.
    """
    if name not in targets(kind):
        hint = did_you_mean(name, targets(kind))
        raise ConfigError(f"no backend among {kind} is named {name!r}{hint}; there are {', '.join(targets(kind))}")


def load(kind: Kind, name: str) -> Any:
    """Import the class of a backend: its file, not the libraries it drives.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        The class.

    Raises:
        ConfigError: the name is unknown.
        BackendUnavailable: the class does not import, or is none that can be a backend.
    """
    check(kind, name)
    target = targets(kind)[name]
    try:
        backend = _named(target)
        problem = _class_problem(backend, _named(_BASES[kind]))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a library that is half there raises what it likes, SystemExit too
        raise BackendUnavailable(f"{target} does not import: {in_one_line(error)}") from error
    if problem is not None:
        raise BackendUnavailable(f"{target} {problem}")
    return backend


def _named(target: str) -> Any:
    module, _, attribute = target.partition("[")[0].strip().partition(":")  # behind "[" are extras
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def _class_problem(backend: Any, base: Any) -> str | None:
    """None, or why a class is no backend of a kind."""
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
    """Write an exception as one line.

    Args:
        error: Any.

    Returns:
        Its class and text.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def unsupported_reason(kind: Kind, name: str) -> str | None:
    """Say why a backend cannot run in this installation.

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
    return asked(kind, name, backend.available)


def asked(kind: Kind, name: str, ask: Callable[[], Any]) -> str | None:
    """Ask a backend, of which a plug-in may raise.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.
        ask: Gives None or a reason why not.

    Returns:
        None or the reason. That a plug-in raises, or answers anything else, is a reason too.
    """
    try:
        reason = ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        if not is_plugin(kind, name):
            raise  # a bug of our own
        kind_of, _, text = in_one_line(error).partition(": ")
        return f"it raised {kind_of} when it was asked whether it can run: {text}"
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    return f"it answered {reason!r} when it was asked whether it can run: None or the reason why not is expected"


def without_flashinfer() -> str | None:
    """Say whether FlashInfer is missing, which many backends drive.

    Returns:
        None where it is installed, else a sentence for `available()`.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; pip install ep-moe[gpu]"
    return None


def available(kind: Kind, name: str) -> bool:
    """Say whether a backend can run in this installation.

    Args:
        kind: "dispatchers", "experts" or "fused".
        name: The backend's name.

    Returns:
        Whether `unsupported_reason` is None.
    """
    return unsupported_reason(kind, name) is None


if not TYPE_CHECKING:  # checkers know the new names alone
    __getattr__ = renamed_in(__name__, {"why_not": ("unsupported_reason", unsupported_reason)})
