"""What this project hands to FlashInfer, held against FlashInfer's own source; runs wherever it is installed."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ep_moe.all2all.flashinfer_nvlink import TOP_KS
from ep_moe.experts import cutlass_op
from ep_moe.experts.flashinfer_cutlass import ACTIVATIONS
from ep_moe.types import Activation

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

import flashinfer
from flashinfer.comm.comm_backend import TorchDistBackend
from flashinfer.comm.mnnvl import MnnvlMemory
from flashinfer.fused_moe import core
from flashinfer.moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpDispatchResult,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    create_communication,
)
from flashinfer.tllm_enums import ActivationType

SOURCE = Path(inspect.getfile(core)).read_text()
CUTLASS = Path(flashinfer.__file__).parent / "data/csrc/fused_moe/cutlass_backend"
BINDING = CUTLASS / "flashinfer_cutlass_fused_moe_binding.cu"
FLAGS = cutlass_op.runner_of(torch.bfloat16, torch.bfloat16, "none", True).flags.keys()


def test_arguments_of_run_moe_and_their_order():
    """The C++ parameter list of the compiled function that `cutlass_op` calls."""
    (declared,) = re.findall(r"void runMoe\((.*?)\)\s*\{", BINDING.read_text(), re.DOTALL)
    flat = re.sub(r"=\s*[^,]*?\{\}|=\s*[\w:]+", "", declared)
    names = [part.split()[-1] for part in re.sub(r"<[^()]*?>+", "", flat).split(",")]
    assert tuple(names) == cutlass_op.RUN_MOE


def test_python_hands_them_over_in_that_order():
    """FlashInfer's own Python calls the compiled function with these, min-latency outputs aside."""
    (call,) = re.findall(r"\n        run_moe\((.*?)\n        \)", SOURCE, re.DOTALL)
    names = [part.strip() for part in call.split(",") if part.strip() and not part.strip().startswith("*")]
    names = [re.sub(r"\s+", " ", name) for name in names]
    renamed = {"activation_type": "base_activation_type", "[gemm_tactic_1": "profile_ids"}
    names = [renamed.get(name, name) for name in names if name != "gemm_tactic_2]"]
    assert tuple(names) == cutlass_op.RUN_MOE


def test_runner_takes_the_flags():
    (signature,) = re.findall(r"class MoERunner\(TunableRunner\):.*?def __init__\(\s*self,(.*?)\):", SOURCE, re.DOTALL)
    wanted = {part.split(":")[0].strip() for part in signature.split(",") if part.strip()}
    given = {
        "x_dtype", "weight_dtype", "output_dtype", "top_k", "tp_size", "tp_rank", "ep_size", "ep_rank",
        "cluster_size", "cluster_rank", "enable_alltoall", "min_latency_mode", "enable_pdl", "activation_type",
    }  # fmt: skip
    assert wanted == given | FLAGS


def test_workspace_size_takes_the_flags():
    parameters = inspect.signature(core.cutlass_fused_moe_workspace_size).parameters
    assert parameters.keys() >= FLAGS
    assert list(parameters)[:5] == [
        "max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "top_k",
    ]  # fmt: skip
    assert {"x_dtype", "weight_dtype", "output_dtype", "activation_type", "device"} <= parameters.keys()


def test_activation_numbers():
    assert {
        Activation.SWIGLU: ActivationType.Swiglu,
        Activation.SWIGLU_CLAMPED: ActivationType.Swiglu,
        Activation.GEGLU: ActivationType.Geglu,
        Activation.RELU2: ActivationType.Relu2,
    } == ACTIVATIONS


def test_top_ks_of_the_one_sided_all2all():
    """The switch that its kernels are compiled by."""
    folder = Path(flashinfer.__file__).parent / "data/csrc/nv_internal/tensorrt_llm/kernels/communicationKernels"
    source = (folder / "moeAlltoAllKernels.cu").read_text()
    (switch,) = re.findall(r"#define SWITCH_TOP_K(.*?)default:", source, re.DOTALL)
    assert sorted(map(int, re.findall(r"case (\d+):", switch))) == list(TOP_KS)


def test_the_group_that_the_one_sided_all2all_is_given():
    """It asks the backend that it is given to cut itself, and takes what comes: ours gives itself."""
    assert list(inspect.signature(TorchDistBackend.__init__).parameters) == ["self", "group"]
    assert list(inspect.signature(TorchDistBackend.Split).parameters) == ["self", "color", "key"]
    assert NVLinkOneSidedConfig(comm_backend=None).comm_backend is None
    assert "comm_backend.Split(" in inspect.getsource(MnnvlMemory.set_comm_from_config)


def test_calls_of_the_one_sided_all2all():
    """What the dispatcher calls, bound against FlashInfer's own classes."""
    nothing = object()
    BootstrapConfig(world_size=4, rank=1, device=1, process_group=None)
    MoEEpCommParams(num_experts=12, top_k=4, max_tokens_per_rank=24, hidden_size=256, dtype=torch.bfloat16)
    assert NVLinkOneSidedConfig(extra_payload_bytes_per_token=16).use_low_precision_combine is False
    inspect.signature(create_communication).bind(nothing, nothing, nothing)
    kind = NVLinkOneSidedAlltoAll
    inspect.signature(kind.dispatch).bind(nothing, nothing, nothing, nothing, max_tokens_per_rank=24)
    inspect.signature(kind.get_combine_input_buffer).bind(nothing, torch.bfloat16)
    inspect.signature(kind.combine).bind(nothing, nothing)
    inspect.signature(kind.destroy).bind(nothing)
    assert {"hidden_states", "topk_ids", "topk_weights"} <= {field.name for field in fields(MoEEpDispatchResult)}
