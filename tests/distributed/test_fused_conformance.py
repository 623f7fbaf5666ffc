"""FlashInfer's mega kernels through the contract of fused kernels: emulated on the CPU, real on Hopper GPUs.

Run on GPUs with `torchrun --standalone --nproc-per-node 4 -m pytest tests/distributed/test_fused_conformance.py`.
"""

import pytest
import torch
import torch.distributed as dist

from ep_moe.experts.fused.flashinfer_mega import FlashInferMegaBf16, FlashInferMegaFp8
from ep_moe.testing import distributed, rank_device
from ep_moe.testing.fused_contract import check_fused, one_token_too_many
from ep_moe.types import PhysicalIds, PhysicalRouting
from tests.emulations.mega import on_the_cpu
from tests.fixtures.fused_conformance import ready
from tests.fixtures.fused_routes import RoutesInside

pytestmark = pytest.mark.timeout(600)  # FlashInfer's fp8 kernel compiles its GEMMs at first use
KINDS = [FlashInferMegaBf16, FlashInferMegaFp8]


@distributed(2, 4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_mega(kind, world_size):
    ready(kind)
    gpu = rank_device().type == "cuda"
    if not gpu and (kind is FlashInferMegaFp8) is (world_size == 4):
        return  # the emulation needs only one number of ranks for each kernel
    if kind is FlashInferMegaFp8:  # each shape compiles its GEMMs again
        check_fused(kind, top_ks=(3,), max_tokens=(24,))
    else:
        check_fused(kind, top_ks=(1, 2, 3, 8) if gpu else (3,), max_tokens=(24, 8, 200) if gpu else (24,))


@distributed(2)
def test_a_kernel_that_routes_inside(world_size):
    if rank_device().type == "cuda":
        pytest.skip("a stand-in in plain torch, for CPUs")
    assert check_fused(RoutesInside, top_ks=(1, 3), max_tokens=(24,)) == 2


# --- errors that the suite must see ---------------------------------------------------------------------------------


class OffByOne(FlashInferMegaBf16):
    def compute(self, x, routed):
        ids = torch.where(routed.ids >= 0, (routed.ids + 1) % self.dispatch_shape.num_physical, -1)
        return super().compute(x, PhysicalRouting(PhysicalIds(ids), routed.weights))


class Unweighted(FlashInferMegaBf16):
    def compute(self, x, routed):
        return super().compute(x, PhysicalRouting(routed.ids, torch.ones_like(routed.weights)))


class OwnCopy(FlashInferMegaBf16):
    """Plant: use a copy of the weights from construction time."""

    def bundle(self, stored):
        return super().bundle({name: tensor.clone() for name, tensor in stored.items()})


class NewWeightsOnce(FlashInferMegaBf16):
    """Keeps the second weights that it sees."""

    kept = ()

    def compute(self, x, routed):
        stored = {name: tensor.detach().clone() for name, tensor in self.weights.stored_tensors().items()}
        if len(self.kept) < 2 and not (self.kept and torch.equal(self.kept[-1]["w13"], stored["w13"])):
            self.kept = (*self.kept, stored)
        self._places = tuple(tensor.data_ptr() for tensor in self.weights.stored_tensors().values())
        self._held = self.bundle(self.kept[-1])
        return super().compute(x, routed)


class FirstLayersWeights(FlashInferMegaBf16):
    """Plant: all layers of a context use the weights of the first one."""

    def compute(self, x, routed):
        window = self.pool(self._too_late)
        window.first = getattr(window, "first", self._bundle())
        self._places, self._held = tuple(p.data_ptr() for p in self.weights.parameters()), window.first
        return super().compute(x, routed)


class OddAddress(FlashInferMegaBf16):
    """Plant: pass unaligned rows without a copy."""

    def compute(self, x, routed):
        if x.data_ptr() % 16:
            x = Odd(x)
        return super().compute(x, routed)


class Odd(torch.Tensor):
    def clone(self):
        return self


class OnTrust(FlashInferMegaBf16):
    """Plant: pass ids to the kernel without a check."""

    def compute(self, x, routed):
        window = self.pool(self._too_late)
        pad = torch.nn.functional.pad
        ids, weights = pad(routed.ids, (0, 1), value=-1).int(), pad(routed.weights, (0, 1))
        return window.run(self._bundle(), x.contiguous(), ids.contiguous(), weights.contiguous())


class LastRowLost(FlashInferMegaBf16):
    def compute(self, x, routed):
        out = super().compute(x, routed)
        out[23:] = 0
        return out


class Restless(FlashInferMegaBf16):
    """Plant: results within the bound, but different in each call."""

    turn = 0

    def compute(self, x, routed):
        self.turn += 1
        return super().compute(x, routed) * (1 + 2**-8 * (self.turn % 2))


class Residue(FlashInferMegaBf16):
    """Plant: rows without an expert are not zeroed."""

    def compute(self, x, routed):
        out = super().compute(x, routed)
        out[(routed.ids < 0).all(1)] = 2**-9
        return out


class Wider(FlashInferMegaBf16):
    def compute(self, x, routed):
        return super().compute(x, routed).float()


class NumbersForNaN(FlashInferMegaBf16):
    def compute(self, x, routed):
        return super().compute(x.nan_to_num(), routed)


class NothingAtAll(FlashInferMegaBf16):
    """Plant: fail if no rank has a token."""

    def compute(self, x, routed):
        tokens = torch.tensor(len(x))
        dist.all_reduce(tokens)
        if not tokens:
            raise ValueError("nothing to compute")
        return super().compute(x, routed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (OffByOne, "uneven and empty ranks"),
        (Unweighted, "uneven and empty ranks"),
        (LastRowLost, "uneven and empty ranks .*T="),
        (NothingAtAll, r"uneven and empty ranks .*nothing to compute"),
        (Residue, "uneven and empty ranks"),
        (Wider, "uneven and empty ranks .*torch.float32"),
        (NumbersForNaN, "nan stays with its owner .*NaN rows came back as numbers"),
        (Restless, "equal calls give equal bits"),
        (OwnCopy, "weights rewritten in place .*after other weights"),
        (NewWeightsOnce, "weights rewritten in place .*after the first ones came back"),
        (OddAddress, "views are taken .*16 bytes at a time"),
        (OnTrust, "ids that no expert has .*traps"),
        (FirstLayersWeights, "under any map|layers that share"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_sees_it(wrong, sentence, world_size):
    on_the_cpu(wrong)
    with pytest.raises(AssertionError, match=sentence):
        check_fused(wrong, top_ks=(3,), max_tokens=(24,), deadline_s=10)


class KeptToItself(FlashInferMegaBf16):
    def refuse(self, problem):
        self.rank_group.flight_recorder.refuse, tell = (lambda text: None), self.rank_group.flight_recorder.refuse
        try:
            super().refuse(problem)
        finally:
            self.rank_group.flight_recorder.refuse = tell


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2)
def test_the_suite_sees_a_refusal_that_reaches_no_peer(world_size):
    on_the_cpu(KeptToItself)
    with pytest.raises(AssertionError, match=r"one token too many .*: the refusal did not reach the other ranks"):
        one_token_too_many(KeptToItself, 3, 24, rank_device())
