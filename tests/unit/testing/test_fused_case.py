"""Test what a fused kernel is given and compared with, and each check of its contract, on one rank."""

import dataclasses

import pytest
import torch

from ep_moe import Activation, EPContext
from ep_moe.experts.fused.base import FusedCapabilities, FusedExperts
from ep_moe.experts.shared_experts import activate
from ep_moe.placement.expert_map import EMPTY
from ep_moe.testing import fused_contract as contract
from ep_moe.testing.fused_case import EXPERTS, Call, Shared, maps, out_of_range, raise_faults_on_all_ranks
from ep_moe.types import PhysicalIds, PhysicalRouting

CPU = torch.device("cpu")
BOUND = 24


class OneRank(FusedExperts):
    """A fused kernel in plain torch, slot by slot."""

    name = "one_rank"
    capabilities = FusedCapabilities(
        travels=False, routes=False, any_map=True, static=False, schemes=frozenset({"none"}),
        activations=frozenset({Activation.SWIGLU}), dtypes=frozenset({torch.float32}), biases=False, etp=False,
        cuda_graph=False, host_sync=False, deterministic=True, devices=frozenset({"cpu"}),
    )  # fmt: skip

    def compute(self, x, routed):
        w13, w2 = self.weights.dense("w13"), self.weights.dense("w2")
        out = torch.zeros_like(x)
        for slot in range(len(w13)):
            at, column = (routed.ids == slot).nonzero(as_tuple=True)
            found = activate(x[at] @ w13[slot].T, self.config) @ w2[slot].T
            out.index_add_(0, at, found * routed.weights[at, column, None])
        return out


def case_of(kind=OneRank, top_k=3, **options):
    with EPContext.local(CPU) as context:
        return contract.maker(kind, "none", top_k, BOUND, context)(Shared(), **options)


@pytest.fixture(scope="module")
def case():
    return case_of()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_kernel_passes(check):
    contract._run(check, case_of())


def kernel(change=None, **can):
    """Return a kernel class with a fault: change(kernel, x, routed, result)."""

    class Faulty(OneRank):
        capabilities = dataclasses.replace(OneRank.capabilities, **can)
        calls = 0

        def compute(self, x, routed):
            self.calls += 1
            return change(self, x, routed, super().compute(x, routed))

    return Faulty


def where(fits):
    """Return a fault for the calls that `fits` selects."""
    return lambda self, x, routed, y: y + fits(self, x, routed)


def routes_of(routed):
    return (routed.ids >= 0).sum(1)


