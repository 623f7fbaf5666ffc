"""Test every kernel of this repository against the public contract, and that the contract detects errors."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ep_moe import Activation, MoEConfig, Wire, registry
from ep_moe.experts.flashinfer.cutlass import FlashInferCutlassExperts
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.quant.fp8 import round_blocks, widen_blocks
from ep_moe.quant.schemes import SCHEMES
from ep_moe.testing import check_experts, kernel_contract
from ep_moe.testing.kernel_case import KernelCase
from ep_moe.testing.kernel_contract import computed_on
from ep_moe.types import LocalIds, Received, RowLayout, Weighting
from ep_moe.weights.layouts.cutlass import SM90_SCHEMES, SM100_SCHEMES
from tests.emulations.trained_graph import recorded_kernel
from tests.fixtures.flashinfer_cutlass import emulated as emulated  # FlashInfer's module, emulated
from tests.fixtures.helpers import assert_same
from tests.fixtures.main_grads import writing_kernel

pytestmark = pytest.mark.filterwarnings("ignore:.*EPContext.tune:UserWarning")
CPU = torch.device("cpu")
GPU = torch.device("cuda")
FEW_ROWS = (33, 1, 0)  # an emulation in torch has no tiles; the reference is tested once with many rows


@pytest.mark.timeout(400)  # float64 on a CPU that other processes may use
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel", "int4_fp8"])
def test_reference_quantised(scheme, monkeypatch):
    monkeypatch.setattr(kernel_contract, "ROWS", FEW_ROWS)
    assert check_experts(ReferenceExperts, device="cpu", schemes=[scheme], activations=[Activation.SWIGLU]) == 6


@pytest.mark.parametrize("only", [None, [Activation.SWIGLU]], ids=["few rows", "many rows"])
def test_reference_with_every_activation(only, monkeypatch):
    """The reference computes each activation. Few rows suffice, since the activation does not depend on the size."""
    if only is None:
        monkeypatch.setattr(kernel_contract, "ROWS", FEW_ROWS)
    cases = 6 * len(only or Activation)  # as many cases as above for one scheme and activation
    options = {"schemes": ["none"], "activations": only, "hidden": 128, "inner": 128}
    assert check_experts(ReferenceExperts, device=CPU, **options) == cases


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulated, on the CPU")
@pytest.mark.parametrize("scheme", ["none", "mxfp4_fp8"])
def test_flashinfer_cutlass_emulated(scheme, emulated, monkeypatch):
    monkeypatch.setattr(kernel_contract, "ROWS", FEW_ROWS)
    only = [Activation.SWIGLU_CLAMPED]
    assert check_experts(FlashInferCutlassExperts, device=CPU, schemes=[scheme], activations=only) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("name", registry.built_in("experts"))
def test_on_a_gpu(name, monkeypatch):
    monkeypatch.undo()
    if why := registry.unsupported_reason("experts", name):
        pytest.skip(why)
    if not computed_on(GPU, registry.load("experts", name)):
        pytest.skip("this GPU's compute capability is not among the kernel's")
    assert check_experts(registry.load("experts", name), device=GPU) > 0


def test_only_what_a_gpu_computes_is_tried_on_it():
    everywhere = {"none", "fp8_static", "fp8_dynamic"}
    for found, computed in (((9, 0), set(SM90_SCHEMES)), ((10, 0), everywhere.union(SM100_SCHEMES)), ((8, 0), set())):
        with mock.patch("torch.cuda.get_device_capability", return_value=found):
            assert set(computed_on(GPU, FlashInferCutlassExperts)) == computed
    assert set(computed_on(CPU, FlashInferCutlassExperts)) == {*SM90_SCHEMES, *SM100_SCHEMES}


# --- errors that it must see ----------------------------------------------------------------------------------------


class Wrong(ReferenceExperts):
    """A kernel that changes its input or its result."""

    def compute(self, received, out):
        y = self.after(super().compute(self.before(received), None), received)
        return y if out is None else out.copy_(y)

    def before(self, received: Received) -> Received:
        return received

    def after(self, y, received):
        return y


class WeightsIgnored(Wrong):
    def before(self, received):
        return dataclasses.replace(received, weights=None if received.weights is None else received.weights * 0 + 1)


class NextExpert(Wrong):
    def before(self, received):
        ids = received.local_ids
        return dataclasses.replace(received, local_ids=torch.where(ids >= 0, (ids + 1) % 5, ids))


class EmptyRowsKept(Wrong):
    def after(self, y, received):
        return torch.where((received.local_ids < 0).all(1, keepdim=True), received.x, y)


class NotInPlace(ReferenceExperts):
    def compute(self, received, out):
        return super().compute(received, None)


class NanSpreads(Wrong):
    def before(self, received):
        return dataclasses.replace(received, x=received.x + 0 * received.x.sum(0))


class Drifts(Wrong):
    calls = 0

    def after(self, y, received):
        type(self).calls += 1
        return y * (1 + 2.0**-7 * (type(self).calls % 2)) if self.options.deterministic else y


class InputConsumed(Wrong):
    def after(self, y, received):
        received.x.zero_()
        return y


class EightChoicesAreTooMany(Wrong):
    def after(self, y, received):
        return y * 2 if received.local_ids is not None and received.local_ids.shape[1] == 8 else y


class ByLogicalId(ReferenceExperts):
    """A kernel that reads the slot with the expert's logical id."""

    def compute(self, received, out):
        numbers = torch.tensor([*self.weights.local_experts, -1], device=received.x.device)
        ids = numbers[received.local_ids.long()]
        return super().compute(dataclasses.replace(received, local_ids=ids), out)


