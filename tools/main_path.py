"""Count what a reader of one call goes through: the files and functions of `ep_moe` from `MoELayer.forward` on, and how
deep they nest. `python tools/main_path.py` prints them, and fails above the limits.

A profiler follows a third call without gradients (the first ones compare ranks and make buffers) on the CPU, with
`allgather` and `reference`. The collective that sends rows stands for the first kernel of a GPU's transport.
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
SENT = "gather_rows"  # where the rows of a call set out
GOAL = {"files": 20, "frames": 15}  # until then
LIMIT = {"files": 20, "frames": 11, "files of the whole call": 27}  # what was counted last, and is not to grow


def traced(call: Callable[[], Any]) -> list[tuple[int, str, str]]:
    """Follow a call.

    Args:
        call: What is called.

    Returns:
        Depth among functions of `ep_moe`, file and name of each one that is entered, in order, each once.
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
