"""Test that `ep-moe doctor` and `ep-moe explain` name every backend, and say why one cannot run."""

import re

import pytest
import torch

from ep_moe import registry
from ep_moe.cli.explain import grouped
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.selection.explain import BackendChoice
from tests.fixtures.run_command import invoke

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")


def test_doctor_names_every_backend():
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert re.search(rf"torch +{re.escape(torch.__version__)}", result.output)
    assert re.search(rf"transformers +{re.escape(transformers.__version__)}", result.output)
    for kind in ("dispatchers", "experts"):
        for name in registry.targets(kind):
            reason = registry.unsupported_reason(kind, name) or "available"
            assert re.search(rf"{kind} +{name} +{re.escape(reason.split()[0])}", result.output), name


@pytest.mark.parametrize("deadline", ["nan", "60"])
def test_a_deadline_that_no_rank_would_wait_for_is_refused(deadline):
    result = invoke("doctor", "--deadline", deadline)
    assert result.exit_code == 2
    assert f"--deadline is for doctor --cluster, got {deadline}; add --cluster, or leave it out" in result.output


def test_a_reason_of_one_backend_is_told_once_under_its_name():
    rows = [
        BackendChoice(all2all, experts, "refused", f"{owner}: {reason}" if owner else reason)
        for all2all, experts, owner, reason in (
            ("a", "x", "x", "has no GPU"),
            ("b", "x", "x", "has no GPU"),
            ("b", "y", "b", "is not installed"),
            ("c", "y", "", "dtypes: differ"),
        )
    ]
    assert grouped(rows) == [
        "",
        "refused: 4 pairs, by reason (--all lists the pairs)",
        "   2  x: has no GPU",
        "   1  b: is not installed",
        "   1  c with y: dtypes: differ",
    ]


def test_explain_prints_the_table_of_a_model():
    result = invoke("explain", "qwen3-30b-a3b", "--dp", 4, "--max-tokens", 256, "--all")
    assert result.exit_code == 0, result.output
    pairs = {(a, b) for a in registry.targets("dispatchers") for b in registry.targets("experts")}
    pairs |= {("inside", name) for name in registry.targets("fused")}
    lines = [line.split() for line in result.output.splitlines() if line]
    assert {tuple(line[1:3]) for line in lines} == pairs
    (chosen,) = (line for line in lines if line[0] == "chosen")
    assert chosen[1:3] == ["allgather", "reference"]
    result = invoke("explain", "qwen3-30b-a3b", "--dp", 16, "--all2all", "torch_a2a", "--dtype", "float32")
    assert re.search(r"chosen +torch_a2a +reference +trains +top_k=8 < ep=16", result.output)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("nothing", "error: no bundled config is named 'nothing'; there are deepseek-v3"),
        ("demo --dp 3 --ep 2", "error: ep . etp must divide dp . tp"),
        ("demo --dtype int8", "error: dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ("demo --quantization x", "error: quantization must be one of none, .* got 'x'"),
        (
            "demo --wire fp4",
            r"error: Wire\.dispatch must be one of plain, fp8_block, fp8_row, fp8_tensor, mxfp8",
        ),
        ("demo --all2all x", "error: no backend among dispatchers is named 'x'"),
        ("demo --dp 2000000", "error: dp . tp must be at most 1000000 ranks, got 2000000"),
        (
            "demo --dp 99999999999999999999",
            "error: ParallelConfig.dp must be an integer of at most 2147483647",
        ),
        ("demo --max-tokens 0", "error: max_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_explain_refuses_in_one_sentence(flags, sentence):
    result = invoke("explain", *flags.split())
    assert result.exit_code == 2, result.output
    assert re.match(sentence, result.output), result.output


def test_explain_says_by_its_exit_code_that_nothing_can_run():
    result = invoke("explain", "demo", "--quantization", "fp8_block")
    assert result.exit_code == 1
    assert "multiple of 128" in result.output
