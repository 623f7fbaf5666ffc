"""Computes the maps that the planner compares, for all layers at once.

Each layer is split into one row per node. The rows are solved separately and joined again. `packing` defines rows and
letters; L is the number of layers, N the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ep_moe.eplb.planner import packing
from ep_moe.eplb.planner.packing import ABSENT, Floats, Ints, assign, relabel_ranks
from ep_moe.eplb.planner.search import exhaustive_search, refine
from ep_moe.placement.expert_map import EMPTY

SLACK = 1 + 1e-9  # loads within this factor count as equal


@dataclass(frozen=True)
class Problem:
    """A planning problem of L layers, as arrays.

    load: float64 [L, E]
    now: int64 [L, R, S], the current expert in each slot, also in slots beyond `room`; other slots are EMPTY, or ABSENT
        beyond `room`
    room: int64 [L, R], slots of each rank
    """

    load: Floats
    now: Ints
    room: Ints
    groups: int
    nodes: int
    tolerance: float = 0.0
    enough: float = 1.0

    @property
    def mean(self) -> Floats:
        """The mean load of the ranks with slots, float64 [L]."""
        return np.asarray(self.load.sum(1) / (self.room > 0).sum(1))

    def only(self, layers: Ints) -> Problem:
        return replace(self, load=self.load[layers], now=self.now[layers], room=self.room[layers])


def occupied(problem: Problem, table: Ints) -> Ints:
    """Return the table with an expert on each rank that has slots but none: a copy of its node's heaviest expert.

    This raises no other rank's load. Without it, the map would not show that the rank has slots.
    """
    table = table.copy()
    per_node = table.shape[1] // problem.nodes
    for layer, rank in np.argwhere((problem.room > 0) & ~(table >= 0).any(2)):
        counts = packing.count_copies(table[layer : layer + 1], problem.load.shape[1])[0]
        near = table[layer, rank // per_node * per_node :][:per_node]
        experts = np.unique(near[near >= 0])
        heaviest = experts[(problem.load[layer, experts] / counts[experts]).argmax()]
        table[layer, rank, problem.room[layer, rank] - 1] = heaviest
    return table


def fullest_rank(problem: Problem, table: Ints) -> Floats:
    """Return the largest rank load of each layer, float64 [L]."""
    return np.asarray(packing.rank_loads(problem.load, table).max(1))


def legal_layers(problem: Problem) -> Any:
    """Return for each layer whether the current map is a valid plan, bool [L].

    It must have all experts, none of them twice on a rank or beyond a rank's room, and no group on two nodes.
    """
    within = (problem.now < 0) | (np.arange(problem.now.shape[2]) < problem.room[:, :, None])
    complete = (packing.count_copies(problem.now, problem.load.shape[1]) > 0).all(1)
    alone = ((_residents(problem) > 0).sum(1) == 1).all(1)
    return within.all((1, 2)) & complete & alone & ~packing.has_twice(problem.now)


@dataclass(frozen=True)
class Fresh:
    """The result of the published algorithm for L layers and N nodes.

    group_nodes: int64 [L, groups], the node of each group
    table: int64 [L * N, R / N, S], the algorithm's table, with second copies of an expert on a rank moved elsewhere
    twice: bool [L * N], whether the row had such a second copy
    published: float64 [L], the largest rank load of the algorithm's own table
    bound: float64 [L], a lower bound of the largest rank load of any map with these nodes
    """

    group_nodes: Ints
    table: Ints
    twice: Any
    published: Floats
    bound: Floats

    def only(self, layers: Ints) -> Fresh:
        nodes = len(self.table) // len(self.group_nodes)
        rows = (layers[:, None] * nodes + np.arange(nodes)).ravel()
        return Fresh(
            self.group_nodes[layers],
            self.table[rows],
            self.twice[rows],
            self.published[layers],
            self.bound[layers],
        )


def make_fresh(problem: Problem) -> Fresh:
    layers, nodes = len(problem.load), problem.nodes
    group_nodes = _fresh_group_nodes(problem)
    rows = _Rows.of(problem, group_nodes)
    counts = packing.greedy_counts(rows.load, rows.room.sum(1))
    table = packing.fill(rows.load, counts, packing.empty_table(rows.room), distinct=False)
    published = packing.rank_loads(rows.load, table).reshape(layers, -1).max(1)
    twice = packing.has_twice(table)
    table = packing.move_second_copies(rows.load, table)
    counts[twice] = _legal_counts(rows, twice)
    heaviest = (rows.load / counts).max(1)
    bound = np.maximum(heaviest, rows.load.sum(1) / (rows.room > 0).sum(1)).reshape(layers, nodes).max(1)
    return Fresh(group_nodes, table, twice, published, bound)


def _fresh_group_nodes(problem: Problem) -> Ints:
    """Return the node of each group by the published packing, int64 [L, groups].

    Nodes are permuted so that they keep many of the experts that they hold now.
    """
    layers, nodes, groups = len(problem.load), problem.nodes, problem.groups
    if nodes == 1:
        return np.zeros((layers, groups), np.int64)
    weight = problem.load.reshape(layers, groups, -1).sum(2)
    room = np.full((layers, nodes), groups // nodes)
    packed = packing.fill(weight, np.ones_like(room[:, :1]).repeat(groups, 1), packing.empty_table(room))
    group_nodes = _group_nodes_of(packed)
    common = np.zeros((layers, nodes, nodes))
    np.add.at(common, (np.arange(layers)[:, None], group_nodes), _residents(problem).transpose(0, 2, 1))
    slots = problem.room.reshape(layers, nodes, -1)
    kind = (slots[:, :, None] == slots[:, None]).all(3).argmax(2)  # the first node with the same slots
    taken = assign(common, kind)  # [L, old node] -> new set
    return np.take_along_axis(np.argsort(taken, axis=1), group_nodes, 1)


def _residents(problem: Problem) -> Ints:
    """Return the number of experts of each group that a node holds now, int64 [L, nodes, groups]."""
    layers, nodes = len(problem.load), problem.nodes
    held = packing.holders(problem.now.reshape(layers, nodes, -1), problem.load.shape[1])
    return np.asarray(held.reshape(layers, nodes, problem.groups, -1).sum(3))


@dataclass(frozen=True)
class _Rows:
    """Layers split into one row per node. In each row, experts are numbered from 0.

    load, room, now: as in `Problem`, by row
    member: int64 [L, E], the logical expert of each row's experts, row after row
    """

    load: Floats
    room: Ints
    now: Ints
    member: Ints

    @classmethod
    def of(cls, problem: Problem, group_nodes: Ints) -> _Rows:
        layers, experts = problem.load.shape
        nodes, ranks = problem.nodes, problem.room.shape[1]
        own = group_nodes.repeat(experts // problem.groups, 1)  # [L, E]
        member = np.argsort(own, axis=1, kind="stable")
        number = np.argsort(member, axis=1, kind="stable") % (experts // nodes)
        flat = np.maximum(problem.now, 0).reshape(layers, -1)
        node = np.arange(ranks).repeat(problem.now.shape[2]) // (ranks // nodes)
        here = (problem.now.reshape(layers, -1) >= 0) & (np.take_along_axis(own, flat, 1) == node)
        now = np.where(here, np.take_along_axis(number, flat, 1), EMPTY)
        load = np.take_along_axis(problem.load, member, 1)
        return cls(
            load.reshape(layers * nodes, -1),
            problem.room.reshape(layers * nodes, -1),
            now.reshape(layers * nodes, ranks // nodes, -1),
            member,
        )

    def logical(self, table: Ints) -> Ints:
        """Convert a table [L * N, R / N, S] with the rows' numbers to one with logical experts, [L, R, S]."""
        layers = len(self.member)
        member = self.member.reshape(len(table), -1)
        flat = table.reshape(len(table), -1)
        named = np.where(flat >= 0, np.take_along_axis(member, np.maximum(flat, 0), 1), flat)
        return named.reshape(layers, -1, table.shape[2])


