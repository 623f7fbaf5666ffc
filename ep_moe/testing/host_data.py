"""Where the contracts make their data: on the host, from generators that any rank has, whatever the default device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Found = TypeVar("Found")


def made_on_the_host(check: Callable[Given, Found]) -> Callable[Given, Found]:
    @functools.wraps(check)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        # a mode costs every torch call a few microseconds of Python
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            return check(*args, **kwargs)

    return checked
