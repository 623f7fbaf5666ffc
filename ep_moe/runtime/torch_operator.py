"""Decorators that make kernel functions torch operators in compiled graphs, and plain calls elsewhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from ep_moe.runtime.launch_cache import Launch, launch_directly

Given = ParamSpec("Given")


def operator(name: str) -> Callable[[Callable[Given, None]], Callable[Given, None]]:
    """Decorate a function that writes only its arguments `out` and `workspace`.

    In a compiled graph a call is one node, `torch.ops.ep_moe.<name>`. An eager call bypasses torch's dispatcher, which
    costs the host about 20 us per call for operators written in Python. Autograd records neither.
    """

    def wrap(function: Callable[Given, None]) -> Callable[Given, None]:
        made = torch.library.custom_op(f"ep_moe::{name}", function, mutates_args=("out", "workspace"))
        made.register_fake(lambda *args, **kwargs: None)

        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> None:
            if torch.compiler.is_compiling():
                getattr(torch.ops.ep_moe, name)(*args, **kwargs)
                return
            with torch.no_grad():
                function(*args, **kwargs)

        return call

    return wrap


def launching_operator(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate as `operator` a function whose first parameter is a `Launch`.

    Callers may pass it as the keyword `launch`. The operator in compiled graphs does not have this parameter.
    """

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        def plain(*args: Any) -> None:
            function(launch_directly, *args)

        signature = inspect.signature(function, eval_str=True)
        plain.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        made = operator(name)(plain)

        def call(*args: Any, launch: Launch = launch_directly) -> None:
            if torch.compiler.is_compiling():
                made(*args)
                return
            with torch.no_grad():
                function(launch, *args)

        call.__doc__ = function.__doc__
        return call

    return wrap
