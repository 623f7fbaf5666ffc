"""This project's expert kernels on a Hopper GPU, a row of KERNELS each (4-bit kernels: a row per scheme).

Each is within its bound for any split of a call, allocates nothing, is captured, deterministic, and compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ep_moe import MoEConfig, registry

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from ep_moe.experts.base import Experts
from ep_moe.experts.hopper import step
from ep_moe.experts.hopper.experts import ACTIVATIONS
from ep_moe.experts.hopper.experts_fp8 import Fp8BlockTritonExperts, Fp8ChannelTritonExperts, Fp8DynamicTritonExperts
from ep_moe.experts.hopper.scaling import Scaling
from ep_moe.experts.hopper.scaling_fp8 import BlockScaled
from ep_moe.quant.fp8 import round_blocks
from ep_moe.quant.schemes import PLAIN, SCHEMES, Scheme
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.types import Received
from tests.fixtures import bf16_triton, fp8_dynamic_triton, fp8_tensor_triton, w4a16_triton
from tests.fixtures.bf16_triton import BF16, SMALL, rows
from tests.fixtures.hopper_gpu import DEEPSEEK, ODD, QWEN3

pytestmark = pytest.mark.timeout(600)
Tensors = list[dict[str, torch.Tensor]]
MODELS = {"small": SMALL, "odd": ODD, "qwen3": QWEN3, "deepseek": DEEPSEEK}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Hold what differs between kernels.

    Attributes:
        build: (config, slots, **options) -> experts and the tensors of each expert.
        scheme: The oracle's scheme.
        travelled: Returns rows as they travel in the kernel's own format. None: only plain rows are received.
        received: Returns rows that show more faults of this kernel than random ones.
        scaling: The entry of `SCALINGS` that calls must use. None: there is only one.
        gemm_grouped_up_to: The attribute of `BlockScaled`.
    """

    build: Callable[..., tuple[Experts, Tensors]]
    scheme: Scheme
    travelled: Callable[[Received, Tensors], Received] | None = None
    received: Callable[[Received], Received] = lambda received: received
    scaling: str | None = None
    gemm_grouped_up_to: float = BlockScaled.gemm_grouped_up_to


def block(config: MoEConfig, slots: int, **options: Any) -> tuple[Experts, Tensors]:
    return bf16_triton.build(config, slots, Fp8BlockTritonExperts, **options)


def dynamic(config: MoEConfig, slots: int, **options: Any) -> tuple[Experts, Tensors]:
    tensors = fp8_dynamic_triton.scales_apart(config, slots)
    return fp8_dynamic_triton.build(Fp8DynamicTritonExperts, config, tensors, **options), tensors


def channel(config: MoEConfig, slots: int, **options: Any) -> tuple[Experts, Tensors]:
    tensors = fp8_dynamic_triton.channels_apart(config, slots)
    return fp8_dynamic_triton.build(Fp8ChannelTritonExperts, config, tensors, **options), tensors


def in_blocks(received: Received, _: Tensors) -> Received:
    data, scale = round_blocks(received.x)
    return dataclasses.replace(received, x=data, x_scale=scale)


def with_the_input_scale(received: Received, tensors: Tensors) -> Received:
    return fp8_tensor_triton.rounded(received, max(float(own["w13_input_scale"]) for own in tensors))


def by_row(received: Received, _: Tensors) -> Received:
    return fp8_dynamic_triton.by_row(received)


