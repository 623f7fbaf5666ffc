"""LoadRecorder returns a trace of all ranks' load, or raises the same error on all ranks."""

import dataclasses

import torch
import torch.distributed as dist

from ep_moe import ConfigError, InputError, MoELayer
from ep_moe.eplb.load import LoadRecorder
from ep_moe.testing import distributed
from ep_moe.types import Routing
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.eplb_cases import context_of, make_layers


@distributed(2)
def test_a_trace_is_recorded(world_size):
    with context_of() as context:
        layers = make_layers(context, 2)
        recorder = LoadRecorder(layers, context.rank_groups["lockstep"], steps=3)
        for number in range(4):
            for layer in layers:
                ids = torch.tensor([[number, 9, -1]] * (1 + dist.get_rank()), device=context.device)
                weights = torch.ones(ids.shape, device=context.device)
                layer.forward_routed(torch.zeros(len(ids), 16, device=context.device), Routing(ids, weights))
            if number == 1:
                layers[0].placement.reset_load()
            recorder.step()
        trace = recorder.finish("tiny")
        expected = [[[3 * (e == step) + 3 * (e == 9) for e in range(10)]] * 2 for step in range(3)]
        expected[1][0] = [0] * 10  # reset after its step
        assert trace.counts.tolist() == expected
        assert trace.tokens.tolist() == [2, 2, 2]  # 6 routes, 3 a row
        assert trace.layers == ("moe0", "moe1")


@distributed(2)
def test_ranks_that_recorded_unlike_are_told_so_alike(world_size):
    with context_of() as context:
        layers = make_layers(context, 2)
        for steps, words in (
            ((3, 2), "3 steps on rank 0 and 2 on rank 1"),
            ((2, 0), "rank 1: LoadRecorder has recorded no step"),
        ):
            with torch.inference_mode():
                recorder = LoadRecorder(layers, context.rank_groups["lockstep"], steps=3)
            for _ in range(steps[dist.get_rank()]):
                recorder.step()
            assert words in same_error(InputError, recorder.finish)


@distributed(2)
def test_layers_of_unlike_numbers_of_experts_are_refused(world_size):
    with context_of() as context:
        layers = make_layers(context)
        layers.append(MoELayer(dataclasses.replace(layers[0].config, num_experts=4), context))
        text = same_error(ConfigError, lambda: LoadRecorder(layers, context.rank_groups["lockstep"], steps=1))
        assert (
            text == "LoadRecorder.layers must be alike in E, got {'moe0': 10, 'moe1': 4}; make a recorder for each kind"
        )
