"""Test that `plan` still returns the same maps for known loads, by checksum.

`test_plan` tests the properties of plans. This module guards changes that should not alter plans. `pytest -vv` prints
the checksums of changed plans.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest

from ep_moe import ExpertMap
from ep_moe.eplb import plan

LAYERS, STEPS = 4, 3
SHARED = 5040  # divisible by all replica counts used here, so sums of loads are exact on all machines


def random_loads(random: np.random.Generator, experts: int) -> np.ndarray:
    """Return int loads [layers, E], from even to skewed; some experts have none."""
    skew = random.choice([0, 1, 4, 12], size=(LAYERS, 1))
    loads = (1000 * random.random((LAYERS, experts)) ** skew).astype(np.int64)
    return loads * (random.random(loads.shape) < 0.9) * SHARED


def checksum(maps: list[ExpertMap]) -> int:
    return zlib.crc32(repr([one.physical_to_logical for one in maps]).encode())


TWICE = ExpertMap.from_ranks([[0, 0, 1, -1], [2, 3, 3, -1], [4, 5, 1, -1]], 6, allow_duplicates=True)
KINDS: dict[str, tuple[ExpertMap, dict[str, Any]]] = {
    "no copies": (ExpertMap.linear(16, 4), {}),
    "copies": (ExpertMap.redundant(16, 8, 8), {}),
    "every slot a copy more": (ExpertMap.redundant(6, 6, 18), {}),
    "tolerance": (ExpertMap.redundant(16, 4, 4), {"tolerance": 0.2}),
    "enough": (ExpertMap.redundant(16, 4, 4), {"enough": 0.8}),
    "never at rest": (ExpertMap.redundant(16, 4, 8), {"tolerance": 0.0}),
    "groups on nodes": (ExpertMap.redundant(16, 8, 8), {"groups": 8, "nodes": 2}),
    "groups on four nodes": (ExpertMap.redundant(16, 8, 16), {"groups": 4, "nodes": 4}),
    "groups that nodes do not divide": (ExpertMap.redundant(12, 6, 6), {"groups": 3, "nodes": 2}),
    "uneven": (ExpertMap.uneven([7, 1, 4, 4]), {}),
    "ranks grow": (ExpertMap.linear(12, 4), {"slots": [3, 4, 5, 6]}),
    "a dead rank": (ExpertMap.redundant(12, 4, 8), {"dead_ranks": [2]}),
    "a dead rank of a node": (ExpertMap.redundant(8, 8, 24), {"dead_ranks": [5], "groups": 4, "nodes": 2}),
    "an expert twice on a rank": (TWICE, {}),
}


def found(kind: str) -> list[int]:
    """Return checksums of consecutive plans: three loads from each of two seeds."""
    start, options = KINDS[kind]
    sums = []
    for seed in range(2):
        random = np.random.default_rng([seed, zlib.crc32(kind.encode())])
        maps = [start] * LAYERS
        for _ in range(STEPS):
            maps = plan(random_loads(random, start.num_experts), maps, **options)
            sums.append(checksum(maps))
    return sums


PLANNED = {
    "no copies": [673889454, 3392807230, 2105928848, 2046384297, 2971220532, 505721245],
    "copies": [149626114, 1373046051, 2461247681, 2148011327, 1706054720, 3459762489],
    "every slot a copy more": [4197848381, 4220811306, 1132297628, 1584880053, 1790495291, 612488709],
    "tolerance": [2033815205, 1193259277, 2788261398, 2865114701, 2600184100, 3260375201],
    "enough": [180895137, 3430758151, 1614436058, 778428013, 3764275858, 4179167543],
    "never at rest": [3536695648, 1567767208, 3325970592, 3489080953, 1626327241, 492804044],
    "groups on nodes": [280226573, 3018926889, 1547181774, 1973661802, 2827855989, 3420009635],
    "groups on four nodes": [72920785, 560273894, 3998593373, 4240589386, 1045839500, 2655160317],
    "groups that nodes do not divide": [2151430232, 4245039132, 1455574556, 765248034, 3232922113, 2658183750],
    "uneven": [210370753, 176229687, 3859722773, 767718253, 3098387738, 18719128],
    "ranks grow": [2957232179, 3360130140, 1535610027, 835239920, 1112059679, 1317654862],
    "a dead rank": [114892622, 527661902, 482198515, 3177404881, 1195623108, 3706819255],
    "a dead rank of a node": [1307916105, 51700408, 2284547093, 1924320525, 3555516097, 1801120021],
    "an expert twice on a rank": [1430834075, 430052411, 2354564220, 1870798126, 3487381810, 1657047460],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_plans_of_known_loads_stay(kind):
    assert found(kind) == PLANNED[kind]


def test_the_loads_tell_kinds_and_steps_apart():
    every = list(itertools.chain.from_iterable(PLANNED.values()))
    assert len(set(every)) == len(every)
