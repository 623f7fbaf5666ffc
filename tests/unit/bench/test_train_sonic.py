"""Test SonicMoE's line of `bench.train`, over an emulation of the library.

It gets the same weights, rows and routes as our layer. Where it cannot run, only its line is left out, and the reason
is printed.
"""

import dataclasses
import io
import sys
from contextlib import contextmanager, redirect_stdout
from unittest import mock

import pytest
import torch

from ep_moe import Activation, EPContext, MoEConfig
from ep_moe.bench import libraries, train
from ep_moe.bench.train_entries import Options
from ep_moe.testing import distributed, rank_device
from tests.emulations import bench_libraries as emulated

CONFIG = MoEConfig(hidden_size=32, intermediate_size=16, num_experts=8, top_k=2)
OPTIONS = Options(by_hand=("eager",), steps=1, sonic="default")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulation is of CPUs")


@contextmanager
def installed(*, is_there=True):
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("sonicmoe", "quack")]:
            del sys.modules[name]
        if is_there:
            emulated.sonic()
        yield


def lines(options=OPTIONS, config=CONFIG):
    said = io.StringIO()
    with redirect_stdout(said), EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        found = train.experts_lines(context, "m", config, [32], options, None)
    return found, said.getvalue()


@distributed(2)
def test_it_computes_what_ours_does(world_size):
    with installed():
        found, _ = lines()
        tuner = sys.modules["quack.gemm_interface"].tuned
        assert tuner.configs == ["the default"]
    assert [(line.owner, line.name) for line in found][1:] == [("by hand", "eager"), ("SonicMoE", "default tiles")]
    assert not any(line.wrong for line in found)
    assert found[-1].step_ms > 0


@distributed(1)
def test_tuned_tiles_are_its_own_choice(world_size):
    with installed():
        found, _ = lines(dataclasses.replace(OPTIONS, sonic="tuned"))
        assert sys.modules["quack.gemm_interface"].tuned.configs == ("many", "configs")
    assert found[-1].name == "tuned"


@distributed(1)
def test_rows_of_gate_and_up_that_do_not_take_turns_are_marked(world_size):
    with installed(), mock.patch.object(libraries, "interleaved", lambda w13: w13.clone()):
        found, _ = lines()
    assert [line.owner for line in found if line.wrong] == ["SonicMoE"]


@distributed(1)
@pytest.mark.parametrize(
    ("is_there", "config", "sentence"),
    [
        (False, CONFIG, "sonicmoe.functional cannot be imported"),
        (True, dataclasses.replace(CONFIG, activation=Activation.GEGLU), "SwiGLU without biases"),
        (True, dataclasses.replace(CONFIG, expert_bias=True), "SwiGLU without biases"),
    ],
)
def test_what_cannot_run_is_left_out_with_the_reason(is_there, config, sentence, world_size):
    with installed(is_there=is_there):
        found, said = lines(config=config)
    assert sentence in " ".join(said.split())
    assert "SonicMoE" not in [line.owner for line in found]
    assert found[0].owner == "ours"
    assert lines(dataclasses.replace(OPTIONS, sonic="none"), config)[1].count("SonicMoE") == 0
