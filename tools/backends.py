"""docs/backends.md from the capabilities that the classes state, and from where each was run.

python tools/backends.py > docs/backends.md
"""

from __future__ import annotations

import torch

from ep_moe import registry
from ep_moe.all2all.base import DispatcherCapabilities
from ep_moe.experts.base import ExpertsCapabilities
from ep_moe.types import dtype_name

# what a machine showed; the commands are in docs/results.md
RUN = {
    "local": "CPU; 1 H200",
    "allgather": "CPU, gloo, 2 and 4 ranks; 4 H200, NCCL",
    "torch_a2a": "CPU, gloo, 2 and 4 ranks; 4 H200, NCCL",
    "deepep": "not run; on CPU, gloo, over an emulation of DeepEP's V1 contract",
    "deepep_static": "not run; on CPU, gloo, over an emulation of DeepEP's V1 contract",
    "pplx": "not run; on CPU, gloo, over an emulation of pplx-kernels' contract",
    "flashinfer_nvlink": "4 H200, one host; on CPU, gloo, over an emulation of FlashInfer's contract",
    "reference": "CPU; 1 and 4 H200",
    "flashinfer_cutlass": "1 and 4 H200; on CPU over an emulation of FlashInfer's layouts",
    "fp8_block_triton": "1 and 4 H200",
}
MISSING = (
    "NCCL-EP (`nccl_ep`), torch's `symm_mem`, DeepEP's low-latency and 2.x kernels, and kernels "
    "for Blackwell are not here yet. Not run: 2 GPUs, more than one node, GPUs other than H200."
)


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def names(dtypes: frozenset[torch.dtype] | None) -> str:
    return "any" if dtypes is None else ", ".join(sorted(map(dtype_name, dtypes)))


def transport(name: str, can: DispatcherCapabilities) -> list[str]:
    limits = [f"{can.max_ranks} ranks"] if can.max_ranks else []
    limits += [f"K up to {can.max_top_k}"] if can.max_top_k else []
    limits += ["needs max_tokens"] if can.static else []
    return [
        f"`{name}`", can.layout.value, can.weighting.value, names(can.dtypes), yes(can.dedup), yes(can.cuda_graph),
        yes(can.host_sync), yes(can.deterministic), yes(can.differentiable), ", ".join(limits), RUN[name],
    ]  # fmt: skip


def kernel(name: str, can: ExpertsCapabilities) -> list[str]:
    gpu = "any device"
    if can.min_compute_capability:
        gpu = "compute capability " + ".".join(map(str, can.min_compute_capability))
    return [
        f"`{name}`", ", ".join(sorted(layout.value for layout in can.layouts)), names(can.dtypes),
        ", ".join(sorted(can.schemes)), ", ".join(sorted(a.value for a in can.activations)), yes(can.biases),
        yes(can.cuda_graph), yes(can.deterministic), yes(can.differentiable), gpu, RUN[name],
    ]  # fmt: skip


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def document() -> str:
    transports = [
        transport(name, registry.load("dispatchers", name).capabilities) for name in registry.targets("dispatchers")
    ]
    kernels = [kernel(name, registry.load("experts", name).capabilities) for name in registry.targets("experts")]
    return "\n".join(
        [
            "# Backends",
            "",
            "Written by `python tools/backends.py > docs/backends.md` from what the classes state of themselves.",
            "`ep-moe explain --config NAME --dp N` prints which pairs can run on your machine, and why others cannot.",
            "",
            "## Transports",
            "",
            table(
                ["name", "rows", "weights by", "dtypes", "once per rank", "CUDA graphs", "waits on the host",
                 "deterministic", "backward", "limits", "run on"],
                transports,
            ),
            "",
            "All but `local` pass `ep_moe.testing.check_dispatcher` where they were run.",
            "",
            "## Expert kernels",
            "",
            table(
                ["name", "row layouts (others through an adapter)", "dtypes", "quantization", "activations", "biases",
                 "CUDA graphs", "deterministic", "backward", "needs", "run on"],
                kernels,
            ),
            "",
            "`reference` on CPU and `flashinfer_cutlass` over the emulation pass `ep_moe.testing.check_experts`. That",
            "suite was not run on GPUs yet; `tests/gpu` hold the same checks and more.",
            "",
            MISSING,
            "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    print(document(), end="")