class WeightsKept(ReferenceExperts):
    """A kernel that keeps the weights of its first call."""

    capabilities = dataclasses.replace(ReferenceExperts.capabilities, differentiable=False)

    def compute(self, received, out):
        if not hasattr(self, "first"):
            self.first = {name: self.weights.dense(name).detach().clone() for name in ("w13", "w2")}
        with mock.patch.object(self.weights, "dense", self.first.get):
            return super().compute(received, out)


class AnExpertAtLeast(ReferenceExperts):
    def compute(self, received, out):
        self.weights.dense("w13")[0]
        return super().compute(received, out)


class OneRowIsTooFew(Wrong):
    rows = 1

    def after(self, y, received):
        return y * 2 if len(received.x) == self.rows else y


class NoRowsAreTooFew(ReferenceExperts):
    def compute(self, received, out):
        if not len(received.x):
            raise ValueError("no rows")
        return super().compute(received, out)


class RowsBeyondATile(OneRowIsTooFew):
    rows = 257


class TwoChoicesAreTooFew(Wrong):
    def after(self, y, received):
        return y * 2 if received.local_ids is not None and received.local_ids.shape[1] == 2 else y


class GroupedRowsAreAnothers(Wrong):
    """A kernel that doubles rows with one expert each, as grouped layouts have."""

    def after(self, y, received):
        return y * 2 if received.local_ids is not None and received.local_ids.shape[1] == 1 else y


class ManyRowsAreLost(Wrong):
    def after(self, y, received):
        y[4096:] = 0
        return y


class ShortIdsAlone(ReferenceExperts):
    def compute(self, received, out):
        if received.local_ids.dtype != torch.int32:
            raise TypeError("ids must be int32")
        return super().compute(received, out)


class NotMade(ReferenceExperts):
    def __init__(self, *arguments, **options):
        raise ValueError("no memory")


class RowsWithoutGradient(Wrong):
    def before(self, received):
        return dataclasses.replace(received, x=received.x.detach())


class WeightsWithoutGradient(Wrong):
    def before(self, received):
        return dataclasses.replace(received, weights=None if received.weights is None else received.weights.detach())


class GradientOfOtherColumns(ReferenceExperts):
    def compute(self, received, out):
        w2 = self.weights.get_parameter("w2")
        if w2.requires_grad:
            w2.register_hook(lambda gradient: gradient.roll(1, 2))
        return super().compute(received, out)


class BiasOnEveryRank(ReferenceExperts):
    def compute(self, received, out):
        self.weights.etp = dataclasses.replace(self.weights.etp, rank=0)
        return super().compute(received, out)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (WeightsIgnored, "times what rounding may cause"),
        (NextExpert, "times what rounding may cause"),
        (EmptyRowsKept, "rows without an expert must be zero|times what rounding may cause"),
        (NotInPlace, "it must write into `out`"),
        (NanSpreads, "NaN in rows without an expert"),
        (Drifts, "equal calls must give equal bits"),
        (InputConsumed, "x must be left as it was"),
        (RowsWithoutGradient, "the gradient of x is wrong"),
        (WeightsWithoutGradient, "the gradient of weights is wrong"),
        (GradientOfOtherColumns, "the gradient of w2 of slot 0 is wrong"),
        (EightChoicesAreTooMany, "times what rounding may cause"),
        (BiasOnEveryRank, "etp = 2: the pieces' sum is off"),
        (ByLogicalId, "33 rows, experts: off by"),
        (WeightsKept, "33 rows, experts, weights that were written after a call: off by"),
        (AnExpertAtLeast, r"reference \(none, .*\): rank_major rows \[33\]: IndexError: "),
        (ManyRowsAreLost, "4369 rows: off by"),
        (GroupedRowsAreAnothers, r"batched, \w+: off by"),
        (OneRowIsTooFew, "1 rows, experts: off by"),
        (NoRowsAreTooFew, r"rank_major rows \[0\]: ValueError: no rows"),
        (RowsBeyondATile, "257 rows, experts: off by"),
        (TwoChoicesAreTooFew, "33 rows, experts: off by"),
        (ShortIdsAlone, r"reference \(none, .*\): batched rows \[7, 3\]: TypeError: ids must be int32"),
        (NotMade, r"reference \(none, .*\): layer: ValueError: no memory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_is_seen(wrong, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_experts(wrong, device=CPU, schemes=["none"], activations=[Activation.RELU2])


def test_each_comparison_has_the_limit(monkeypatch):
    """Each comparison allows an error up to the rounding bound, and fails for a larger one in one place."""
    monkeypatch.setattr(kernel_contract, "ROWS", (2, 1))
    monkeypatch.setattr(kernel_contract, "_gradients", lambda case: None)
    config = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=8, top_k=3, activation=Activation.RELU2)
    case, found = KernelCase(ReferenceExperts, config, SCHEMES["none"], torch.bfloat16, CPU), []
    monkeypatch.setattr(kernel_contract, "max_error_ratio", lambda *_: found.append(1.0) or found[-1])
    kernel_contract._check_layer(case)
    for place in range(len(found)):
        left = iter([1.0] * place + [1.01] + [1.0] * len(found))
        monkeypatch.setattr(kernel_contract, "max_error_ratio", lambda *_, left=left: next(left))
        with pytest.raises(AssertionError, match=r"reference \(none, "):
            kernel_contract._check_layer(case)


