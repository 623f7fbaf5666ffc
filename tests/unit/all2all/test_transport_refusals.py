"""Test why GPU transports are refused, with the exact sentence, and where they are chosen."""

from __future__ import annotations

import dataclasses
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from ep_moe import BackendUnavailable, ConfigError, EPContext, InputError, MoEConfig, MoELayer, RankLayout, Wire
from ep_moe.all2all import deepep
from ep_moe.all2all.base import DispatchShape
from ep_moe.all2all.deepep import DeepEPDispatcher
from ep_moe.all2all.flashinfer_nvlink import FlashInferNVLinkDispatcher
from ep_moe.all2all.hierarchical_static import HierarchicalNVLinkDispatcher
from ep_moe.all2all.nvlink_p2p.dispatcher import NVLinkP2PDispatcher
from ep_moe.all2all.pplx import PplxDispatcher
from ep_moe.all2all.torch_collectives import LocalDispatcher
from ep_moe.runtime.devices import without_peer_atomics
from ep_moe.selection.explain import choose, explain

BY = "set their size with EPContext.from_torchrun(max_tokens=...)"

GPU = torch.device("cuda")
BF16 = torch.bfloat16
FP8 = Wire(dispatch="fp8_block")


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    """Pretend to be one host with 4 Hopper GPUs and FlashInfer. Only the choice reads this; nothing runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for kind in (FlashInferNVLinkDispatcher, DeepEPDispatcher, NVLinkP2PDispatcher, PplxDispatcher):
        monkeypatch.setattr(kind, "available", classmethod(lambda cls: None))
    monkeypatch.setitem(sys.modules, "deep_ep", types.SimpleNamespace(Buffer=None))


def config(top_k: int = 2, hidden: int = 256) -> MoEConfig:
    return MoEConfig(hidden_size=hidden, intermediate_size=256, num_experts=32, top_k=top_k)


def layout(ep: int = 4, etp: int = 1) -> RankLayout:
    return RankLayout(world=ep * etp, rank=0, dp=ep * etp, ep=ep, etp=etp)


def reason(
    config=config(),  # noqa: B008
    layout=layout(),  # noqa: B008
    device=GPU,
    dtype=BF16,
    max_tokens: int | None = 128,
    name: str = "flashinfer_nvlink",
    wire: Wire | None = None,
) -> str | None:
    rows = explain(config, layout, device, dtype, max_tokens=max_tokens, wire=wire)
    (row,) = (row for row in rows if (row.all2all, row.experts) == (name, "reference"))
    return row.reason if row.status == "refused" else None


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8, 22])
def test_the_first_choices_where_they_can_run(top_k, monkeypatch):
    straight = "straight into peers' memory by own kernels, no host sync"
    found = choose(config(top_k), layout(), GPU, BF16, max_tokens=128)
    assert (found.all2all, found.reason) == ("nvlink_p2p", straight)
    found = choose(config(top_k), layout(), GPU, BF16)
    grows = "; its buffers grow with the calls, and max_tokens makes them once, for CUDA graphs"
    assert (found.all2all, found.reason) == ("nvlink_p2p", straight + grows)
    monkeypatch.setattr(NVLinkP2PDispatcher, "available", classmethod(lambda cls: "no Triton"))
    found = choose(config(top_k), layout(), GPU, BF16, max_tokens=128)
    assert (found.all2all, found.reason) == ("flashinfer_nvlink", "straight into peers' memory, no host sync")
    assert choose(config(top_k), layout(1), GPU, BF16, max_tokens=128).all2all == "local"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": None}, f"flashinfer_nvlink has fixed buffers; {BY}"),
        ({"config": config(23)}, "flashinfer_nvlink serves top_k of at most 22, got 23"),
        ({"config": config(2, 20)}, "flashinfer_nvlink needs hidden_size to be a multiple of 8 in bfloat16, got 20"),
        (
            {"wire": FP8, "config": config(2, 320)},
            "flashinfer_nvlink needs hidden_size to be a multiple of 128 with fp8_block rows, got 320",
        ),
        ({"dtype": torch.float32}, "flashinfer_nvlink carries bfloat16, float16, not float32"),
        ({"layout": layout(65)}, "flashinfer_nvlink serves at most 64 ranks, ep=65"),
        ({"layout": layout(8)}, "flashinfer_nvlink is for one host here: ep * etp is 8, and this host shows 4 GPUs"),
        ({"layout": layout(4, 2)}, "flashinfer_nvlink is for one host here: ep * etp is 8, and this host shows 4 GPUs"),
        ({"device": torch.device("cpu")}, "flashinfer_nvlink runs on cuda, not on cpu"),
    ],
)  # fmt: skip
def test_refusals(fields, sentence):
    assert reason() is None
    assert reason(**fields) == sentence


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": torch.float16}, "carries bfloat16, not float16"),
        ({"wire": Wire(combine="fp8")}, "carries plain rows in combine, not fp8 (Wire)"),
        ({"config": config(2, 20)}, "needs hidden_size to be a multiple of 8 in bfloat16, got 20"),
        ({"layout": layout(3)}, "is compiled for 2, 4, 8 ranks, ep=3"),
        ({"layout": layout(16)}, "serves at most 8 ranks, ep=16"),
        ({"layout": layout(8)}, "is for one host here: ep * etp is 8, and this host shows 4 GPUs"),
        ({"device": torch.device("cpu")}, "runs on cuda, not on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["deepep", "deepep_static"])
def test_refusals_of_deepep(name, fields, sentence):
    assert reason(name=name) is None
    assert reason(name=name, **fields) == f"{name} {sentence}"
    found = reason(name=name, max_tokens=None)
    assert found == (f"{name} has fixed buffers; {BY}" if "_" in name else None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": None}, f"pplx has fixed buffers; {BY}"),
        ({"wire": FP8}, "pplx needs hidden_size to be a multiple of 512 with fp8_block rows, got 256"),
        ({"dtype": torch.float32}, "pplx carries bfloat16, float16, not float32"),
        ({"layout": layout(8)}, "pplx is for one host here: ep * etp is 8, and this host shows 4 GPUs"),
        (
            {"layout": RankLayout(world=2, rank=0, dp=2, ep=2, ranks=(1, 0))},
            "pplx needs the ranks of the EP group in ascending order, got [1, 0]",
        ),
    ],
)
def test_refusals_of_pplx(fields, sentence):
    assert reason(name="pplx") is None
    assert reason(name="pplx", **fields) == sentence


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"config": config(2, 20)}, "nvlink_p2p needs hidden_size to be a multiple of 8 in bfloat16, got 20"),
        ({"layout": layout(9)}, "nvlink_p2p serves at most 8 ranks, ep=9"),
        ({"layout": layout(8)}, "nvlink_p2p is for one host here: ep * etp is 8, and this host shows 4 GPUs"),
        (
            {"config": config(2, 24), "wire": Wire(combine="fp8")},
            "nvlink_p2p needs hidden_size to be a multiple of 16 in float8_e4m3fn, got 24",
        ),
    ],
)
def test_refusals_of_nvlink_p2p(fields, sentence):
    assert reason(name="nvlink_p2p") is None
    assert reason(name="nvlink_p2p", wire=FP8) is None
    assert reason(name="nvlink_p2p", max_tokens=None) is None, "its buffers grow"
    assert reason(name="nvlink_p2p", **fields) == sentence


def test_gpus_without_nvlink(monkeypatch):
    """`nvlink_p2p` refuses GPUs without native atomics in a peer's memory.

    It sets flags by atomic operations, which not every GPU supports over PCI Express.
    """
    asked, atomic = [], types.SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3)
    apart: dict[tuple[int, int], tuple[int, int]] = {}

    def attribute(which, first, second):
        asked.append((which, first, second))
        return apart.get((first, second), (0, 1))

    driver = types.SimpleNamespace(
        CUdevice_P2PAttribute=atomic, cuInit=lambda flags: (0,), cuDeviceGetP2PAttribute=attribute
    )
    bindings = types.SimpleNamespace(driver=driver)
    for name, module in (("cuda", types.SimpleNamespace(bindings=bindings)), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    without_peer_atomics.cache_clear()
    assert reason(name="nvlink_p2p", layout=layout(2)) is None
    assert asked == [(3, 0, 1), (3, 1, 0)], "once, whatever number of kernels there is"
    for answer, found in (((0, 0), "nvlink_p2p needs NVLink between the GPUs, and 1 and 2 have none"), ((1, 0), None)):
        without_peer_atomics.cache_clear()
        apart[1, 2] = answer
        assert reason(name="nvlink_p2p", layout=layout(2)) is None, "of others"
        assert reason(name="nvlink_p2p", layout=layout(4)) == found
        assert reason(layout=layout(4)) is None
    without_peer_atomics.cache_clear()


def test_not_installed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert FlashInferNVLinkDispatcher.available() == "FlashInfer is not installed; pip install ep-moe[gpu]"
    with pytest.raises(BackendUnavailable, match="FlashInfer is not installed"):
        choose(config(), layout(), GPU, BF16, all2all="flashinfer_nvlink", max_tokens=8)


def test_bounds_of_a_context():
    context = EPContext.local(torch.device("cpu"))
    with (
        pytest.raises(ConfigError, match=r"token_limit is for a context with max_tokens: EPContext.from_torchrun"),
        context.token_limit(5),
    ):
        pass
    layer = MoELayer(config(), context)
    assert layer._dispatch_shape().max_tokens is None
    assert layer(torch.zeros(3, 256)).shape == (3, 256)


def test_buffers_are_counted_from_shapes():
    shape = DispatchShape(hidden_size=256, top_k=3, slots_per_rank=5, num_ranks=4, dtype=BF16, max_tokens=128)
    # 512 rows in each direction; top-3 travels as 4 ids and 4 weights of 4 bytes
    assert FlashInferNVLinkDispatcher.buffer_bytes(shape) == 512 * (2 * 512 + 4 * 8)
    assert PplxDispatcher.buffer_bytes(shape) == 5 * 512 * 512
    # 512 places, each for a received row, two results, and 3 ids and weights; 12 flags, aligned to 256 bytes. LL
    # packets for at most 128 tokens of a rank: 6 ids and weights and 128 words there, 128 words and one more back, each
    # rounded up to an even number. A packet for the weight of each of the rank's routes.
    places = 3 * 512 + 2 * 4 * 3
    assert NVLinkP2PDispatcher.buffer_bytes(shape) == 512 * (places + 8 * (134 + 130)) + 128 * 3 * 8 + 256
    many = dataclasses.replace(shape, max_tokens=1024)
    own = 1024 * 3 * 8 + 4 * 128 * 8 * (134 + 130) + 256
    assert NVLinkP2PDispatcher.buffer_bytes(many) == 4096 * places + own
    assert HierarchicalNVLinkDispatcher.buffer_bytes(many) == 4096 * places + own
    assert LocalDispatcher.buffer_bytes(shape) == 0


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (types.SimpleNamespace(Buffer=None, ElasticBuffer=None), None),
        (
            types.SimpleNamespace(ElasticBuffer=None),
            "this deep_ep has the interface of 2.x (ElasticBuffer), which has not",
        ),
        (types.SimpleNamespace(EPBuffer=None), "this deep_ep has the interface of 2.x (EPBuffer), which has not"),
        (
            types.SimpleNamespace(),
            "this deep_ep has no interface known here; install one with the V1 interface (Buffer)",
        ),
        (None, "deep_ep does not import"),
    ],
)
def test_deepep_is_known_by_what_it_has(library, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    found = reason(name="deepep")
    assert found is None if words is None else found.startswith(words)


@pytest.mark.parametrize(
    ("wire", "columns"),
    [(Wire(), 64), (Wire(dispatch="fp8_block"), 128), (Wire(dispatch="nvfp4", input_scale=0.1), 256)],
    ids=lambda wire: getattr(wire, "dispatch", ""),
)
def test_rows_are_aligned_as_they_travel(wire, columns):
    """A transport's alignment applies to the bytes that travel.

    128 bytes are 64 numbers in bf16, and 256 numbers in a format that packs two into a byte.
    """

    class Aligned(LocalDispatcher):
        capabilities = dataclasses.replace(LocalDispatcher.capabilities, alignment_bytes=128, scale_alignment_bytes=1)

    assert Aligned.unsupported_reason(columns, 2, 1, BF16, None, wire) is None
    assert "hidden_size to be a multiple of" in str(Aligned.unsupported_reason(columns // 2, 2, 1, BF16, None, wire))


def test_deepep_makes_no_buffer_in_a_capture(monkeypatch):
    """DeepEP refuses to make its buffer in a capture, because its ranks exchange addresses on the host."""
    monkeypatch.setattr(deepep, "capturing", lambda device: True)
    own = SimpleNamespace(_buffer=None, name="deepep")
    with pytest.raises(InputError, match="deepep makes its buffer in the first call: run the layer once before"):
        DeepEPDispatcher._connected(own, GPU)
    own._buffer = object()
    assert DeepEPDispatcher._connected(own, GPU) is own._buffer
