"""Test the PTX analysis that decides whether warps stay together, on loops that hang and on loops that do not."""

from __future__ import annotations

import pytest

from ep_moe.runtime.warp_paths import divergent_branch, waiting_loops

SUM = """
$L__BB0_1:
    mov.u64 %rd1, 0x0;
    @%p2 ld.volatile.global.b64 { %rd1 }, [ %rd9 + 0 ];
    mov.b64 {_, %r1}, %rd1;
    redux.sync.add.s32 %r2, %r1, %r3;
    bar.sync 0;
    st.shared.b32 [ %r8 + 0 ], %r2;
    bar.sync 0;
    ld.shared.b32 %r4, [global_smem];
"""
LEAVE = """
    setp.gt.s32 %p1, %r4, 0;
    @%p1 bra $L__BB0_1;
"""


def kernel(body: str) -> str:
    return f"""
.version 8.7
.target sm_90a
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{{
    .reg .pred %p<9>;
    .reg .b32 %r<19>;
    .loc 1 11 0
    mov.u32 %r10, %tid.x;
    mov.u32 %r11, %ctaid.x;
    {body}
    ret;
}}
.section .debug_abbrev
{{
.b8 1
}}
"""


def test_a_sum_of_all_warps():
    assert divergent_branch(kernel(SUM + LEAVE)) is None
    assert waiting_loops(kernel(SUM + LEAVE)) == 1


def test_a_sum_of_all_and_of_each_warp_s_own():
    """A loop condition that adds each warp's own value to the common sum may diverge. This kernel hung."""
    found = divergent_branch(kernel(SUM + "add.s32 %r4, %r4, %r1;" + LEAVE))
    assert found is not None
    assert "bra $L__BB0_1" in found


def test_shared_memory_without_a_barrier():
    """Shared memory needs a barrier before and after the write.

    Before the write, a slow warp may still read the last sum. After it, a fast warp may read the old one.
    """
    head, write, read = SUM.split("bar.sync 0;")
    for left in (head + write + "bar.sync 0;" + read, head + "bar.sync 0;" + write + read):
        assert divergent_branch(kernel(left + LEAVE)) is not None


@pytest.mark.parametrize(
    ("address", "diverges"),
    [("and.b32 %r12, %r10, 7;", False), ("and.b32 %r12, %r10, 0x1F;", False), ("shl.b32 %r12, %r10, 2;", True),
     ("and.b32 %r12, %r10, 64;", True), ("shr.u32 %r12, %r10, 5;", True), ("shl.b32 %r12, %r11, 2;", False),
     ("mov.u32 %r12, %clock;", True), ("and.b32 %r13, %r10, 3;\nadd.s32 %r12, %r13, 64;", False)],
)  # fmt: skip
def test_what_a_warp_reads_back_from_a_place_of_its_own(address, diverges):
    own = SUM.replace("[global_smem]", "[%r12]")
    assert (divergent_branch(kernel(address + own + LEAVE)) is not None) is diverges


def test_a_loop_without_barriers_may_be_left_one_by_one_but_what_it_leaves_differs():
    alone = "$L__BB0_1: ld.global.gpu.acquire.b32 %r4, [%rd9];" + LEAVE
    assert waiting_loops(kernel(alone)) == 1
    assert divergent_branch(kernel(alone)) is None
    behind = alone + "@%p1 bra $L__BB0_2; bar.sync 0; $L__BB0_2:"
    assert divergent_branch(kernel(behind)) is not None
    counted = alone.replace("$L__BB0_1:", "$L__BB0_1: add.s32 %r5, %r5, 1;")
    behind = "setp.eq.s32 %p3, %r5, 9; @%p3 bra $L__BB0_2; bar.sync 0; $L__BB0_2:"
    assert divergent_branch(kernel(counted + behind)) is not None


