"""`check_dispatcher` finds each planted fault of a transport."""

import pytest
import torch

from ep_moe.all2all import flashinfer_nvlink, pplx
from ep_moe.testing import check_dispatcher, distributed, rank_device
from ep_moe.testing.transport_case import (
    FP8_TENSOR,
    dispatch_shape,
)
from ep_moe.testing.transport_promises import a_peer_that_never_comes
from tests.emulations.flashinfer_nvlink import communication
from tests.emulations.pplx import make_all2all
from tests.fixtures import planted_transports as planted


@distributed(2)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (planted.RaisesOnOneRank, r"torch_a2a: uneven and empty ranks .* on ranks \[0, 1\]; rank 1: ValueError: boom"),
        (planted.NotMadeOnOneRank, r"made on ranks \[1\]; rank 1: ValueError: no memory"),
        (planted.DestroyedOnce, r"torch_a2a: destroy, again on ranks \[1\]; rank 1: ValueError: it is gone"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_one_rank_raises_is_said_on_all(wrong, sentence, world_size):
    with pytest.raises(AssertionError, match=sentence):
        check_dispatcher(wrong, top_ks=(2,), dtypes=(torch.bfloat16,), deadline_s=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2, set_device=True)
def test_the_suite_sees_what_refusals_lack(world_size):
    flashinfer_nvlink.communication = communication
    with pytest.raises(AssertionError, match=r"one token too many .*: rows that miss a rank's experts must be NaN"):
        check_dispatcher(planted.Silent, top_ks=(2,), dtypes=(torch.bfloat16,), deadline_s=10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over memory that ranks share, on the CPU")
@distributed(2, set_device=True)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (planted.NumbersOfOtherRoutes, "numbers of routes come back .*turn 0, numbers of routes"),
        (planted.NumbersUnrefused, "one token too many .*: numbers of a rank's routes must be NaN"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_sees_wrong_numbers_of_routes(wrong, sentence, world_size):
    with pytest.raises(AssertionError, match=sentence):
        check_dispatcher(wrong, top_ks=(3,), dtypes=(torch.bfloat16,), wires=(), deadline_s=10)


@distributed(4, set_device=True)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (planted.Unweighted, "uneven and empty ranks"),
        (planted.ForeignIds, "local ids out of range"),
        (planted.OffByOne, "uneven and empty ranks"),
        (planted.Reversed, "uneven and empty ranks"),
        (planted.NextSlot, "uneven and empty ranks"),
        (planted.LastSlotElsewhere, "uneven and empty ranks"),
        (planted.OneForAll, "a local id comes twice in a row"),
        (planted.WeightsSwapped, "uneven and empty ranks"),
        (planted.SharedState, "two in flight"),
        (planted.LastRowLost, "uneven and empty ranks"),
        (planted.RowPerRoute, "rows go where they belong .*one rank: 192 rows with experts arrived, not 96"),
        (planted.WithoutStrides, "views are taken"),
        (planted.NothingAtAll, "uneven and empty ranks .*ValueError: nothing to send"),
        (planted.NanSpreads, "nan stays with its owner .*beside NaN"),
        (planted.WritesItsInput, "weights must be left as they were"),
        (planted.NoProblem, "what is wrong on one rank .*problem was not raised"),
        (planted.AnyId, "what is wrong on one rank .*id 16 was not refused"),
        (planted.OutOfOrder, "single rows keep their order and bits .*in another order"),
        (planted.Rounds, "single rows keep their order and bits .*with other bits"),
        (planted.NoGradients, "gradients flow .*gradient of x"),
        (planted.GradientsUnasked, "gradients are wanted alike .*rank 0 alone wants a gradient of x"),
        (planted.Untyped, "uneven and empty ranks .*fp8_tensor"),
        (planted.Unscaled, "uneven and empty ranks .*fp8_tensor"),
        (planted.CoarseScales, "rows that come plain are rounded as before the wire .*fp8_block.*other bits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_sees_it(wrong, sentence, world_size):
    formats = [FP8_TENSOR] if "fp8_tensor" in sentence else None
    with pytest.raises(Exception, match=sentence):
        check_dispatcher(wrong, top_ks=(2,), dtypes=(torch.bfloat16,), wires=formats, deadline_s=10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over the emulation, on the CPU")
@distributed(2, set_device=True)
@pytest.mark.parametrize(
    ("wrong", "dtype", "sentence"),
    [
        (planted.RowsRounded, torch.float32, "single rows come back with other bits"),
        (planted.RowsRounded, torch.float16, "single rows come back with other bits"),
        (planted.SumsRounded, torch.float32, "single rows come back with other bits"),
        (planted.WeightsRounded, torch.bfloat16, "weights arrive with other bits"),
        (planted.WeightsRoundedInCombine, torch.bfloat16, "a weighted row was rounded more than once"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_sees_what_is_rounded(wrong, dtype, sentence, world_size):
    pplx.make_all2all = make_all2all
    with pytest.raises(AssertionError, match=f"single rows keep their order and bits .*{sentence}"):
        check_dispatcher(wrong, top_ks=(2,), dtypes=(dtype,), wires=(), deadline_s=10)


@distributed(2, set_device=True)
def test_a_transport_that_does_not_wait_is_seen(world_size):
    with pytest.raises(AssertionError, match=r"a peer that never comes .* rank 0: rank 1 was not named in ''"):
        a_peer_that_never_comes(planted.Alone, dispatch_shape(world_size, 2, torch.float32), rank_device())