KERNELS = {
    "bf16_triton": Kernel(bf16_triton.build, PLAIN),
    "fp8_tensor_triton": Kernel(fp8_tensor_triton.build, SCHEMES["fp8_static"], with_the_input_scale),
    "fp8_block_triton": Kernel(block, SCHEMES["fp8_block"], in_blocks),
    "fp8_block_triton by gemm_grouped": Kernel(block, SCHEMES["fp8_block"], in_blocks, gemm_grouped_up_to=math.inf),
    "fp8_block_triton by gemm_fp8_block": Kernel(block, SCHEMES["fp8_block"], in_blocks, gemm_grouped_up_to=0.0),
    "fp8_dynamic_triton": Kernel(dynamic, fp8_dynamic_triton.BY_ROW, by_row, fp8_dynamic_triton.apart, "row"),
    "fp8_channel_triton": Kernel(channel, SCHEMES["fp8_channel"], by_row, fp8_dynamic_triton.apart),
}
KERNELS |= {
    f"w4a16_triton {scheme}": Kernel(partial(w4a16_triton.build, name=scheme), SCHEMES[scheme])
    for scheme in w4a16_triton.FOUR_BITS
}
KERNELS |= {
    f"w4a8_triton {scheme}": Kernel(partial(w4a16_triton.build, name=scheme), SCHEMES[scheme], by_row)
    for scheme in w4a16_triton.FOUR_BITS_FP8
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
# one for each path: sorting in each program, `gemm_streaming`, `gemm_grouped`
each_way = pytest.mark.parametrize("count", [20, 30, 100, 130, 2000], ids=str)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    if why := registry.unsupported_reason("experts", request.param.split()[0]):
        pytest.skip(why)
    found = KERNELS[request.param]
    scalings, run = set(), step._pass

    def counted(of: Scaling, scaling: str, *arguments: Any) -> None:
        scalings.add(scaling)
        run(of, scaling, *arguments)

    monkeypatch.setattr(step, "_pass", counted)
    monkeypatch.setattr(BlockScaled, "gemm_grouped_up_to", found.gemm_grouped_up_to)
    yield found
    assert found.scaling is None or found.scaling in scalings, f"calls went by {scalings}"


def check(kernel: Kernel, model: tuple[MoEConfig, int], tensors: Tensors, received: Received, y: torch.Tensor) -> None:
    given = received.x, received.local_ids, received.weights, BF16
    found = max_error_ratio(y, *expected_and_limit(model[0], kernel.scheme, tensors, *given))
    print(f"{len(y)} rows, {found:.3f} of the bound")
    assert found <= 1
    assert (y[(received.local_ids < 0).all(1)] == 0).all()


def called(experts: Experts, received: Received) -> torch.Tensor:
    """Call the kernel with an output full of NaN."""
    return experts(received, torch.full(received.x.shape, torch.nan, dtype=BF16, device="cuda"))


@each_model
def test_every_cut(kernel, model):
    experts, tensors = kernel.build(*model)
    for count in (1, 7, 8, 30, 32, 33, 64, 70, 130, 255, 256, 257, 300, 700, 1100, 2000, 4099):
        received = kernel.received(rows(*model, count))
        check(kernel, model, tensors, received, called(experts, received))
    assert experts(rows(*model, 0)).shape == (0, model[0].hidden_size)


@each_way
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS, key=str), ids=lambda a: a.value)
def test_every_activation(kernel, activation, count):
    model = dataclasses.replace(SMALL[0], activation=activation), SMALL[1]
    experts, tensors = kernel.build(*model)
    received = rows(*model, count)
    check(kernel, model, tensors, received, called(experts, received))


def test_rows_of_one_expert_only(kernel):
    experts, tensors = kernel.build(*ODD)
    for count in (30, 300, 3000):
        received = rows(*ODD, count)
        received.local_ids.fill_(-1)[:, 5] = 2
        check(kernel, ODD, tensors, received, called(experts, received))


@each_model
def test_rows_that_were_rounded_before_the_wire_give_the_same_bits(kernel, model):
    if kernel.travelled is None:
        pytest.skip("rows travel plain")
    experts, tensors = kernel.build(*model)
    for count in (5, 30, 100, 130, 257, 700, 2000):
        received = kernel.received(rows(*model, count))
        y = called(experts, received)
        check(kernel, model, tensors, received, y)
        assert torch.equal(called(experts, kernel.travelled(received, tensors)), y), count


def test_repeats_its_bits(kernel):
    experts, tensors = kernel.build(*QWEN3)
    for count in (20, 200, 1000, 3000):
        received = rows(*QWEN3, count)
        first = called(experts, received)
        check(kernel, QWEN3, tensors, received, first)
        assert all(torch.equal(experts(received), first) for _ in range(20))


def test_spared_multiprocessors_change_no_bit(kernel):
    received = rows(*QWEN3, 5000)
    assert torch.equal(kernel.build(*QWEN3, spare_sms=16)[0](received), kernel.build(*QWEN3)[0](received))


@pytest.mark.parametrize("over_the_wire", [False, True], ids=["plain rows", "rounded before the wire"])
@pytest.mark.parametrize("count", [24, 130, 400, 700, 3000], ids=str)
def test_nothing_is_allocated_and_a_graph_replays(kernel, count, over_the_wire):
    if over_the_wire and kernel.travelled is None:
        pytest.skip("rows travel plain")
    experts, tensors = kernel.build(*QWEN3)

    def made(seed: int) -> tuple[Received, Received]:
        """Return plain rows, and the rows that the kernel is given."""
        plain = rows(*QWEN3, count, seed=seed)
        return plain, kernel.travelled(plain, tensors) if over_the_wire else plain

    (_, received), out = made(0), torch.empty(count, 2048, dtype=BF16, device="cuda")
    experts(received, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    experts(received, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(received, out)
    plain, fresh = made(5)
    for name in ("x", "x_scale", "local_ids", "weights"):
        if (into := getattr(received, name)) is not None:
            into.copy_(getattr(fresh, name))
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        check(kernel, QWEN3, tensors, plain, out)


@pytest.mark.parametrize("count", [64, 2000], ids=str)
def test_compiled_without_a_graph_break(kernel, count):
    experts, _ = kernel.build(*SMALL)
    received = rows(*SMALL, count)
    expected = experts(received)

    def step(x, ids, weights):
        return experts(dataclasses.replace(received, x=x * 1, local_ids=ids, weights=weights)) * 1

    torch.compiler.reset()  # each kernel makes another graph of this function, and Dynamo keeps eight
    y = torch.compile(step, fullgraph=True)(received.x, received.local_ids, received.weights)
    assert torch.equal(y, expected)
