"""Test RankLayout: tables written by hand, properties of all layouts, and errors of wrong ones."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_moe import ConfigError, ParallelConfig, RankLayout, Tokens
from ep_moe.parallel.layout import split_range

unhurried = settings(deadline=None)
OF_THE_TABLE = ("tp", "dp", "pp", "ep", "etp", "lockstep", "expert_data")
KINDS = (*OF_THE_TABLE, "stage", "ep_node", "ep_rail")
# sizes; all groups of each kind, one digit per rank, "-" for groups of one rank; and one rank's coordinates in the
# order rank, pp, dp, tp, replica, ep, etp
TABLES = {
    "experts over everything": (
        {"world": 8, "dp": 2, "tp": 4, "ep": 8},
        "tp 0123 4567; dp 04 15 26 37; pp -; ep 01234567; etp -; lockstep 01234567; expert_data -",
        (6, 0, 1, 2, 0, 6, 0),
    ),
    "ep = dp, etp = tp": (
        {"world": 8, "dp": 2, "tp": 4, "ep": 2, "etp": 4},
        "tp 0123 4567; dp 04 15 26 37; pp -; ep 04 15 26 37; etp 0123 4567; lockstep 01234567; expert_data -",
        (6, 0, 1, 2, 0, 1, 2),
    ),
    "ep = 1, cut over everything": (
        {"world": 8, "dp": 2, "tp": 4, "ep": 1, "etp": 8},
        "tp 0123 4567; dp 04 15 26 37; pp -; ep -; etp 01234567; lockstep 01234567; expert_data -",
        (6, 0, 1, 2, 0, 0, 6),
    ),
    "ep = 1, all experts on every rank": (
        {"world": 8, "dp": 2, "tp": 4, "ep": 1},
        "tp 0123 4567; dp 04 15 26 37; pp -; ep -; etp -; lockstep 0123 4567; expert_data 01234567",
        (6, 0, 1, 2, 6, 0, 0),
    ),
    "replicas": (
        {"world": 4, "dp": 4, "ep": 2},
        "tp -; dp 0123; pp -; ep 01 23; etp -; lockstep 01 23; expert_data 02 13",
        (3, 0, 3, 0, 1, 1, 0),
    ),
    "pipeline": (
        {"world": 8, "pp": 2, "dp": 2, "tp": 2, "ep": 4},
        "tp 01 23 45 67; dp 02 13 46 57; pp 04 15 26 37; ep 0123 4567; etp -; lockstep 0123 4567; expert_data -",
        (6, 1, 1, 0, 0, 2, 0),
    ),
    "all axes but pp": (
        {"world": 8, "dp": 4, "tp": 2, "ep": 2, "etp": 2},
        "tp 01 23 45 67; dp 0246 1357; pp -; ep 02 13 46 57; etp 01 23 45 67; lockstep 0123 4567; "
        "expert_data 04 15 26 37",
        (7, 0, 3, 1, 1, 1, 1),
    ),
    "etp wider than tp": (
        {"world": 8, "dp": 4, "tp": 2, "ep": 2, "etp": 4},
        "tp 01 23 45 67; dp 0246 1357; pp -; ep 04 15 26 37; etp 0123 4567; lockstep 01234567; expert_data -",
        (6, 0, 3, 0, 0, 1, 2),
    ),
    "ep groups across tp groups": (
        {"world": 6, "dp": 3, "tp": 2, "ep": 3},
        "tp 01 23 45; dp 024 135; pp -; ep 012 345; etp -; lockstep 012345; expert_data 03 14 25",
        (4, 0, 2, 0, 1, 1, 0),
    ),
    "the same with tokens of each rank's own": (
        {"world": 6, "dp": 3, "tp": 2, "ep": 3, "tokens": Tokens.SHARDED},
        "tp 01 23 45; dp 024 135; pp -; ep 012 345; etp -; lockstep 012 345; expert_data 03 14 25",
        (4, 0, 2, 0, 1, 1, 0),
    ),
}


def written(groups: list[list[int]]) -> str:
    return "-" if all(len(group) == 1 for group in groups) else " ".join("".join(map(str, g)) for g in groups)


@pytest.mark.parametrize("name", TABLES)
def test_groups_are_those_of_the_table(name):
    sizes, expected, _ = TABLES[name]
    for rank in range(sizes["world"]):
        groups = RankLayout(**sizes, rank=rank).groups
        assert "; ".join(f"{kind} {written(groups[kind])}" for kind in OF_THE_TABLE) == expected
        assert all(sum(map(len, lists)) == sizes["world"] for lists in groups.values())


@pytest.mark.parametrize("name", TABLES)
def test_coordinates_are_those_of_the_table(name):
    sizes, _, (rank, *expected) = TABLES[name]
    layout = RankLayout(**sizes, rank=rank)
    axes = ("pp", "dp", "tp", "replica", "ep", "etp")
    assert [getattr(layout, f"{axis}_rank") for axis in axes] == expected
    for kind, lists in layout.groups.items():
        assert [layout.group(kind)] == [ranks for ranks in lists if rank in ranks], kind


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def all_ranks(draw) -> list[RankLayout]:
    """Draw the layouts of all ranks of one job."""
    pp, dp, tp = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    block = draw(st.sampled_from(divisors(dp * tp)))
    etp = draw(st.sampled_from(divisors(block)))
    sizes = {"pp": pp, "dp": dp, "tp": tp, "ep": block // etp, "etp": etp, "tokens": draw(st.sampled_from(Tokens))}
    return [RankLayout(world=pp * dp * tp, rank=rank, **sizes) for rank in range(pp * dp * tp)]


@unhurried
@given(all_ranks(), st.randoms(use_true_random=False))
def test_any_rank_may_be_at_any_place(layouts, random):
    """`ranks` maps places to ranks: coordinates are those of the place, and groups hold the ranks at their places."""
    table = tuple(random.sample(range(100), len(layouts)))
    for place, plain in enumerate(layouts):
        moved = dataclasses.replace(plain, rank=table[place], ranks=table)
        assert (moved.place, moved.rank) == (place, table[place])
        for axis in ("pp", "dp", "tp", "replica", "ep", "etp"):
            assert getattr(moved, f"{axis}_rank") == getattr(plain, f"{axis}_rank")
        for kind in KINDS:
            assert moved.groups[kind] == [[table[at] for at in places] for places in plain.groups[kind]]
            assert moved.group(kind) == [table[at] for at in plain.group(kind)]


@unhurried
@given(all_ranks())
def test_groups_of_a_kind_partition_the_world(layouts):
    for layout in layouts:
        assert layout.groups == layouts[0].groups
        assert tuple(layout.groups) == KINDS
        for kind, groups in layout.groups.items():
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world)), kind
            assert layout.rank in layout.group(kind)
            assert layout.group(kind) in groups


@unhurried
@given(all_ranks())
def test_groups_have_the_right_size(layouts):
    for layout in layouts:
        sizes = {kind: len(layout.group(kind)) for kind in KINDS}
        assert sizes == {
            "tp": layout.tp,
            "dp": layout.dp,
            "pp": layout.pp,
            "ep": layout.ep,
            "etp": layout.etp,
            "lockstep": layout.lockstep,
            "expert_data": layout.replicas,
            "stage": layout.stage,
            "ep_node": 1,
            "ep_rail": 1,
        }
        assert {len(group) for kind in KINDS for group in layout.groups[kind]} == set(sizes.values())


@unhurried
@given(all_ranks())
def test_coordinates_reconstruct_the_rank_in_both_views(layouts):
    for a in layouts:
        assert a.rank == (a.pp_rank * a.dp + a.dp_rank) * a.tp + a.tp_rank
        assert a.rank == ((a.pp_rank * a.replicas + a.replica_rank) * a.ep + a.ep_rank) * a.etp + a.etp_rank
        bounds = {"pp": a.pp, "dp": a.dp, "tp": a.tp, "replica": a.replicas, "ep": a.ep, "etp": a.etp}
        assert all(0 <= getattr(a, f"{axis}_rank") < size for axis, size in bounds.items())
        assert a.stage == a.dp * a.tp == a.replicas * a.ep * a.etp


@unhurried
@given(all_ranks())
def test_members_of_a_group_differ_in_its_coordinate_alone(layouts):
    views = {
        "tp": ("tp_rank", "dp_rank", "pp_rank"),
        "dp": ("dp_rank", "tp_rank", "pp_rank"),
        "pp": ("pp_rank", "dp_rank", "tp_rank"),
        "ep": ("ep_rank", "etp_rank", "replica_rank", "pp_rank"),
        "etp": ("etp_rank", "ep_rank", "replica_rank", "pp_rank"),
        "expert_data": ("replica_rank", "ep_rank", "etp_rank", "pp_rank"),
    }
    for kind, (own, *others) in views.items():
        for group in layouts[0].groups[kind]:
            members = [layouts[rank] for rank in group]
            assert [getattr(member, own) for member in members] == list(range(len(group))), kind
            assert len({tuple(getattr(member, other) for other in others) for member in members}) == 1, kind


@unhurried
@given(all_ranks())
def test_lockstep_holds_all_ranks_of_a_layers_collectives(layouts):
    for layout in layouts:
        block = set(layout.group("lockstep"))
        kinds = ["ep", "etp"] + ["tp"] * (layout.tokens is Tokens.REPLICATED)
        for rank in block:  # check every member, not only this rank: a rank that waits for one waits for all
            for kind in kinds:
                assert set(layouts[rank].group(kind)) <= block, kind
        assert block <= set(range(layout.pp_rank * layout.stage, (layout.pp_rank + 1) * layout.stage))


@unhurried
@given(all_ranks())
def test_lockstep_holds_no_more_ranks_than_needed(layouts):
    layout = layouts[0]
    reached, before = {0}, set()
    while reached != before:
        before = set(reached)
        kinds = ["ep", "etp"] + ["tp"] * (layout.tokens is Tokens.REPLICATED)
        reached |= {peer for rank in before for kind in kinds for peer in layouts[rank].group(kind)}
    assert reached == set(layout.group("lockstep"))


@unhurried
@given(all_ranks())
def test_split_is_tp_where_tokens_are_replicated(layouts):
    for layout in layouts:
        assert layout.split == (layout.tp if layout.tokens is Tokens.REPLICATED else 1)
        assert layout.lockstep == math.lcm(layout.split, layout.ep * layout.etp)
    assert all(one.token_ranks * one.split == one.stage for one in layouts)


@unhurried
@given(all_ranks())
def test_describe_is_the_same_on_all_ranks(layouts):
    assert len({str(layout.describe()) for layout in layouts}) == 1
    assert layouts[0].describe()["tokens"] in ("replicated", "sharded")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 8, "rank": 8}, "RankLayout.rank must be in [0, world), got rank=8, world=8"),
        ({"world": 8, "rank": -1}, "RankLayout.rank must be in [0, world), got rank=-1, world=8"),
        ({"world": 0, "rank": 0}, "RankLayout.world must be at least 1, got 0"),
        ({"world": 8, "rank": 0, "dp": 0}, "RankLayout.dp must be at least 1, got 0"),
        ({"world": 8, "rank": 0, "etp": -2}, "RankLayout.etp must be at least 1, got -2"),
        (
            {"world": 8, "rank": 0, "pp": 1, "dp": 3, "tp": 2},
            "world must equal pp * dp * tp, got world=8 and pp=1 * dp=3 * tp=2 = 6; launch that many ranks or change",
        ),
        (
            {"world": 8, "rank": 0, "dp": 4, "tp": 2, "ep": 3, "etp": 2},
            "ep * etp must divide dp * tp, got ep=3 * etp=2 = 6 and dp=4 * tp=2 = 8",
        ),
        # larger than a pipeline stage, though not larger than the world
        (
            {"world": 8, "rank": 0, "pp": 2, "dp": 4, "ep": 8},
            "ep * etp must divide dp * tp, got ep=8 * etp=1 = 8 and dp=4 * tp=1 = 4",
        ),
    ],
)
def test_error_prints_the_equation_with_its_values(sizes, message):
    with pytest.raises(ConfigError) as error:
        RankLayout(**sizes)
    assert message in str(error.value)


def test_open_ep_needs_an_etp_that_divides():
    with pytest.raises(ConfigError) as error:
        RankLayout.from_config(ParallelConfig(dp=2, tp=4, etp=3), world=8, rank=0)
    assert "ParallelConfig.etp must divide dp * tp, got etp=3, dp=2, tp=4" in str(error.value)


@pytest.mark.parametrize("name", ["pp", "dp", "tp", "ep", "etp"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_sizes_are_counts(name, value):
    with pytest.raises(ConfigError) as error:
        ParallelConfig(**{name: value})
    assert f"ParallelConfig.{name} must be an integer of at least 1, got {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("parallel", "world", "sizes"),
    [
        (ParallelConfig.expert_parallel(dp=2, tp=4), 8, (1, 2, 4, 8, 1, 1)),
        (ParallelConfig.expert_parallel(dp=4), 4, (1, 4, 1, 4, 1, 1)),
        (ParallelConfig.expert_parallel(dp=2, tp=2, pp=3), 12, (3, 2, 2, 4, 1, 1)),
        (ParallelConfig.expert_tensor_parallel(dp=2, tp=4), 8, (1, 2, 4, 2, 4, 1)),
        (ParallelConfig.expert_tensor_parallel(dp=2, tp=4, pp=2), 16, (2, 2, 4, 2, 4, 1)),
        (ParallelConfig.tensor_parallel(tp=4), 4, (1, 1, 4, 1, 4, 1)),
        (ParallelConfig.tensor_parallel(dp=2, tp=4, pp=2), 16, (2, 2, 4, 1, 8, 1)),
        (ParallelConfig(dp=2, tp=4, etp=2), 8, (1, 2, 4, 4, 2, 1)),
        (ParallelConfig(dp=8, ep=2, etp=2), 8, (1, 8, 1, 2, 2, 2)),
    ],
    ids=str,
)
def test_configuration_to_sizes(parallel, world, sizes):
    layout = RankLayout.from_config(parallel, world=world, rank=world - 1)
    assert (layout.pp, layout.dp, layout.tp, layout.ep, layout.etp, layout.replicas) == sizes
    assert layout.tokens is Tokens.REPLICATED


def test_configuration_hands_the_tokens_on():
    parallel = ParallelConfig(dp=2, tp=2, tokens=Tokens.SHARDED)
    assert RankLayout.from_config(parallel, world=4, rank=0).tokens is Tokens.SHARDED


def test_text_names_rank_and_sizes():
    layout = RankLayout(world=8, rank=3, dp=4, tp=2, ep=2, etp=2, tokens=Tokens.SHARDED)
    assert str(layout) == "rank 3 of 8 (pp=1 dp=4 tp=2 ep=2 etp=2 replicas=2 tokens=sharded)"


@pytest.mark.parametrize(
    ("total", "parts", "spans"),
    [
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_split_range_of_a_few(total, parts, spans):
    assert [split_range(total, parts, index) for index in range(parts)] == spans


@unhurried
@given(st.integers(0, 10**6), st.integers(1, 64))
def test_split_ranges_follow_each_other_and_differ_by_one_at_most(total, parts):
    spans = [split_range(total, parts, index) for index in range(parts)]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == total
    sizes = [stop - start for start, stop in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("tokens", [Tokens.REPLICATED, Tokens.SHARDED])
@pytest.mark.parametrize(
    ("dp", "tp", "ep", "etp"), [(1, 1, 1, 1), (4, 1, 4, 1), (2, 2, 4, 1), (1, 4, 2, 2), (2, 2, 1, 4), (2, 4, 2, 4)]
)
def test_no_rank_dispatches_more_than_the_bound(dp, tp, ep, etp, tokens):
    """`TokenFlow.etp_gather` gives at most `max_dispatch_tokens` rows.

    They are the local tokens of all members of an etp group.
    """
    sizes = {"world": dp * tp, "dp": dp, "tp": tp, "ep": ep, "etp": etp, "tokens": tokens}
    layouts = [RankLayout(**sizes, rank=rank) for rank in range(dp * tp)]
    for count in range(20):
        own = [count]
        if tokens is Tokens.REPLICATED:
            own = [stop - start for start, stop in (split_range(count, tp, rank) for rank in range(tp))]
        most = max(sum(own[layouts[rank].tp_rank % len(own)] for rank in group) for group in layouts[0].groups["etp"])
        assert most <= layouts[0].max_dispatch_tokens(count) < most + etp