@pytest.mark.parametrize(("reads", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_rows_in_a_format_are_compared_with_the_numbers_that_a_kernel_has(reads, dtype):
    """Rows in a wire format are compared with the numbers that a kernel reads.

    A kernel that reads the format gets all bits of the rounded rows. Any other kernel gets them widened to the layer's
    dtype.
    """
    x, wanted, wire = torch.randn(2, 128).bfloat16(), [], Wire(dispatch="fp8_block")
    formats = frozenset({"plain", "fp8_block"} if reads else {"plain"})
    case = SimpleNamespace(
        experts=SimpleNamespace(row_formats=formats), dtype=torch.bfloat16, run=lambda received: x,
        wanted=lambda received: (wanted.append(received), (x.double(), torch.ones_like(x).double()))[1],
    )  # fmt: skip
    received = Received(x, RowLayout.RANK_MAJOR, Weighting.COMBINE, None, local_ids=LocalIds(torch.zeros(2, 1)))
    kernel_contract._as_written(case, received, wire)
    (compared,) = wanted
    assert_same(compared.x, widen_blocks(*round_blocks(x), dtype))


# --- where torch makes new tensors elsewhere than on the host by default ---------------------------------------------


def test_the_contract_of_kernels(monkeypatch):
    # the device of a tensor does not depend on the number of rows
    monkeypatch.setattr(kernel_contract, "ROWS", (33, 1, 0))
    with torch.device("meta"):
        asked = {"schemes": ["none", "fp8_block"], "activations": [Activation.SWIGLU], "hidden": 128}
        assert check_experts(ReferenceExperts, device=torch.device("cpu"), **asked) > 0


@pytest.mark.parametrize("wrong", [None, "factor", "accumulate", "returned"])
def test_gradients_that_a_kernel_writes_are_those_that_it_returns(wrong, monkeypatch):
    """Gradients written into buffers equal those returned, and three planted errors are detected."""
    monkeypatch.setattr(kernel_contract, "ROWS", FEW_ROWS)
    with writing_kernel(wrong):
        what = "what is returned for w13, which .*," if wrong == "returned" else "the written gradient of w13"
        sentence = rf"^reference \(none, .*: {what} is wrong$"
        with nullcontext() if wrong is None else pytest.raises(AssertionError, match=sentence):
            check_experts(ReferenceExperts, device=CPU, schemes=["none"], activations=[Activation.SWIGLU])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (None, ""),
        ("kept apart", "the gradient of x, recorded, is wrong"),
        ("product apart", "the gradient of w13, recorded, is wrong"),
        ("gradient of x", "the gradient of x, recorded, is wrong"),
        ("rows to peers", "what is written to peers is wrong"),
        ("all to peers", "what is written to peers is wrong"),
        ("gradient to peers", "the gradient of x that is written to peers is wrong"),
    ],
)
def test_calls_that_are_recorded_or_write_to_peers(wrong, sentence, monkeypatch):
    """Recorded calls and writes to peers are checked, and six planted errors are detected.

    Two of the errors are in memory that a replay does not write.
    """
    monkeypatch.setattr(kernel_contract, "ROWS", FEW_ROWS)
    sentence = rf"^reference \(none, .*: {sentence}$"
    with recorded_kernel(wrong), nullcontext() if wrong is None else pytest.raises(AssertionError, match=sentence):
        check_experts(ReferenceExperts, device=CPU, schemes=["none"], activations=[Activation.SWIGLU])
