"""`@distributed(2, 4)` runs a test body on forked ranks or on torchrun's ranks.

`made_on_the_host` makes test data on the CPU. A seeded CPU generator gives the same data on every rank, whatever the
default device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ep_moe.parallel.groups import TorchrunEnv, init_from_torchrun, local_device
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.parallel.rank_group import barrier
from ep_moe.runtime.devices import on_device

DEADLINE_S = 150.0  # for a whole body, which may compile a model on a busy machine


def distributed(
    *world_sizes: int, deadline_s: float = DEADLINE_S, expect_dead: Collection[int] = (), set_device: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a module-level test body on each of the given numbers of ranks.

    Under plain pytest, the ranks are forked gloo processes on this machine's CPU. Under `torchrun -m pytest`, the body
    runs on torchrun's ranks (NCCL if there are GPUs). It is skipped on all ranks if torchrun started another number of
    ranks.

    The body may have a parameter `world_size`. Its arguments must be picklable, because all ranks get those of rank 0.
    So `tmp_path` is one folder, although each of torchrun's ranks runs its own pytest.

    Args:
        world_sizes: Numbers of ranks.
        deadline_s: Seconds for the whole body on forked ranks, which are then killed. torchrun's ranks have 150 s for
            each collective.
        expect_dead: Ranks that the body kills, or lets hang, on purpose. Such a test runs on forked ranks only.
        set_device: Make each rank's GPU the current device, for a body that calls transports or kernels directly.
            Without it, device 0 is current on all ranks, as in a user's script. Layers and contexts work with that.

    Returns:
        A decorator.
    """
    import pytest

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        wants_world = "world_size" in signature.parameters

        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            if wants_world:
                kwargs["world_size"] = world_size
            if TorchrunEnv.present():
                _run_under_torchrun(body, world_size, kwargs, bool(expect_dead), set_device)
            else:
                target = f"{body.__module__}:{body.__qualname__}.body"
                run_local_ranks(target, world_size, kwargs, deadline_s=deadline_s, expect_dead=expect_dead)

        test.body = body  # type: ignore[attr-defined]
        parameters = [p for p in signature.parameters.values() if p.name != "world_size"]
        first = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*parameters, first])  # type: ignore[attr-defined]
        marked: Callable[..., None] = pytest.mark.parametrize("world_size", world_sizes)(pytest.mark.world_size(test))
        return marked

    return decorate


def _run_under_torchrun(
    body: Callable[..., Any], world_size: int, kwargs: dict[str, Any], kills: bool, set_device: bool
) -> None:
    import pytest

    env = TorchrunEnv.read()
    if env.world_size != world_size:
        pytest.skip(f"needs {world_size} ranks, torchrun started {env.world_size}")
    if kills:
        pytest.skip("ends ranks on purpose; run it under plain pytest")
    device = local_device()
    init_from_torchrun(device, deadline_s=DEADLINE_S)
    # take the arguments of the first rank's fixtures, except MonkeyPatch, which undoes changes of its own process
    own = {name: value for name, value in kwargs.items() if isinstance(value, pytest.MonkeyPatch)}
    arguments = [{name: value for name, value in kwargs.items() if name not in own}]
    dist.broadcast_object_list(arguments, device=device)
    kwargs = arguments[0] | own
    with on_device(device) if set_device else nullcontext():
        body(**kwargs)
    barrier(device)


def rank_device() -> torch.device:
    """Return the device on which a test body should create its tensors.

    Returns:
        This rank's GPU under torchrun, else the CPU.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    return local_device()


Given = ParamSpec("Given")
Found = TypeVar("Found")


def made_on_the_host(check: Callable[Given, Found]) -> Callable[Given, Found]:
    @functools.wraps(check)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        # enter the mode only if needed: it adds a few microseconds of Python to every torch call
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            return check(*args, **kwargs)

    return checked
