"""Write docs/reference/backends.md from the capabilities that backend classes declare, and where each was run.

python tools/backends.py > docs/reference/backends.md
"""

from __future__ import annotations

import textwrap

import torch

from ep_moe import registry
from ep_moe.all2all.base import Dispatcher
from ep_moe.experts.base import Experts
from ep_moe.experts.fused.base import FusedExperts
from ep_moe.types import dtype_name

WIDEST = 60  # characters of a cell
SOURCES = (
    "## Where their libraries come from",
    "",
    '- All `flashinfer_*`: `pip install -e ".[gpu]"`; `flashinfer_cutedsl` also `nvidia-cutlass-dsl`.',
    "- `deepep`, `deepep_static`: [DeepEP](https://github.com/deepseek-ai/DeepEP) with its V1 `Buffer` (1.2.x),",
    "  built by its own setup; on one host it needs no NVSHMEM.",
    "- `pplx`: [pplx-kernels](https://github.com/ppl-ai/pplx-kernels), built by its own setup, which asks for",
    "  NVSHMEM. The intranode class that is used here needs none of it.",
)
MISSING = (
    "## What is not here",
    "",
    "- torch's `symm_mem.all_to_all_vdev` and `_2d`: tried with torch 2.11, and left out. The kernel's first block",
    "  writes output offsets over source offsets that other blocks may not have read yet, and a block's share of a",
    "  rank's rows must come out even; answers would be right only as long as blocks start together.",
    "- NCCL-EP (`nccl_ep`): wants NCCL 2.30; the machines of these runs have 2.28.9.",
    "- DeepEP's low-latency and internode kernels (InfiniBand), its 2.x `ElasticBuffer` (NCCL 2.30.4); pplx internode.",
    "",
    "What was not run: [list](results.md#not-run). What is for Blackwell, and how it was checked: "
    "[blackwell.md](blackwell.md).",
)


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def names(dtypes: frozenset[torch.dtype] | None) -> str:
    return "any" if dtypes is None else ", ".join(sorted(map(dtype_name, dtypes)))


def transport(name: str, kind: type[Dispatcher]) -> list[str]:
    can = kind.capabilities
    limits = [f"{can.max_ranks} ranks"] if can.max_ranks else []
    limits += [f"K up to {can.max_top_k}"] if can.max_top_k else []
    limits += ["needs max_tokens"] if can.static and not can.grows else []
    formats = [f"{name} out" for name in sorted(can.dispatch_formats - {"plain"})]
    formats += [f"{name} back" for name in sorted(can.combine_formats - {"plain"})]
    return [
        f"`{name}`", can.layout.value, can.weighting.value, names(can.dtypes), ", ".join(formats),
        *map(yes, (can.dedup, can.cuda_graph, can.host_sync, can.deterministic, can.exact)),
        yes(can.differentiable or can.adjoint),
        ", ".join(limits), kind.tested_machines,
    ]  # fmt: skip


def capability(lowest: tuple[int, int] | None, highest: tuple[int, int] | None) -> str:
    if lowest is None:
        return "any device"
    low, high = (".".join(map(str, bound)) if bound else "" for bound in (lowest, highest))
    return f"compute capability {low}" + (f" to {high}" if high and high != low else "" if high else " or newer")


def fused(name: str, kind: type[FusedExperts]) -> list[str]:
    can = kind.capabilities
    inside = ["routing"] * can.routes + ["dispatch and combine"] * can.travels
    where = "as many slots on every rank" if can.any_map else "linear"
    return [
        f"`{name}`", " and ".join([*inside, "experts"]), names(can.dtypes), ", ".join(sorted(can.schemes)),
        ", ".join(sorted(a.value for a in can.activations)), where, yes(can.biases), yes(can.etp),
        *map(yes, (can.cuda_graph, can.deterministic, can.exact)),
        capability(can.min_compute_capability, can.max_compute_capability), kind.tested_machines,
    ]  # fmt: skip


def kernel(name: str, kind: type[Experts]) -> list[str]:
    can = kind.capabilities
    bounds: dict[str, list[str]] = {}
    for scheme in sorted(can.schemes):
        bounds.setdefault(capability(*kind.compute_capability(scheme)), []).append(scheme)
    several = len(bounds) > 1
    gpu = "; ".join(f"{where}: {', '.join(schemes)}" if several else where for where, schemes in bounds.items())
    return [
        f"`{name}`", ", ".join(sorted(layout.value for layout in can.layouts)), names(can.dtypes),
        ", ".join(sorted(can.schemes)), ", ".join(sorted(a.value for a in can.activations)), yes(can.biases),
        yes(can.cuda_graph), yes(can.deterministic), yes(can.exact), yes(can.differentiable), gpu, kind.tested_machines,
    ]  # fmt: skip


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return the lines of a table. Wide cells become numbers of notes below it."""
    notes: list[str] = []

    def short(cell: str) -> str:
        if len(cell) <= WIDEST:
            return cell
        if cell not in notes:
            notes.append(cell)
        return f"({notes.index(cell) + 1})"

    lines = [columns, ["---"] * len(columns), *[list(map(short, row)) for row in rows]]
    below = [textwrap.fill(f"{number}. {note}", 120, subsequent_indent="   ") for number, note in enumerate(notes, 1)]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + [""] * bool(below) + below)


def document() -> str:
    transports = [transport(name, registry.load("dispatchers", name)) for name in registry.built_in("dispatchers")]
    kernels = [kernel(name, registry.load("experts", name)) for name in registry.built_in("experts")]
    all_in_one = [fused(name, registry.load("fused", name)) for name in registry.built_in("fused")]
    return "\n".join(
        [
            "# Backends",
            "",
            "Written by `python tools/backends.py > docs/reference/backends.md` from what each class states.",
            "`ep-moe explain NAME --dp N` prints which pairs can run on your machine, and why others cannot.",
            "",
            "## Transports",
            "",
            table(
                ["name", "rows", "weights by", "dtypes", "other row formats (`Wire`)", "once per rank (`dedup`)",
                 "CUDA graphs", "waits on the host",
                 "deterministic", "exact", "backward", "limits", "run on"],
                transports,
            ),
            "",
            "All but `local` pass `ep_moe.testing.check_dispatcher` where they were run.",
            "",
            "## Expert kernels",
            "",
            table(
                ["name", "row layouts (others through an adapter)", "dtypes", "quantization", "activations", "biases",
                 "CUDA graphs", "deterministic", "exact", "backward", "needs", "run on"],
                kernels,
            ),
            "",
            "All pass `ep_moe.testing.check_experts` where they were run. A layer that gets a kernel which was not",
            "run on its kind of GPU, without naming it, warns.",
            "",
            "## Fused kernels",
            "",
            "All in one, where `experts=` names them; never chosen by themselves.",
            "",
            table(
                ["name", "inside", "dtypes", "quantization", "activations", "expert map", "biases", "etp",
                 "CUDA graphs", "deterministic", "exact", "needs", "run on"],
                all_in_one,
            ),
            "",
            "Those with dispatch and combine inside pass `ep_moe.testing.check_fused` where they were run.",
            "",
            *SOURCES,
            "",
            *MISSING,
            "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    print(document(), end="")
