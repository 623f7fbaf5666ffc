"""FlashInfer's CUTLASS MoE as one torch operator on caller-owned memory. Only this file calls the module of
`cutlass_fused_moe`.

At each call, `flashinfer.fused_moe.cutlass_fused_moe` allocates three tensors that this project does not read, and asks
the autotuner for a tactic. The operator here passes the same arguments to the same compiled `run_moe`, in the order of
`RUN_MOE`. tests/unit/experts/flashinfer/test_flashinfer_signature.py compares this order with FlashInfer's source.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_moe.experts.flashinfer.call_scales import (
    Inputs,
    TensorScales,
    clean_ids,
    column_scales,
    fill_scales,
    round_rows,
    row_extremes,
)
from ep_moe.quant.kernels import mxfp8_rows, nvfp4_rows
from ep_moe.runtime.torch_operator import operator
from ep_moe.runtime.workspace import Shapes, carve, carved_bytes

# parameters of FusedMoeRunner::runMoe, flashinfer_cutlass_fused_moe_binding.cu, FlashInfer 0.7.2.post1
RUN_MOE = (
    "output", "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc1_expert_biases",
    "fc2_expert_weights", "fc2_expert_biases", "quant_scales", "input_sf", "swiglu_alpha", "swiglu_beta",
    "swiglu_limit", "clamped_relu2_limit", "situ_beta", "situ_linear_beta", "swizzled_input_sf", "tp_size", "tp_rank",
    "ep_size", "ep_rank", "cluster_size", "cluster_rank", "enable_alltoall", "min_latency_mode", "profile_ids",
    "enable_pdl", "base_activation_type", "workspace_buffer",
)  # fmt: skip

ALONE: Mapping[str, Any] = {  # arguments of a call on local experts, after dispatch
    "clamped_relu2_limit": None,
    "situ_beta": None,
    "situ_linear_beta": None,
    "swizzled_input_sf": False,  # input_sf, if given, is linear
    "ep_size": 1,
    "ep_rank": 0,
    "cluster_size": 1,
    "cluster_rank": 0,
    "enable_alltoall": False,
    "min_latency_mode": False,
    "enable_pdl": True,
}

PRE_ROUNDED = ("fp8_static", "fp8_dynamic")  # the kernel reads rows already rounded to fp8
DYNAMIC = ("fp8_dynamic", "int4_fp8")  # one scale per call, computed from the rows
BLOCK_SCALED = ("nvfp4", "mxfp4_mxfp8", "mxfp8")  # the kernel reads rounded rows with block scales
_INT64 = ("nvfp4", "mxfp4_mxfp8")  # the kernel takes 16 weights of 4 bits as one int64


@dataclass(frozen=True)
class Runner:
    """The parameters for which FlashInfer compiles one set of kernels."""

    input: torch.dtype
    weight: torch.dtype
    output: torch.dtype
    scheme: str
    fused_finalize: bool

    @property
    def flags(self) -> dict[str, bool]:
        return {
            "use_deepseek_fp8_block_scale": self.scheme == "fp8_block",
            "use_w4_group_scaling": self.scheme in ("mxfp4", "mxfp4_fp8", "int4_fp8"),
            "use_mxfp8_act_scaling": self.scheme in ("mxfp4_mxfp8", "mxfp8"),
            "use_packed_weights": self.scheme == "int4_fp8",
            "use_fused_finalize": self.fused_finalize,
            "use_wfp4afp8_humming": self.scheme == "mxfp4_fp8",
        }


def runner_of(x: torch.dtype, weight: torch.dtype, scheme: str, fused_finalize: bool) -> Runner:
    """Return the runner of a scheme. x: dtype of unrounded rows and of the output; weight: dtype of stored weights"""
    rows = {"nvfp4": torch.uint8} | dict.fromkeys((*PRE_ROUNDED, "mxfp4_mxfp8", "mxfp8"), torch.float8_e4m3fn)
    return Runner(rows.get(scheme, x), torch.int64 if scheme in _INT64 else weight, x, scheme, fused_finalize)


@functools.cache
def compiled(runner: Runner, device: torch.device) -> Any:
    """Return FlashInfer's compiled object for a runner. The first use builds or loads its module."""
    from flashinfer.fused_moe.core import get_cutlass_fused_moe_module

    major, minor = torch.cuda.get_device_capability(device)
    module = get_cutlass_fused_moe_module(f"{major * 10 + minor}")
    sizes = {"top_k": 1, "tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0, "cluster_size": 1, "cluster_rank": 0}
    made = module.MoERunner(
        x_dtype=runner.input,
        weight_dtype=runner.weight,
        output_dtype=runner.output,
        **sizes,
        enable_alltoall=False,
        min_latency_mode=False,
        enable_pdl=True,
        activation_type=3,
        **runner.flags,
    )
    return made.fused_moe_runner


def scratch_bytes(
    runner: Runner, rows: int, hidden: int, inner: int, slots: int, top_k: int, activation: int, device: torch.device
) -> int:
    """Return the bytes of FlashInfer's own scratch for `rows` rows."""
    from flashinfer.fused_moe import cutlass_fused_moe_workspace_size
    from flashinfer.tllm_enums import ActivationType

    return int(
        cutlass_fused_moe_workspace_size(
            rows,
            hidden,
            inner,
            slots,
            top_k,
            x_dtype=runner.input,
            weight_dtype=runner.weight,
            output_dtype=runner.output,
            activation_type=ActivationType(activation),
            device=device,
            **runner.flags,
        )
    )


def operator_scratch_shapes(
    runner: Runner, rows: int, hidden: int, inner: int, slots: int, top_k: int, weighted: bool
) -> Shapes:
    """Return the scratch tensors that the operator places in the workspace before FlashInfer's scratch."""
    shapes: Shapes = {"ids": ((rows, top_k), torch.int32)}
    if weighted:
        shapes["weights"] = ((rows, top_k), torch.float32)
    if runner.scheme in DYNAMIC:
        shapes["extremes"] = ((2,), torch.float32)
    if runner.scheme in PRE_ROUNDED:
        shapes |= {"rows": ((rows, hidden), torch.float8_e4m3fn), "input_scale": ((), torch.float32)}
        shapes |= dict.fromkeys(("alpha1", "quant2", "alpha2"), ((slots,), torch.float32))
    if runner.scheme == "int4_fp8":
        shapes |= {"act1": ((hidden,), runner.output), "act2": ((inner,), runner.output)}
        shapes |= dict.fromkeys(("alpha1", "alpha2"), ((slots,), torch.float32))
    if runner.scheme == "nvfp4":
        shapes |= {"rows": ((rows, hidden // 2), torch.uint8), "row_scale": ((rows, hidden // 16), torch.float8_e4m3fn)}
        shapes |= dict.fromkeys(("input_scale", "quant1"), ((), torch.float32))
        shapes |= dict.fromkeys(("alpha1", "quant2", "alpha2"), ((slots,), torch.float32))
    elif runner.scheme in BLOCK_SCALED:
        shapes |= {"rows": ((rows, hidden), torch.float8_e4m3fn), "row_scale": ((rows, hidden // 32), torch.uint8)}
        shapes |= {"ones": ((slots,), torch.float32)}
    return shapes


def operator_scratch_bytes(runner: Runner, rows: int, hidden: int, inner: int, slots: int, top_k: int) -> int:
    return carved_bytes(operator_scratch_shapes(runner, rows, hidden, inner, slots, top_k, weighted=True))


@operator("cutlass_moe")
def cutlass_moe(
    out: Tensor,
    workspace: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    input_scale: float | None,
    ids: Tensor,
    base: int,
    weights: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    scales: Sequence[Tensor],
    clamp: Sequence[Tensor],
    scheme: str,
    activation: int,
    activation_bound: float,
    etp_rank: int,
    fused_finalize: bool,
    chunk: int,
    tactics: Sequence[int],
) -> None:
    """Compute the experts for RANK_MAJOR rows.

    out: bf16 or fp16 [N, H]; workspace: uint8; ids: int [N, K], local ids plus `base`; other ids name no local expert
    x: [N, H] of out's dtype; for `BLOCK_SCALED` schemes and fp8_static also rows in the scheme's row format, with
        x_scale, input_scale, or both for NVFP4
    weights: float32 [N, K], None for 1; w13, w2, biases: as `CutlassSm90` or `CutlassSm100` stores them, [L, ...]
    scales: the scheme's stored tensors in the order of `scale_names`; clamp: alpha, beta, limit of the clamped SwiGLU
    activation: FlashInfer's ActivationType; activation_bound: upper bound of activations, 0 for none
    etp_rank: rank 0 adds w2_bias; chunk: the most rows of one kernel call; tactics: (rows, first, second) triples,
        ascending by rows
    """
    rows, hidden = out.shape
    slots, inner = w2.shape[0], w2.shape[2] * (2 if w2.dtype == torch.uint8 else 1)
    if rows == 0 or slots == 0:  # the kernel would raise without rows; without experts all rows are zero
        out.zero_()
        return
    runner = runner_of(out.dtype, w13.dtype, scheme, fused_finalize)
    shapes = operator_scratch_shapes(runner, min(rows, chunk), hidden, inner, slots, ids.shape[1], weights is not None)
    scratch = carve(workspace, shapes)
    if scheme in DYNAMIC:
        _measure(x, ids, base, scratch, slots, chunk)
    handed = _Rows(scheme, dict(zip(scale_names(scheme), scales, strict=True)), scratch, activation_bound, input_scale)
    fixed: dict[str, Any] = {
        **ALONE,
        "fc1_expert_weights": w13.view(runner.weight),
        "fc1_expert_biases": w13_bias,
        "fc2_expert_weights": w2.view(runner.weight),
        "fc2_expert_biases": w2_bias,
        "quant_scales": handed.scales or None,
        **dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), clamp or (None, None, None), strict=True)),
        "tp_size": etp_rank + 1,  # the kernel only checks tp_rank == 0, to add w2_bias
        "tp_rank": etp_rank,
        "base_activation_type": activation,
        "workspace_buffer": scratch["rest"],
    }
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        count = part.stop - part.start
        part_ids, part_weights = scratch["ids"][:count], None if weights is None else scratch["weights"][:count]
        clean_ids(ids[part], None if weights is None else weights[part], base, slots, part_ids, part_weights)
        row_input, row_scale = handed.as_read(x[part], None if x_scale is None else x_scale[part])
        run_moe(
            runner,
            output=out[part],
            input=row_input,
            token_selected_experts=part_ids,
            token_final_scales=part_weights,
            input_sf=None if row_scale is None else row_scale.view(torch.uint8),
            profile_ids=tactic_for(tactics, count),
            **fixed,
        )


class _Rows:
    """Prepare one call's rows for FlashInfer. scales: its `quant_scales`, filled here or when rows are rounded"""

    def __init__(
        self,
        scheme: str,
        stored: dict[str, Tensor],
        scratch: dict[str, Tensor],
        bound: float,
        input_scale: float | None,
    ) -> None:
        """stored: the scheme's tensors by name; bound: upper bound of activations; input_scale: scale of rows that
        arrived rounded, if they have one"""
        self._scheme, self._stored, self._scratch = scheme, stored, scratch
        self._inputs = _inputs(scheme, stored, scratch, bound)
        self._come_rounded = input_scale is not None
        if scheme == "int4_fp8":
            assert self._inputs is not None
            column_scales(self._inputs, scratch["act1"], scratch["act2"], scratch["alpha1"], scratch["alpha2"])
        if scheme in BLOCK_SCALED:
            _fill_scales(scheme, stored, scratch, input_scale)
        self.scales = quant_scales(scheme, stored, scratch)
        if scheme == "fp8_static" and input_scale is not None:
            each = stored["w13_scale"], stored["w2_scale"], stored["w2_input_scale"]
            fill_scales(input_scale, *each, TensorScales(*self.scales))

    def as_read(self, x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return rows as the kernel reads them, and their block scales. x, x_scale: a part of the call's rows"""
        if self._scheme in BLOCK_SCALED and x_scale is None:
            rows, scale = self._scratch["rows"][: len(x)], self._scratch["row_scale"][: len(x)]
            _round_blocks(self._scheme, x, self._scratch, rows, scale)
            return rows, scale
        if self._scheme in PRE_ROUNDED and not self._come_rounded:
            assert self._inputs is not None
            rows, each = self._scratch["rows"][: len(x)], (self._stored["w13_scale"], self._stored["w2_scale"])
            round_rows(x, *each, self._inputs, rows, TensorScales(*self.scales))
            return rows, x_scale
        return x, x_scale


def _inputs(scheme: str, stored: Mapping[str, Tensor], scratch: Mapping[str, Tensor], bound: float) -> Inputs | None:
    """Return the source of row scales, for schemes with one scale for all rows."""
    if scheme in DYNAMIC:
        return Inputs(scratch["extremes"], stored["w13_bound"], dynamic=True, activation_bound=bound)
    if scheme == "fp8_static":
        return Inputs(stored["w13_input_scale"], stored["w2_input_scale"], dynamic=False)
    return None


def run_moe(runner: Runner, **arguments: Any) -> None:
    assert arguments.keys() == set(RUN_MOE)
    device = arguments["input"].device
    compiled(runner, device).run_moe(*[arguments[name] for name in RUN_MOE])


def tactic_for(tactics: Sequence[int], rows: int) -> list[int]:
    """Return [first, second] for the smallest measured number of rows >= `rows`, else for the largest.

    Without measured tactics both are -1, FlashInfer's default.
    """
    for at in range(0, len(tactics), 3):
        if rows <= tactics[at] or at + 3 == len(tactics):
            return [tactics[at + 1], tactics[at + 2]]
    return [-1, -1]


def scale_names(scheme: str) -> tuple[str, ...]:
    """Return the names of the stored tensors that the operator takes as `scales`."""
    return {
        "none": (),
        "fp8_static": ("w13_scale", "w2_scale", "w13_input_scale", "w2_input_scale"),
        "fp8_dynamic": ("w13_scale", "w2_scale", "w13_bound"),
        "fp8_block": ("w13_scale", "w2_scale"),
        "mxfp4": ("w13_scale", "w2_scale"),
        "mxfp4_fp8": ("w13_scale", "w13_residual", "w2_scale", "w2_residual"),
        "int4_fp8": ("w13_scale", "w2_scale", "w13_bound"),
        "nvfp4": tuple(
            f"{name}{part}" for name in ("w13", "w2") for part in ("_scale", "_global_scale", "_input_scale")
        ),
        "mxfp4_mxfp8": ("w13_scale", "w2_scale"),
        "mxfp8": ("w13_scale", "w2_scale"),
    }[scheme]


def _measure(x: Tensor, ids: Tensor, base: int, scratch: dict[str, Tensor], slots: int, chunk: int) -> None:
    """Measure the extremes of all rows of the call, so that its chunks have one scale."""
    scratch["extremes"].zero_()
    for start in range(0, len(x), chunk):
        part_ids = scratch["ids"][: min(chunk, len(x) - start)]
        clean_ids(ids[start : start + chunk], None, base, slots, part_ids, None)
        row_extremes(x[start : start + chunk], part_ids, scratch["extremes"])


def _fill_scales(
    scheme: str, stored: Mapping[str, Tensor], scratch: Mapping[str, Tensor], input_scale: float | None
) -> None:
    """Fill the scales that the kernel takes besides block scales.

    The kernel multiplies by `quant` before it rounds to blocks, and multiplies its sums by `alpha`. MXFP4 and MXFP8
    only have block scales.
    """
    if scheme != "nvfp4":
        scratch["ones"].fill_(1.0)
        return
    # a row has one scale for all its experts; the second product's input has one scale per expert
    if input_scale is None:
        torch.amax(stored["w13_input_scale"], 0, out=scratch["input_scale"])
    else:
        scratch["input_scale"].fill_(input_scale)
    torch.reciprocal(scratch["input_scale"], out=scratch["quant1"])
    torch.reciprocal(stored["w2_input_scale"], out=scratch["quant2"])
    torch.mul(stored["w13_global_scale"], scratch["input_scale"], out=scratch["alpha1"])
    torch.mul(stored["w2_global_scale"], stored["w2_input_scale"], out=scratch["alpha2"])


def _round_blocks(scheme: str, x: Tensor, scratch: Mapping[str, Tensor], rows: Tensor, scale: Tensor) -> None:
    if scheme == "nvfp4":
        nvfp4_rows(x, scratch["input_scale"], rows, scale)
    else:
        mxfp8_rows(x, rows, scale)


def quant_scales(scheme: str, stored: Mapping[str, Tensor], scratch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return FlashInfer's `quant_scales`, from stored tensors and from the operator's scratch tensors."""
    weights = [stored[name] for name in ("w13_scale", "w2_scale") if name in stored]
    if scheme in PRE_ROUNDED:
        return [scratch["alpha1"], scratch["quant2"], scratch["alpha2"], scratch["input_scale"]]
    if scheme == "int4_fp8":
        nothing = scratch["act1"][:0]
        return [*weights, scratch["act1"], scratch["act2"], nothing, nothing, scratch["alpha1"], scratch["alpha2"]]
    if scheme == "mxfp4_fp8":
        first, second = stored["w13_residual"], stored["w2_residual"]
        return [weights[0], first, first, weights[1], second]  # the third is reserved, not read
    if scheme in BLOCK_SCALED:
        first, second = (scale.view(torch.int32) for scale in weights)
        if scheme == "nvfp4":
            return [scratch["quant1"], first, scratch["alpha1"], scratch["quant2"], second, scratch["alpha2"]]
        return [first, scratch["ones"], second, scratch["ones"]]
    return weights
