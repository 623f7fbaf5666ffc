"""The contract of an expert kernel: checks for any class.

    def test_my_kernel():
        check_experts(MyExperts, device=torch.device("cuda"))

Outputs are compared with float64 results on the dequantized weights, within the bound of `expert_oracle`. Gradients of
kernels that promise them are compared with those of autograd (`kernel_case.gradients`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ep_moe.config import MoEConfig, Wire
from ep_moe.experts.base import Experts, ExpertsOptions
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.quant.row_format import dequantize_from_wire, quantize_for_wire
from ep_moe.quant.schemes import SCHEMES, Scheme
from ep_moe.runtime.devices import as_device, on_device_of
from ep_moe.testing.distributed import made_on_the_host
from ep_moe.testing.expert_oracle import expected_and_limit, max_error_ratio
from ep_moe.testing.kernel_case import (
    EXACT,
    SLOTS,
    WITH_AN_EMPTY_SLOT,
    KernelCase,
    case_name,
    exact_expert,
    gradients,
    named,
    peer_gradients,
    recorded_gradients,
    require,
    written_gradients,
)
from ep_moe.types import Activation, LocalIds, PhysicalIds, Received, RowLayout, Weighting, WireIds
from ep_moe.weights.parts import etp_shard

TOP_K, HIDDEN, INNER = 3, 256, 256
TOP_KS = (1, 2, 8)  # with fewer rows
ROWS = (33, 1, 0, 257)
WIRES = (
    Wire(dispatch="fp8_block"),
    Wire(dispatch="fp8_row"),
    Wire(dispatch="fp8_tensor", input_scale=0.0125),  # another scale than that of any expert
    Wire(dispatch="mxfp8"),
    Wire(dispatch="nvfp4", input_scale=0.0015),
)
MANY, REPEATS = 257, 17  # distinct rows, and copies of each: more than 2**12 in all
COUNTS = (40, 0, 7, 1, 33)  # rows of each expert, in layouts that group rows by expert


@made_on_the_host
@on_device_of(lambda *_, device, **__: as_device(device))
def check_experts(
    kind: type[Experts],
    *,
    device: torch.device | str | int,
    schemes: Sequence[str] | None = None,
    activations: Sequence[Activation] | None = None,
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> int:
    """Check a kernel against its contract, on one device.

    Every scheme, dtype, activation and row layout of its capabilities is checked.

    Args:
        kind: The kernel's class.
        device: The device to run on.
        schemes: Names of schemes. Default: those of the capabilities that the GPU supports. On a CPU: all of the
            capabilities, for an emulation.
        activations: Activations to check. Default: those of the capabilities.
        hidden: H of the layers, for kernels that need larger sizes.
        inner: I of the layers, for kernels that need larger sizes.

    Returns:
        The number of layers that were checked.

    Raises:
        AssertionError: Names the first layer with a wrong result, or whose kernel raised an exception.
    """
    device = as_device(device)
    can, checked = kind.capabilities, 0
    can.check()
    for scheme in schemes or computed_on(device, kind):
        for dtype in sorted(can.dtypes, key=str):
            served = None
            for activation in activations or sorted(can.activations, key=lambda a: a.value):
                for bias in (False, True) if can.biases else (False,):
                    config = MoEConfig(
                        hidden_size=hidden,
                        intermediate_size=inner,
                        num_experts=8,
                        top_k=TOP_K,
                        activation=activation,
                        expert_bias=bias,
                    )
                    if kind.unsupported_reason(config, dtype, 1, SCHEMES[scheme]) is None:
                        with named(case_name(kind, config, SCHEMES[scheme], dtype), "layer"):
                            _check_layer(KernelCase(kind, config, SCHEMES[scheme], dtype, device))
                        checked, served = checked + 1, config
            if served is not None:
                with named(case_name(kind, served, SCHEMES[scheme], dtype), "other layers"):
                    _check_top_ks(kind, served, SCHEMES[scheme], dtype, device)
                    _rank_without_experts(KernelCase(kind, served, SCHEMES[scheme], dtype, device, held=()))
    assert checked, f"{kind.name}: its capabilities name nothing that it serves"
    return checked


def computed_on(device: torch.device, kind: type[Experts]) -> list[str]:
    gpu = device.type == "cuda"
    return [
        name
        for name in sorted(kind.capabilities.schemes)
        if not gpu or kind.unsupported_platform(SCHEMES[name], device) is None
    ]


def _check_layer(case: KernelCase) -> None:
    for count in ROWS:
        _rank_major(case, case.rows(count))
    if Weighting.COMBINE in case.kind.capabilities.weightings:
        _rank_major(case, case.rows(ROWS[0], Weighting.COMBINE))
    if case.kind.capabilities.per_route:
        _a_row_for_each_route(case)
    _rows_without_expert(case)
    _as_it_travelled(case)
    _slots_of_wider_ranks(case)
    for grouped, ids in _grouped(case):
        _other_layout(case, grouped, ids)
    if case.kind.capabilities.etp and case.kind.unsupported_reason(case.config, case.dtype, 2, case.scheme) is None:
        _pieces_sum_to_the_whole(case)
    if case.kind.capabilities.deterministic:
        _equal_bits(case)
    if case.kind.capabilities.cuda_graph and case.device.type == "cuda":
        _captured(case)
    if case.kind.capabilities.differentiable and case.scheme.plain and case.config.activation in EXACT:
        _gradients(case)


def _check_top_ks(
    kind: type[Experts], config: MoEConfig, scheme: Scheme, dtype: torch.dtype, device: torch.device
) -> None:
    for top_k in TOP_KS:
        other = dataclasses.replace(config, top_k=top_k)
        if kind.unsupported_reason(other, dtype, 1, scheme) is None:
            case = KernelCase(kind, other, scheme, dtype, device, held=WITH_AN_EMPTY_SLOT)
            for count in ROWS[:2]:
                _rank_major(case, case.rows(count))
            if top_k == min(TOP_KS):
                _many_rows(case)
                case.rewrite()
                _rank_major(case, case.rows(ROWS[0]), "weights that were written after a call")


def _many_rows(case: KernelCase) -> None:
    """Check a call with many copies of few rows, which may exceed the room or the tiles that a kernel has."""
    few = case.rows(MANY)
    assert few.local_ids is not None
    assert few.weights is not None
    x, ids, weights = (tensor.repeat(REPEATS, 1) for tensor in (few.x, few.local_ids, few.weights))
    y = case.run(dataclasses.replace(few, x=x, local_ids=LocalIds(ids), weights=weights))
    found = max_error_ratio(y, *(tensor.repeat(REPEATS, 1) for tensor in case.wanted(few)))
    require(found <= 1, case, f"{len(x)} rows: off by {found:.3g} times what rounding may cause")


def _rank_without_experts(case: KernelCase) -> None:
    """Check a rank without slots (L = 0): no row has a local expert, and all results are zero."""
    received = case.rows(ROWS[0])
    received.x.fill_(torch.nan)
    y = case.run(received)
    require(
        y.shape == received.x.shape, case, f"with no slots rows must be {list(received.x.shape)}, got {list(y.shape)}"
    )
    require((y == 0).all(), case, "with no slots all rows must be zero")
    _slots_of_wider_ranks(case)


def _rank_major(case: KernelCase, received: Received, beside: str = "") -> None:
    out = torch.full_like(received.x, torch.nan)
    y = case.run(received, out)
    what = f"{len(received.x)} rows, {received.weighting.value}{beside and f', {beside}'}"
    require(y.data_ptr() == out.data_ptr(), case, f"{what}: it must write into `out` and return it")
    assert received.local_ids is not None
    without = (received.local_ids < 0).all(1)
    require((y[without] == 0).all(), case, f"{what}: rows without an expert must be zero")
    found = max_error_ratio(y, *case.wanted(received))
    require(found <= 1, case, f"{what}: off by {found:.3g} times what rounding may cause")


def _a_row_for_each_route(case: KernelCase) -> None:
    received, top_k = case.rows(ROWS[0], Weighting.COMBINE), case.config.top_k
    assert received.local_ids is not None
    single = dataclasses.replace(
        received, x=received.x.repeat_interleave(top_k, 0), local_ids=LocalIds(received.local_ids.view(-1, 1))
    )
    y = case.run(dataclasses.replace(received, per_route=True))
    require(y.shape == single.x.shape, case, f"with per_route rows must be {list(single.x.shape)}, got {list(y.shape)}")
    require((y[(received.local_ids < 0).flatten()] == 0).all(), case, "a route without an expert must have a zero row")
    found = max_error_ratio(y, *case.wanted(single))
    require(found <= 1, case, f"with per_route: off by {found:.3g} times what rounding may cause")


def _rows_without_expert(case: KernelCase) -> None:
    received = case.rows(ROWS[0])
    expected = case.run(received).clone()
    assert received.local_ids is not None
    received.x[(received.local_ids < 0).all(1)] = torch.nan
    y = case.run(received)
    close = max_error_ratio(
        y, expected.double(), 2 * case.wanted(dataclasses.replace(received, x=received.x.nan_to_num()))[1]
    )
    require(close <= 1, case, "NaN in rows without an expert reached others, or did not become zero")


def _as_it_travelled(case: KernelCase) -> None:
    """Check unchecked ids (`WireIds`), and rows in each wire format."""
    received = case.rows(ROWS[0])
    assert received.local_ids is not None
    assert received.weights is not None
    none, base = received.local_ids < 0, 2 * SLOTS
    # absent routes become ids of other ranks
    ids = torch.where(none, torch.arange(TOP_K, device=case.device) * base, received.local_ids + base)
    ids[:, 1][none[:, 1]] = base  # an id of this rank, with weight 0
    wire = WireIds(PhysicalIds(ids.int()), base)
    weights = received.weights.masked_fill(none, 0.0)
    y = case.run(dataclasses.replace(received, local_ids=None, wire_ids=wire, weights=weights))
    found = max_error_ratio(y, *case.wanted(received))
    require(found <= 1, case, f"wire ids: off by {found:.3g} times what rounding may cause")
    for written in WIRES:
        _as_written(case, received, written)


def _as_written(case: KernelCase, received: Received, wire: Wire) -> None:
    data, scale = quantize_for_wire(received.x, wire)
    wide = torch.float32 if wire.dispatch in case.experts.row_formats else case.dtype
    plain = dataclasses.replace(received, x=dequantize_from_wire(data, scale, wire, wide))
    rows = dataclasses.replace(received, x=data, x_scale=scale, format=wire.dispatch, input_scale=wire.input_scale)
    y = case.run(rows)
    what = f"rows in {wire.dispatch}"
    require(y.dtype == case.dtype, case, f"the output of {what} must be {case.dtype}, not {y.dtype}")
    found = max_error_ratio(y, *case.wanted(plain))
    require(found <= 1, case, f"{what}: off by {found:.3g} times what rounding may cause")


def _slots_of_wider_ranks(case: KernelCase) -> None:
    """Check BATCHED rows for more slots than the rank has. A transport has room for the rank with the most slots."""
    slots = len(case.held)
    x = torch.ones(slots + 2, 3, case.config.hidden_size, dtype=case.dtype, device=case.device)
    counts = torch.full((slots + 2,), 2, dtype=torch.int32, device=case.device)
    y = case.run(
        Received(x=x, layout=RowLayout.BATCHED, weighting=Weighting.COMBINE, handle=None, expert_counts=counts)
    )
    require((y[slots:, :2] == 0).all(), case, "rows in slots that the rank does not have must be zero")


def _grouped(case: KernelCase) -> Iterator[tuple[Received, Tensor]]:
    """Yield BATCHED and CONTIGUOUS rows, with NaN in unused rows, and the expert of each flat row, -1 for none."""
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=case.device)
    most, hidden = max(COUNTS), case.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SLOTS, most, hidden, generator=generator).to(case.dtype).to(case.device)
    valid = torch.arange(most, device=case.device) < counts.unsqueeze(1)
    x[~valid] = torch.nan
    ids = torch.where(valid, torch.arange(SLOTS, device=case.device).unsqueeze(1), -1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    spare = torch.full((9, hidden), torch.nan, dtype=case.dtype, device=case.device)
    for weighting in case.kind.capabilities.weightings:
        weighted = weighting is Weighting.EXPERTS
        weights = torch.rand(SLOTS, most, generator=generator).to(case.device) + 0.1
        batched = Received(
            x=x,
            layout=RowLayout.BATCHED,
            weighting=weighting,
            handle=None,
            weights=weights if weighted else None,
            expert_counts=counts,
        )
        yield batched, ids.flatten()
        contiguous = Received(
            x=torch.cat([x[valid], spare]),
            layout=RowLayout.CONTIGUOUS,
            weighting=weighting,
            handle=None,
            weights=torch.cat([weights[valid], weights.new_ones(9)]) if weighted else None,
            expert_offsets=offsets,
        )
        yield contiguous, torch.cat([ids[valid], ids.new_full((9,), -1)])


def _other_layout(case: KernelCase, received: Received, ids: Tensor) -> None:
    y = case.run(received)
    require(y.shape == received.x.shape, case, f"{received.layout.value}: the output must have the rows' shape")
    flat = dataclasses.replace(
        received,
        x=received.x.flatten(0, -2),
        layout=RowLayout.RANK_MAJOR,
        local_ids=LocalIds(ids.unsqueeze(1)),
        weights=None if received.weights is None else received.weights.reshape(-1, 1),
    )
    valid = ids >= 0
    expected, limit = case.wanted(dataclasses.replace(flat, x=flat.x.nan_to_num()))
    found = max_error_ratio(y.flatten(0, -2)[valid], expected[valid], limit[valid])
    what = f"{received.layout.value}, {received.weighting.value}"
    require(found <= 1, case, f"{what}: off by {found:.3g} times what rounding may cause")


def _pieces_sum_to_the_whole(case: KernelCase) -> None:
    """Check that the outputs of two etp ranks, with half of each expert, sum to the output of whole experts.

    A bias must be added once.
    """
    received = case.rows(ROWS[0])
    total = torch.zeros_like(received.x, dtype=torch.float64)
    limit = torch.zeros_like(total)
    for rank in range(2):
        piece = KernelCase(
            case.kind,
            case.config,
            case.scheme,
            case.dtype,
            case.device,
            RankGroup(None, (0, 1), rank, FlightRecorder()),
        )
        total += piece.run(received).double()
        own = [
            {name: etp_shard(case.config, name, t, 2, rank) for name, t in expert.items()} for expert in case.tensors
        ]
        halved = dataclasses.replace(case.config, intermediate_size=case.config.intermediate_size // 2)
        assert received.local_ids is not None
        limit += expected_and_limit(
            halved,
            case.scheme,
            own,
            received.x,
            received.local_ids,
            received.weights,
            case.dtype,
            rounds=case.rounds,
        )[1]
    found = max_error_ratio(total, case.wanted(received)[0], limit)
    require(found <= 1, case, f"etp = 2: the pieces' sum is off by {found:.3g} times what rounding may cause")


def _equal_bits(case: KernelCase) -> None:
    options = ExpertsOptions(deterministic=True)
    same = KernelCase(case.kind, case.config, case.scheme, case.dtype, case.device, options=options)
    received = same.rows(ROWS[-1])
    first = same.experts(received).clone()
    for _ in range(20 if case.device.type == "cuda" else 4):  # fewer on a CPU, which has no races between programs
        require(torch.equal(same.experts(received), first), case, "equal calls must give equal bits")


def _captured(case: KernelCase) -> None:
    static = case.rows(ROWS[0])
    out = torch.empty_like(static.x)
    case.experts(static, out)
    torch.cuda.synchronize(case.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(case.device)):
        case.experts(static, out)
    fresh = case.rows(ROWS[0])
    assert static.local_ids is not None
    static.x.copy_(fresh.x.flip(0))
    static.local_ids.copy_(static.local_ids.roll(1, 0))
    graph.replay()
    found = max_error_ratio(out, *case.wanted(static))
    require(found <= 1, case, f"replayed with other rows: off by {found:.3g} times what rounding may cause")


def _gradients(case: KernelCase) -> None:
    config, dtype, device = case.config, case.dtype, case.device
    tensors = [exact_expert(config, expert, dtype, device) for expert in range(SLOTS)]
    exact = KernelCase(case.kind, config, case.scheme, dtype, device, tensors=tensors, trainable=True)
    for name, (found, wanted) in gradients(exact).items():
        require(torch.equal(found.double(), wanted), case, f"the gradient of {name} is wrong")
    kind = case.kind
    able = {written_gradients: kind.writes_gradients, recorded_gradients: True, peer_gradients: kind.trains_to_peers}
    for check in (check for check, can in able.items() if can):
        for what, written, meant in check(exact):
            same = written is meant or (written is not None and meant is not None and torch.equal(written, meant))
            require(same, case, f"{what} is wrong")
