"""Workspaces of transports whose library has one call in flight in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ep_moe.errors import InputError
from ep_moe.types import capturing


@dataclass(eq=False)
class Lane:
    """One workspace of the library, and whether a call is under way in it."""

    library: Any
    busy: bool = False


class Lanes:
    """As many workspaces as calls were ever in flight at once, made when they are needed. All ranks make the same
    calls, and so they run out of lanes together and make another together."""

    def __init__(self, name: str, make: Callable[[torch.device], Any]) -> None:
        self._name, self._make = name, make
        self.made: list[Lane] = []

    def take(self, device: torch.device) -> Lane:
        """A lane for one call, from dispatch to combine. Collective where one is made."""
        lane = next((lane for lane in self.made if not lane.busy), None)
        if lane is None:
            if capturing(device):
                raise InputError(
                    f"{self._name} makes its buffers in the first call: run the layer once before a capture"
                )
            lane = Lane(self._make(device))
            self.made.append(lane)
        return lane

    def destroy(self) -> None:
        for lane in self.made:
            lane.library.destroy()
        self.made.clear()