def test_warps_that_meet_again_before_the_barrier():
    around = """
    ld.volatile.global.b32 %r4, [%rd9];
    setp.gt.s32 %p1, %r4, 0;
    @%p1 bra $L__BB0_2;
    st.global.b32 [%rd8], %r4;
$L__BB0_2:
    bar.sync 0;
    """
    assert divergent_branch(kernel(around)) is None
    assert divergent_branch(kernel(around.replace("st.global", "bar.sync 0; st.global"))) is not None
    assert divergent_branch(kernel(around.replace("st.global.b32 [%rd8], %r4;", "ret;"))) is not None


@pytest.mark.parametrize(
    "read",
    ["ld.volatile.global.b32 %r4, [%rd9];", "ld.relaxed.sys.global.b32 %r4, [%rd9];", "ld.acquire.gpu.b32 %r4, [%rd9];",
     "ld.b32 %r4, [%rd9];", "atom.global.gpu.acquire.add.u32 %r4, [%rd9], 0;", "@%p5 ld.global.b32 %r4, [%rd9];",
     "ld.mmio.relaxed.sys.global.b32 %r4, [%rd9];", "ld.global.b32 %r4, [%rd9];",
     "{ .reg .b32 got; ld.volatile.global.b32 got, [%rd9]; mov.b32 %r4, got; }"],
)  # fmt: skip
def test_every_way_to_poll(read):
    """Every kind of polling read is recognized. A plain load counts if a loop reads the same address again."""
    assert divergent_branch(kernel(f"setp.eq.s32 %p5, %r10, 0; $L__BB0_1: bar.sync 0; {read}" + LEAVE)) is not None


def test_a_barrier_s_own_reduction_is_the_same_for_all():
    loop = """
$L__BB0_1:
    ld.volatile.global.b32 %r4, [%rd9];
    setp.gt.s32 %p1, %r4, 0;
    barrier.cta.red.or.pred %p2, 0, %p1;
    @%p2 bra $L__BB0_1;
    """
    assert divergent_branch(kernel(loop)) is None
    assert divergent_branch(kernel(loop.replace("@%p2 bra", "@%p1 bra"))) is not None


def test_what_lies_between_is_no_loop():
    """Code placed between a loop's end and its head is not part of the loop.

    Triton 3.8 places a loop's head after its end, and the waiting loop is between them.
    """
    placed = """
    bra.uni $L__BB0_3;
$L__BB0_2:
""" + SUM + LEAVE + """
    ret;
$L__BB0_3:
    add.s32 %r5, %r5, 1;
    setp.lt.s32 %p3, %r5, %r6;
    @%p3 bra $L__BB0_3;
    @!%p3 bra $L__BB0_2;
    """  # fmt: skip
    assert waiting_loops(kernel(placed)) == 1
    assert divergent_branch(kernel(placed)) is None


@pytest.mark.parametrize(
    "body",
    ["brx.idx %r4, $targets;", "call.uni (%r4), waits, (%r5);", "$L__BB0_1: bra.uni $L__BB0_1;", "bra $nowhere;"],
)
def test_what_the_analysis_does_not_follow(body):
    assert divergent_branch(kernel(body)) is not None


@pytest.mark.parametrize(("made", "diverges"), [("mov.u32 %r7, %r5;", False), ("add.s32 %r7, %r5, %r11;", True)])
def test_a_carry_reaches_the_bits_above(made, diverges):
    """A carry reaches all higher bits.

    If two warps' values differ only in bit 5, their sums with another number may differ in all bits above.
    """
    body = f"""
    and.b32 %r5, %r10, 32;
    {made}
    shr.u32 %r6, %r7, 6;
$L__BB0_1:
    bar.sync 0;
    setp.gt.s32 %p1, %r6, 0;
    @%p1 bra $L__BB0_1;
"""
    assert (divergent_branch(kernel(body)) is not None) is diverges


def test_no_ptx():
    assert divergent_branch("") is not None