def adapted(problem: Problem, goal: Floats, fresh: Fresh) -> Ints:
    """Return the current tables with few changes that bring the largest rank load to the goal, if possible."""
    nodes = problem.nodes
    group_nodes = _current_group_nodes(problem, fresh)
    rows = _Rows.of(problem, group_nodes)
    goals = goal.repeat(nodes)
    start = _start(rows)
    held = packing.count_copies(start, rows.load.shape[1])
    at_rest = (held > 0).all(1) & (packing.copy_loads(rows.load, held, start).sum(2).max(1) <= goals)
    busy = np.flatnonzero(~at_rest)
    load, room = rows.load[busy], rows.room[busy]
    # a copy with more than half of a rank's load is hard to place
    counts = packing.adapted_counts(load, held[busy], room.sum(1), (room > 0).sum(1), goals[busy] / 2)
    table = packing.fill(load, counts, packing.drop_surplus(load, counts, start[busy]))
    start[busy] = refine(load, table, goals[busy])
    return rows.logical(start)


def _current_group_nodes(problem: Problem, fresh: Fresh) -> Ints:
    """Return the node of each group, int64 [L, groups], with few changes from the current map.

    Groups are swapped until the fullest node is no fuller than in the fresh packing. A layer whose nodes now hold
    unequal numbers of groups starts from the fresh packing.
    """
    nodes, groups = problem.nodes, problem.groups
    group_nodes = _residents(problem).argmax(1)
    whole = ((group_nodes[:, None, :] == np.arange(nodes)[:, None]).sum(2) == groups // nodes).all(1)
    if nodes == 1 or not whole.any():
        return fresh.group_nodes
    weight = problem.load.reshape(len(group_nodes), groups, -1).sum(2)
    start, packed = (
        np.argsort(one, axis=1, kind="stable").reshape(-1, nodes, groups // nodes)
        for one in (np.where(whole[:, None], group_nodes, fresh.group_nodes), fresh.group_nodes)
    )
    goal = np.maximum(packing.rank_loads(weight, packed).max(1), weight.sum(1) / nodes * (1 + problem.tolerance))
    return _group_nodes_of(refine(weight, start, goal))


def _group_nodes_of(packed: Ints) -> Ints:
    """Invert the groups of each node, [L, nodes, groups / nodes], to the node of each group, int64 [L, groups]."""
    group_nodes = np.empty((len(packed), packed.shape[1] * packed.shape[2]), np.int64)
    np.put_along_axis(
        group_nodes, packed.reshape(group_nodes.shape), np.arange(packed.shape[1]).repeat(packed.shape[2])[None], 1
    )
    return group_nodes


def _start(rows: _Rows) -> Ints:
    """Return the legal part of the current tables: without second copies on a rank or experts beyond its room."""
    table = _widened(packing.empty_table(rows.room), rows.now.shape[2])
    return np.where((table == EMPTY) & ~packing.second_copies(rows.now), rows.now, table)


def refined(problem: Problem, fresh: Fresh, goal: Floats) -> Ints:
    """Return the fresh tables, refined toward the goal, with ranks permuted to match the current ones."""
    rows, goals = _Rows.of(problem, fresh.group_nodes), goal.repeat(problem.nodes)
    table = refine(rows.load, fresh.table, goals)
    doubled = np.flatnonzero(fresh.twice)
    if doubled.size:
        table[doubled] = _without_second_copies(rows, doubled, table[doubled], goals[doubled])
        least = (fresh.published * SLACK).repeat(problem.nodes)
        table[doubled] = exhaustive_search(rows.load[doubled], rows.room[doubled], table[doubled], least[doubled])
    table = relabel_ranks(rows.now, _widened(table, rows.now.shape[2]), rows.load.shape[1])
    return rows.logical(table)


def _without_second_copies(rows: _Rows, doubled: Ints, table: Ints, goals: Floats) -> Ints:
    """Return the better of two tables for the rows `doubled`: `table`, or one packed without second copies."""
    load = rows.load[doubled]
    other = packing.fill(load, _legal_counts(rows, doubled), packing.empty_table(rows.room[doubled]))
    other = refine(load, _widened(other, table.shape[2]), goals)
    better = packing.rank_loads(load, other).max(1) < packing.rank_loads(load, table).max(1)
    return np.where(better[:, None, None], other, table)


def _legal_counts(rows: _Rows, which: Any) -> Ints:
    room = rows.room[which]
    return packing.greedy_counts(rows.load[which], room.sum(1), (room > 0).sum(1))


def _widened(table: Ints, slots: int) -> Ints:
    wide = np.full((*table.shape[:2], slots), ABSENT)
    wide[..., : table.shape[2]] = table
    return wide
