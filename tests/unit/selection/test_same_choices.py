"""Test that `explain` still gives the same choices for bundled models on GPUs that need not be present.

The tests hold the chosen pair, the number of possible pairs, and a checksum of all rows with their reasons, in order.
`pytest -vv` prints the values of changed choices, and `ep-moe explain --gpu ... --all` prints the rows.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from ep_moe import ParallelConfig, Tokens, Wire
from ep_moe.selection.explain import BackendChoice, explain_model

DP8, DP2 = ParallelConfig(dp=8), ParallelConfig(dp=2)
ETP = ParallelConfig(dp=2, tp=4, ep=4, etp=2, tokens=Tokens.SHARDED)
QUESTIONS: dict[str, tuple[str, ParallelConfig, dict[str, Any]]] = {
    "any number of tokens": ("qwen3-30b-a3b", DP8, {}),
    "a bound": ("qwen3-30b-a3b", DP8, {"max_tokens": 64}),
    "a large bound": ("qwen3-30b-a3b", DP8, {"max_tokens": 32768}),
    "one rank": ("qwen3-30b-a3b", ParallelConfig(), {"max_tokens": 64}),
    "an H100": ("qwen3-30b-a3b", DP8, {"quantization": "fp8_dynamic", "gpu": "h100"}),
    "a B200": ("qwen3-30b-a3b", DP8, {"max_tokens": 4096, "gpu": "b200"}),
    "float32": ("qwen3-30b-a3b", DP8, {"dtype": "float32"}),
    "float16": ("qwen3-30b-a3b", DP8, {"dtype": "float16", "max_tokens": 64}),
    "a transport by name": ("qwen3-30b-a3b", DP8, {"all2all": "torch_a2a"}),
    "a kernel by name": ("qwen3-30b-a3b", DP8, {"experts": "reference"}),
    "a fused kernel by name": (
        "deepseek-v3", ParallelConfig(),
        {"experts": "flashinfer_trtllm_monolithic", "quantization": "fp8_block", "max_tokens": 64, "gpu": "b200"},
    ),
    "two hosts": ("deepseek-v3", ParallelConfig(dp=16), {"ranks_per_node": 8, "quantization": "fp8_block"}),
    "two hosts, a bound": ("deepseek-v3", ParallelConfig(dp=16), {"ranks_per_node": 8, "max_tokens": 128}),
    "many hosts": ("kimi-k2", ParallelConfig(dp=64), {"ranks_per_node": 8, "max_tokens": 4096}),
    "blocks of E4M3": ("deepseek-v3", DP8, {"quantization": "fp8_block", "max_tokens": 128}),
    "blocks of E4M3 on the way": (
        "deepseek-v3", DP8, {"quantization": "fp8_block", "max_tokens": 128, "wire": Wire(dispatch="fp8_block")},
    ),
    "answers in E4M3": ("deepseek-v3", DP8, {"max_tokens": 128, "wire": Wire(combine="fp8")}),
    "E4M3, one scale": ("mixtral-8x7b", DP2, {"quantization": "fp8_static"}),
    "E4M3 by channel": ("mixtral-8x7b", DP2, {"quantization": "fp8_channel", "max_tokens": 16}),
    "MXFP4, biases": ("gpt-oss-120b", DP2, {"quantization": "mxfp4", "max_tokens": 16}),
    "MXFP4, rows in E4M3": ("gpt-oss-120b", DP2, {"quantization": "mxfp4_fp8", "max_tokens": 8192}),
    "INT4": ("kimi-k2", DP8, {"quantization": "int4", "max_tokens": 16}),
    "NVFP4": ("qwen3-235b-a22b", DP8, {"quantization": "nvfp4", "max_tokens": 16, "gpu": "b200"}),
    "one expert a token, weights on its input": ("llama-4-maverick", DP8, {"max_tokens": 1024}),
    "experts cut over ranks": ("mixtral-8x7b", ETP, {"max_tokens": 64}),
}  # fmt: skip


def table(question: str) -> list[BackendChoice]:
    model, parallel, options = QUESTIONS[question]
    return explain_model(model, parallel, **{"gpu": "h200"} | options)


def found(question: str) -> tuple[str, int, int]:
    rows = table(question)
    chosen = [f"{row.all2all} {row.experts}" for row in rows if row.status == "chosen"]
    possible = sum(row.status == "possible" for row in rows)
    every = [(row.all2all, row.experts, row.status, row.reason, row.trains) for row in rows]
    return "; ".join(chosen), possible, zlib.crc32(repr(every).encode())


CHOSEN = {
    "any number of tokens": ("nvlink_p2p bf16_triton", 11, 3739529540),
    "a bound": ("nvlink_p2p bf16_triton", 21, 1247081025),
    "a large bound": ("nvlink_p2p bf16_triton", 20, 643674110),
    "one rank": ("local bf16_triton", 23, 3461397694),
    "an H100": ("nvlink_p2p fp8_dynamic_triton", 11, 911166146),
    "a B200": ("nvlink_p2p flashinfer_cutlass", 20, 1612375647),
    "float32": ("nvlink_p2p reference", 3, 4054158390),
    "float16": ("nvlink_p2p flashinfer_cutlass", 13, 1437443444),
    "a transport by name": ("torch_a2a bf16_triton", 2, 3798467933),
    "a kernel by name": ("nvlink_p2p reference", 3, 837924631),
    "a fused kernel by name": ("inside flashinfer_trtllm_monolithic", 0, 1521161158),
    "two hosts": ("hierarchical fp8_block_triton", 8, 3598445193),
    "two hosts, a bound": ("hierarchical bf16_triton", 14, 1320733169),
    "many hosts": ("hierarchical bf16_triton", 14, 923044268),
    "blocks of E4M3": ("nvlink_p2p fp8_block_triton", 21, 2222629891),
    "blocks of E4M3 on the way": ("nvlink_p2p fp8_block_triton", 20, 2759409025),
    "answers in E4M3": ("nvlink_p2p bf16_triton", 5, 113148776),
    "E4M3, one scale": ("nvlink_p2p fp8_tensor_triton", 11, 2385649378),
    "E4M3 by channel": ("nvlink_p2p fp8_channel_triton", 13, 4150752650),
    "MXFP4, biases": ("nvlink_p2p w4a16_triton", 13, 2913057069),
    "MXFP4, rows in E4M3": ("nvlink_p2p w4a8_triton", 13, 3488961418),
    "INT4": ("nvlink_p2p w4a16_triton", 13, 2834250493),
    "NVFP4": ("nvlink_p2p flashinfer_cutlass", 27, 2663398522),
    "one expert a token, weights on its input": ("nvlink_p2p bf16_triton", 21, 348516269),
    "experts cut over ranks": ("nvlink_p2p bf16_triton", 21, 715554713),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_chosen_stays(question):
    assert found(question) == CHOSEN[question]


def test_the_questions_tell_tables_apart():
    assert len({checksum for _, _, checksum in CHOSEN.values()}) == len(QUESTIONS)
