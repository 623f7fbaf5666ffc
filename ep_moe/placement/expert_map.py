"""ExpertMap: which expert each slot of each rank holds.

One class describes linear, uneven, redundant and balanced placements. A physical id is `owner * slots_per_rank +
local`, where `slots_per_rank` is the largest number of slots of any rank. Transports and kernels thus see an even split
of `R * slots_per_rank` experts, and work with any placement."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ep_moe.checks import MOST_EXPERTS, as_id, check_count, check_path, set_counts, set_flags, shown
from ep_moe.errors import ConfigError
from ep_moe.parallel.layout import split_range

EMPTY = -1
_FORMAT = 1


@dataclass(frozen=True)
class ExpertMap:
    """The placement of experts in the slots of an EP group. Immutable and hashable; equal maps compare equal.

    Args:
        num_experts: E, the number of logical experts.
        num_ranks: R, the ranks of the EP group.
        physical_to_logical: [P], the logical expert in each slot, -1 for an empty slot. P is a multiple of R.
        allow_duplicates: Let one rank hold an expert twice.

    Raises:
        ConfigError: an expert has no slot, an entry is no expert, or a rank holds an expert twice without
            `allow_duplicates`.
    """

    num_experts: int
    num_ranks: int
    physical_to_logical: tuple[int, ...]
    allow_duplicates: bool = False

    def __post_init__(self) -> None:
        set_counts(self, at_most=MOST_EXPERTS, num_experts=1, num_ranks=1)
        set_flags(self, "allow_duplicates")
        if type(self.physical_to_logical) is not tuple:  # a list has no hash
            object.__setattr__(self, "physical_to_logical", _whole("physical_to_logical", self.physical_to_logical))
        check_count(
            "ExpertMap.physical_to_logical slots", len(self.physical_to_logical), at_least=0, at_most=MOST_EXPERTS
        )
        if not self.physical_to_logical or len(self.physical_to_logical) % self.num_ranks:
            raise ConfigError(
                f"ExpertMap.physical_to_logical must have the same number of slots for each of num_ranks="
                f"{self.num_ranks} ranks, got {len(self.physical_to_logical)} slots; fill up with -1"
            )
        # types are checked before values: 0.0 == 0 and True == 1, and an unhashable entry cannot be put into a set
        if set(map(type, self.physical_to_logical)) != {int}:
            self._refuse_slot()
        found = set(self.physical_to_logical)
        if min(found) < EMPTY or max(found) >= self.num_experts:
            self._refuse_slot()
        if len(found - {EMPTY}) < self.num_experts:
            missing = sorted(set(range(self.num_experts)) - found)
            raise ConfigError(f"ExpertMap has no slot for logical expert {missing[0]} ({len(missing)} missing in all)")
        flat, slots_per_rank = self.physical_to_logical, self.slots_per_rank
        for rank in range(self.num_ranks if not self.allow_duplicates else 0):
            if len(set(flat[rank * slots_per_rank : (rank + 1) * slots_per_rank])) < slots_per_rank:
                self._refuse_twice(rank)

    def _refuse_slot(self) -> None:
        for slot, expert in enumerate(self.physical_to_logical):
            if type(expert) is not int or not EMPTY <= expert < self.num_experts:
                raise ConfigError(
                    f"ExpertMap.physical_to_logical[{slot}] must be -1 or an integer in [0, {self.num_experts}), got "
                    f"{expert!r}"
                )

    def _refuse_twice(self, rank: int) -> None:
        held = [expert for expert in self.local(rank) if expert != EMPTY]
        twice = sorted(expert for expert in set(held) if held.count(expert) > 1)
        if twice:
            raise ConfigError(
                f"ExpertMap puts logical expert {twice[0]} twice on rank {rank}, which costs memory and "
                f"balances nothing; pass allow_duplicates=True if that is wanted"
            )

    # --- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def linear(cls, num_experts: int, num_ranks: int) -> ExpertMap:
        """Assign the experts to the ranks in order.

        Args:
            num_experts: E. If R does not divide E, the first ranks hold one expert more.
            num_ranks: R.

        Returns:
            The map, without redundant experts.

        Raises:
            ConfigError: a number is out of range.
        """
        return cls.redundant(num_experts, num_ranks, 0)

    @classmethod
    def round_robin(cls, num_experts: int, num_ranks: int) -> ExpertMap:
        """Assign expert e to rank e % R.

        Args:
            num_experts: E.
            num_ranks: R.

        Returns:
            The map, without redundant experts.

        Raises:
            ConfigError: a number is out of range.
        """
        num_experts = check_count("ExpertMap.num_experts", num_experts, at_least=1, at_most=MOST_EXPERTS)
        num_ranks = check_count("ExpertMap.num_ranks", num_ranks, at_least=1, at_most=MOST_EXPERTS)
        return cls.from_ranks([list(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)], num_experts)

    @classmethod
    def uneven(cls, counts: Sequence[int]) -> ExpertMap:
        """Assign the experts to the ranks in order, `counts[rank]` to each.

        Args:
            counts: [R], the number of experts of each rank. 0 is allowed.

        Returns:
            The map, without redundant experts. E is the sum of `counts`.

        Raises:
            ConfigError: an entry of `counts` is no integer of at least 0, or the sum is 0.
        """
        given = _items(counts)
        if given is None:
            raise ConfigError(f"ExpertMap.uneven: counts must be a sequence of integers, got {shown(counts)}")
        counts = [
            check_count(f"counts[{rank}]", count, at_least=0, at_most=MOST_EXPERTS) for rank, count in enumerate(given)
        ]
        check_count("ExpertMap.num_experts (the sum of counts)", sum(counts), at_least=1, at_most=MOST_EXPERTS)
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        ranks = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
        return cls.from_ranks(ranks, sum(counts))

    @classmethod
    def redundant(cls, num_experts: int, num_ranks: int, num_redundant: int) -> ExpertMap:
        """Fill E + num_redundant slots in order: every expert once, then again from expert 0.

        Args:
            num_experts: E.
            num_ranks: R.
            num_redundant: The number of slots beyond one per expert.

        Returns:
            The map.

        Raises:
            ConfigError: a number is out of range, or a rank would hold an expert twice.
        """
        num_experts, num_ranks, num_redundant = (
            check_count(f"ExpertMap.{name}", value, at_least=least, at_most=MOST_EXPERTS)
            for name, value, least in (
                ("num_experts", num_experts, 1),
                ("num_ranks", num_ranks, 1),
                ("num_redundant", num_redundant, 0),
            )
        )
        slots = num_experts + num_redundant
        most = -(-slots // num_ranks)
        if most > num_experts:
            raise ConfigError(
                f"num_redundant={num_redundant} gives a rank {most} slots for {num_experts} experts; at most "
                f"{num_experts * num_ranks - num_experts} redundant experts make sense on {num_ranks} ranks"
            )
        spans = [split_range(slots, num_ranks, rank) for rank in range(num_ranks)]
        return cls.from_ranks([[slot % num_experts for slot in range(*span)] for span in spans], num_experts)

    @classmethod
    def from_ranks(
        cls, ranks: Sequence[Sequence[int]], num_experts: int, *, allow_duplicates: bool = False
    ) -> ExpertMap:
        """Create a map from one list of experts per rank.

        Args:
            ranks: For each rank, the logical experts of its slots in order, -1 for an empty slot. Shorter lists are
                filled up with -1.
            num_experts: E.
            allow_duplicates: Let one rank hold an expert twice.

        Returns:
            The map.

        Raises:
            ConfigError: as for the class.
        """
        given = _items(ranks)
        if given is None:
            raise ConfigError(f"ExpertMap.from_ranks: ranks must be a sequence for each rank, got {shown(ranks)}")
        ranks = [_whole(f"from_ranks: ranks[{rank}]", slots) for rank, slots in enumerate(given)]
        slots_per_rank = max([len(slots) for slots in ranks] + [1])
        table = [[*slots, *[EMPTY] * (slots_per_rank - len(slots))] for slots in ranks]
        flat = tuple(expert for slots in table for expert in slots)
        return cls(num_experts, len(ranks), flat, allow_duplicates)

    # --- derived tables ----------------------------------------------------------------------------------------

    @property
    def slots_per_rank(self) -> int:
        """The number of slots of every rank, including empty ones: P / R."""
        return len(self.physical_to_logical) // self.num_ranks

    @property
    def num_physical(self) -> int:
        """R * slots_per_rank: the number of experts that transports and kernels see."""
        return len(self.physical_to_logical)

    @property
    def num_redundant(self) -> int:
        """Slots in use beyond one per logical expert."""
        return sum(expert != EMPTY for expert in self.physical_to_logical) - self.num_experts

    def local(self, rank: int) -> tuple[int, ...]:
        """List the logical experts of a rank's slots.

        Args:
            rank: In [0, R).

        Returns:
            [slots_per_rank], -1 for an empty slot.
        """
        return self.physical_to_logical[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def num_slots(self, rank: int) -> int:
        """Return the number of slots that need memory on a rank (L). Empty slots at the rank's end need none.

        Args:
            rank: In [0, R).

        Returns:
            L.
        """
        return max([slot + 1 for slot, expert in enumerate(self.local(rank)) if expert != EMPTY], default=0)

    @cached_property
    def logical_to_physical(self) -> tuple[tuple[int, ...], ...]:
        """The physical ids of each logical expert, ascending. The first one is the primary replica."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical_to_logical):
            if expert != EMPTY:
                found[expert].append(slot)
        return tuple(map(tuple, found))

    @property
    def replica_count(self) -> tuple[int, ...]:
        """[E], the number of slots of each logical expert."""
        return tuple(map(len, self.logical_to_physical))

    @property
    def replicated(self) -> list[int]:
        """Logical experts with more than one slot."""
        flat = self.physical_to_logical
        if len(flat) - flat.count(EMPTY) == self.num_experts:  # a fast path: each step reads this several times
            return []
        return [expert for expert, count in enumerate(self.replica_count) if count > 1]

    def global_to_local(self, rank: int) -> tuple[int, ...]:
        """Return each logical expert's slot on a rank. Inference engines call this table `expert_map`.

        Args:
            rank: In [0, R).

        Returns:
            [E], the local expert (slot counted from the rank's first one), -1 for an expert that the rank does not
            hold.
        """
        local = self.local(rank)
        return tuple(local.index(expert) if expert in local else EMPTY for expert in range(self.num_experts))

    def primary_owner(self, expert: int) -> int:
        """Return the rank that writes a logical expert to a checkpoint.

        Args:
            expert: In [0, E).

        Returns:
            The rank of the expert's first slot.
        """
        return self.logical_to_physical[expert][0] // self.slots_per_rank

    # --- on disk -----------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """A checksum of the map, 8 hexadecimal digits."""
        return f"{zlib.crc32(self.to_json().encode()):08x}"

    def to_json(self) -> str:
        """Write the map as text.

        Returns:
            JSON that `from_json` reads.
        """
        ranks = [list(self.local(rank)) for rank in range(self.num_ranks)]
        return json.dumps(
            {
                "format": _FORMAT,
                "num_experts": self.num_experts,
                "ranks": ranks,
                "allow_duplicates": self.allow_duplicates,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ExpertMap:
        """Read what `to_json` wrote.

        Args:
            text: JSON.

        Returns:
            The map.

        Raises:
            ConfigError: the text is no map, or has another format number.
        """
        try:
            table = json.loads(text)
            if table["format"] != _FORMAT:
                raise ConfigError(f"ExpertMap file has format {table['format']!r}, this version reads {_FORMAT}")
            if not isinstance(table["ranks"], list):
                raise TypeError(f"ranks are {shown(table['ranks'])}")
            return cls.from_ranks(table["ranks"], table["num_experts"], allow_duplicates=table["allow_duplicates"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"not an ExpertMap file: {error!r}; write one with ExpertMap.save") from error

    def save(self, path: str | Path) -> None:
        """Write the map to a file, as JSON.

        Args:
            path: The file, which is overwritten.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ExpertMap:
        """Read what `save` wrote.

        Args:
            path: The file.

        Returns:
            The map.

        Raises:
            ConfigError: there is no such file, or it holds no map.
        """
        check_path("ExpertMap.load: path", path)
        if not Path(path).is_file():
            raise ConfigError(f"ExpertMap file {path} does not exist")
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not an ExpertMap file: {error}; write one with ExpertMap.save") from error

    def __repr__(self) -> str:
        sizes = f"slots_per_rank={self.slots_per_rank}, redundant={self.num_redundant}"
        return f"ExpertMap(E={self.num_experts}, R={self.num_ranks}, {sizes})"


def _whole(name: str, values: object) -> tuple[Any, ...]:
    """Return the values with integers of NumPy and torch as Python ints. Others stay, so that the check names their
    place."""
    given = _items(values)
    if given is None:
        raise ConfigError(f"ExpertMap.{name} must be a sequence of experts, got {shown(values)}")
    return tuple(map(_integer, given))


def _items(values: Any) -> list[Any] | None:
    """Return the items of an iterable; None for anything else, such as a 0-d tensor, whose `__iter__` raises."""
    if isinstance(values, str):
        return None
    try:
        return list(values)
    except TypeError:
        return None


def _integer(value: Any) -> Any:
    found = as_id(value)
    return value if found is None else found