FAULTS = {
    "T=7": (contract.uneven_and_empty_ranks, where(lambda self, x, routed: len(x) == 7)),
    "T=1": (contract.uneven_and_empty_ranks, where(lambda self, x, routed: len(x) == 1)),
    "as many as there can be": (contract.uneven_and_empty_ranks, where(lambda self, x, routed: len(x) == BOUND)),
    "all routes": (contract.all_to_one_rank, where(lambda self, x, routed: bool((routes_of(routed) == 3).all()))),
    "one route": (contract.all_to_one_rank, where(lambda self, x, routed: bool((routes_of(routed) == 1).all()))),
    "no route": (contract.all_to_one_rank, where(lambda self, x, routed: bool((routes_of(routed) == 0).all()) * 1e-30)),
    "a large id": (contract.ids_that_no_expert_has, where(lambda self, x, routed: bool((routed.ids > 99).any()))),
    "the first id behind": (
        contract.ids_that_no_expert_has,
        where(lambda self, x, routed: bool((routed.ids == self.dispatch_shape.num_physical).any())),
    ),
    "an id below -1": (contract.ids_that_no_expert_has, where(lambda self, x, routed: bool((routed.ids < -1).any()))),
    "int32": (contract.views_are_taken, where(lambda self, x, routed: routed.ids.dtype == torch.int32)),
    "strided ids": (contract.views_are_taken, where(lambda self, x, routed: not routed.ids.is_contiguous())),
    "strided weights": (contract.views_are_taken, where(lambda self, x, routed: not routed.weights.is_contiguous())),
    "strided rows": (contract.views_are_taken, where(lambda self, x, routed: not x.is_contiguous())),
    "an odd address": (contract.views_are_taken, where(lambda self, x, routed: x.data_ptr() % 16)),
    "numbers for NaN": (contract.nan_stays_with_its_owner, lambda self, x, routed, y: y.nan_to_num()),
    "other bits": (
        contract.equal_calls_give_equal_bits,
        lambda self, x, routed, y: y if self.calls != 4 else y.nextafter(y + 1),
    ),
    "the first weights": (contract.weights_rewritten_in_place, lambda self, x, routed, y: y * (self.calls != 1)),
    "the second weights": (contract.weights_rewritten_in_place, lambda self, x, routed, y: y * (self.calls != 2)),
    "one late": (contract.random_delays, where(lambda self, x, routed: len(x) == 6)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_single_fault_is_seen(fault):
    check, change = FAULTS[fault]
    with pytest.raises(AssertionError, match=check.__name__.replace("_", " ")):
        contract._run(check, case_of(kernel(change)))


def test_weights_that_a_kernel_kept_are_not_those_that_were_written():
    class Kept(OneRank):
        def compute(self, x, routed):
            if not hasattr(self, "first"):
                self.first = self.weights.dense("w13").clone()
            self.weights.dense("w13").copy_(self.first)
            return super().compute(x, routed)

    made = case_of(Kept)
    made.check(made.call(3), "the first ones")
    with pytest.raises(AssertionError, match=r"weights rewritten in place .*after other weights were written"):
        contract._run(contract.weights_rewritten_in_place, made)


# --- what a kernel is given -----------------------------------------------------------------------------------------


def slots_of(expert_map):
    return [expert_map.local(rank) for rank in range(expert_map.num_ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_map_holds_every_expert(ranks):
    for name, expert_map in maps(ranks).items():
        held = slots_of(expert_map)
        assert {expert for row in held for expert in row} - {EMPTY} == set(range(EXPERTS)), name
        assert len({len(row) for row in held}) == 1, f"{name}: a kernel needs as many slots on each rank"


@pytest.mark.parametrize("ranks", [2, 4])
def test_maps_of_several_ranks_have_replicas_and_one_size(ranks):
    found = maps(ranks)
    for name in ("replicas", "mixed"):
        held = [expert for row in slots_of(found[name]) for expert in row]
        assert len(held) > EXPERTS == len(set(held)), name
    assert len({one.slots_per_rank for one in found.values()}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_mixed_map_is_in_no_order(ranks):
    held = [expert for row in slots_of(maps(ranks)["mixed"]) for expert in row]
    assert held == [expert for row in slots_of(maps(ranks)["replicas"]) for expert in row][::-1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_hole_lies_between_experts_of_each_rank(ranks):
    for row in slots_of(maps(ranks)["holes"]):
        assert row[0] != EMPTY == row[1]
        assert row[-1] != EMPTY


def test_ids_out_of_range_stand_where_no_expert_was():
    ids = torch.tensor([[0, -1, -1], [-1, 5, -1], [-1, -1, -1], [11, -1, 3]])
    found = out_of_range(PhysicalRouting(PhysicalIds(ids), torch.rand(ids.shape)), 12)
    named = ids >= 0
    assert torch.equal(found.ids[named], ids[named])
    odd = set(found.ids[~named].tolist())
    assert 12 in odd, "the first that no slot has"
    assert min(odd) < -1
    assert max(odd) == 2**31 - 1
    assert all(one < 0 or one >= 12 for one in odd)


def test_objects_of_a_dispatch_shape_are_shared_until_they_are_given_back(case):
    destroyed = []
    shape, other = case.kernel.dispatch_shape, dataclasses.replace(case.kernel.dispatch_shape, max_tokens=1)

    class Kept:
        def destroy(self):
            destroyed.append(self)

    shared = Shared()
    first = shared.pool(shape, Kept)
    assert shared.pool(shape, Kept) is first
    assert shared.pool(other, Kept) is not first
    shared.destroy()
    assert destroyed.count(first) == 2, "destroy may be called again"
    assert shared.pool(shape, Kept) is not first


def test_a_call_is_the_same_for_a_seed_and_another_for_others(case):
    first, again, other = case.call(9, 1), case.call(9, 1), case.call(9, 2)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.routed.ids, again.routed.ids)
    assert not torch.equal(first.x, other.x)


@pytest.mark.parametrize("drop", [0.0, 1.0])
def test_routes_of_none_are_as_many_as_a_check_wants(drop, case):
    absent = case.call(9, drop=drop).routed.ids < 0
    assert absent.all() if drop else not absent.any()


def test_routes_of_none_are_among_others(case):
    absent = case.call(20).routed.ids < 0
    assert 0 < absent.sum() < absent.numel() / 2


WRONG = {
    "off by": lambda y: y + 1e-2,
    r"got \[9, 255\]": lambda y: y[:, :-1],
    "torch.float64": lambda y: y.double(),
    "off by inf": lambda y: y * torch.nan,
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_result_is_a_fault(words):
    made = case_of()
    call = made.call(9)
    made.check(call, "sound")
    assert not made.faults
    try:
        made.check(call, "what", WRONG[words](made.kernel(call.x, call.routed)))
    except RuntimeError:  # a result of another shape
        assert made.faults
    with pytest.raises(AssertionError, match=rf"one_rank: a check \(top_k 3, none, .* on ranks \[0\].*what: .*{words}"):
        raise_faults_on_all_ranks("a check", made)


def test_shapes_that_a_kernel_does_not_serve_have_no_case():
    with EPContext.local(CPU) as context:
        two = kernel(None, top_ks=frozenset({2}))
        assert contract.maker(two, "none", 3, BOUND, context) is None
        assert contract.maker(two, "none", 2, BOUND, context) is not None
        static = kernel(None, static=True)
        assert contract.maker(static, "none", 2, BOUND, context)(Shared()).kernel.dispatch_shape.max_tokens == BOUND


@pytest.mark.parametrize(("off", "faults"), [(0.9, 0), (1.5, 1)])
def test_an_error_is_a_fault_beyond_its_limit_alone(off, faults):
    made = case_of()
    call = made.call(9)
    y = made.kernel(call.x, call.routed)
    made.check(Call(call.x, call.routed, y.double() + off, torch.ones(y.shape)), "what", y)
    assert len(made.faults) == faults


def test_layers_of_one_context_share_what_their_kernel_keeps():
    with EPContext.local(CPU) as context:
        make, shared = contract.maker(OneRank, "none", 2, BOUND, context), Shared()
        first, second, apart = make(shared), make(shared), make(Shared())
    kept = first.kernel.pool(object)
    assert second.kernel.pool(object) is kept
    assert apart.kernel.pool(object) is not kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_weights_are_of_the_kernels_dtype(dtype):
    made = case_of(kernel(None, dtypes=frozenset({dtype})))
    assert {made.call(3).x.dtype, made.weights.dense("w13").dtype, made.kernel.dispatch_shape.dtype} == {dtype}
