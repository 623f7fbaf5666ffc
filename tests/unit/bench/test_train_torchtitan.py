"""Test torchtitan's lines of `bench.train`, over an emulation of the library.

They get the same weights, rows and routes as our layer. Their buffers have room for the measured tokens, and are freed.
Where they cannot run, only these lines are left out, and the reason is printed.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from contextlib import contextmanager, redirect_stdout
from unittest import mock

import pytest
import torch

from ep_moe import Activation, EPContext, MoEConfig
from ep_moe.bench import train, train_torchtitan
from ep_moe.bench.train_entries import Options
from ep_moe.bench.train_torchtitan import WAYS
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.testing import distributed, rank_device
from tests.emulations import torchtitan as emulated
from tests.fixtures.distributed_cases import gather_from_all_ranks

CONFIG = MoEConfig(hidden_size=32, intermediate_size=16, num_experts=8, top_k=2)
OPTIONS = Options(by_hand=("eager",), steps=1, torchtitan=tuple(WAYS))


@contextmanager
def installed(**how):
    """Install the emulation in place of any other torchtitan."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]
        emulated.install(**how)
        yield sys.modules[emulated.TRANSPORT]


def lines(tokens, options=OPTIONS, config=CONFIG):
    with EPContext.from_groups(device=rank_device(), deadline_s=30, max_tokens=max(tokens)) as context:
        points = train.layer_lines(context, "m", config, tokens, options, None)
    return [line for _, _, found, _ in points for line in found]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulation is of CPUs")
@distributed(2)
def test_its_layer_computes_what_ours_does(world_size):
    """torchtitan's layer computes what ours does, with buffers for each number of tokens.

    With two alternating buffers, the gradients of w1 and w3 are wrong, because they read rows that were overwritten.
    """
    compiled = []

    def compiling(what, **how):  # the emulation's collectives would break a graph
        compiled.append(how)
        return what

    with installed() as transport, mock.patch.object(torch, "compile", compiling):
        found = lines([24, 6])
        assert transport._buffer_state is None
        assert transport._buffer_key is None
        assert transport._HIDDEN_RECV_BUFFER_COUNT == 2
    assert compiled == [{"fullgraph": True}] * 4
    theirs = [line for line in found if line.owner == "torchtitan"]
    assert [line.name for line in theirs] == [way.name for way in WAYS.values()] * 2
    for line in theirs:
        assert line.wrong == ("4 buffers" not in line.name), line
        assert line.step_ms > 0
        rows = 2 * line.tokens * 2  # ranks, experts per row
        assert line.buffers_mib == rows * 32 * 2 * (4 if "4 buffers" in line.name else 2) / 2**20
    assert not [line for line in found if line.owner != "torchtitan" and line.wrong]


@distributed(2)
@pytest.mark.parametrize("fault", ["w1 and w3 swapped", "routing weights of others", "an expert too far"])
def test_a_fault_is_marked(fault, world_size):
    """A fault in what torchtitan is given is marked in the table."""
    entry = train_torchtitan.TorchTitan.entry

    def faulty(self, way):
        held, made = self._routed.inner_experts, entry(self, way)
        if fault == "w1 and w3 swapped":
            held.w1_EFD, held.w3_EFD = held.w3_EFD, held.w1_EFD
            return made
        wrong = (lambda ids, w: (ids, w.flip(1))) if fault.startswith("routing") else lambda ids, w: ((ids + 1) % 8, w)
        return dataclasses.replace(made, call=lambda x, ids, w: made.call(x, *wrong(ids, w)))

    options = dataclasses.replace(OPTIONS, torchtitan=("eager-kept",))
    with installed(), mock.patch.object(train_torchtitan.TorchTitan, "entry", faulty):
        found = lines([24], options)
    assert [line.owner for line in found if line.wrong] == ["torchtitan"]


def said(tokens):
    """Return the lines, and what rank 0 printed."""
    with redirect_stdout(io.StringIO()) as printed:
        found = lines(tokens)
    return found, " ".join(gather_from_all_ranks(printed.getvalue())[0].split())


@distributed(2)
def test_without_it_the_reason_is_said(world_size):
    """Without torchtitan the reason is printed.

    It is printed once for a model if the import fails, and for each number of tokens if the buffers are refused.
    """
    missing = dict.fromkeys([emulated.TRANSPORT, "torchtitan.models.common.moe"])
    with mock.patch.dict(sys.modules, missing):
        without, reason = said([6, 4])
    with installed(refused="needs memory of other GPUs"):
        refused, refusal = said([6, 4])
    assert {line.owner for line in [*without, *refused]} == {"ours", "by hand"}
    assert reason.count(f"{emulated.TRANSPORT} cannot be imported") == 1
    assert refusal.count("RuntimeError: needs memory of other GPUs") == 2


def test_what_it_cannot_compute_is_refused():
    w13, w2 = torch.empty(8, 32, 32), torch.empty(8, 32, 16)
    for changed in ({"activation": Activation.GEGLU}, {"expert_bias": True}):
        with pytest.raises(ConfigError, match="SwiGLU without biases"):
            train_torchtitan.TorchTitan(dataclasses.replace(CONFIG, **changed), w13, w2, RankGroup.alone())
    with pytest.raises(ConfigError, match="two ranks"):
        train_torchtitan.TorchTitan(CONFIG, w13, w2, RankGroup.alone())
    group = dataclasses.replace(RankGroup.alone(), group=mock.Mock())
    with installed() as transport:
        del transport._buffer_key
        with pytest.raises(BackendUnavailable, match=r"has no _buffer_key; install torchtitan 0\.3\.0"):
            train_torchtitan.TorchTitan(CONFIG, w13, w2, group)
