"""Count what a reader of one call must read: the files and functions of `ep_moe` from `MoELayer.forward` on, and their
nesting.

`python tools/main_path.py` prints them, and fails above the limits.

A profiler follows a third call without gradients on the CPU, with `allgather` and `reference`. The first two calls
compare ranks and allocate buffers. The collective that sends rows stands for the first kernel of a GPU transport.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ep_moe
from ep_moe import EPContext, MoEConfig, MoELayer

ROOT = str(Path(ep_moe.__file__).parent)
SENT = "gather_rows"  # the collective that sends rows
GOAL = {"files": 20, "frames": 15}  # up to this collective
LIMIT = {"files": 20, "frames": 11, "files of the whole call": 27}  # the last count, which must not grow


def traced(call: Callable[[], Any]) -> list[tuple[int, str, str]]:
    """Profile a call.

    Args:
        call: What to call.

    Returns:
        Nesting depth within `ep_moe`, file and name of each entered function, once each, in order.
    """
    found: dict[tuple[str, str], int] = {}
    depth = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
            return
        depth += 1 if event == "call" else -1
        if event == "call":
            found.setdefault((code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname), depth)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [(depth, *key) for key, depth in found.items()]


def main() -> int:
    """Print the path and compare it with the limits.

    Returns:
        0, or 1 above a limit.
    """
    config = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
    with EPContext.local(device="cpu") as context, torch.no_grad():
        layer = MoELayer(config, context, all2all="allgather", experts="reference")
        x = torch.randn(3, 16, device=context.device)
        for _ in range(2):
            layer(x)
        path = traced(lambda: layer.forward(x))
    for depth, file, name in path:
        print(f"{'  ' * (depth - 1)}{name}  ({file})")
    before = path[: [name for _, _, name in path].index(SENT) + 1]
    counted = {
        "files": len({file for _, file, _ in before}),
        "frames": max(depth for depth, _, _ in before),
        "files of the whole call": len({file for _, file, _ in path}),
    }
    print(f"\nuntil {SENT}: {', '.join(sorted({file for _, file, _ in before}))}")
    for name, count in counted.items():
        print(f"{name}: {count}, limit {LIMIT[name]}, goal {GOAL.get(name, 'none')}")
    return int(any(counted[name] > LIMIT[name] for name in counted))


if __name__ == "__main__":
    sys.exit(main())
