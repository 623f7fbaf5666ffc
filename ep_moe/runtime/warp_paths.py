"""Analyze a kernel's PTX, to show that all warps of a program stay together.

A kernel that waits for other ranks polls memory that they write at the same time, so its warps may read different
values. A branch on such a value can send warps along different paths. If one path has a barrier of the program, warps
on another path never reach it. The kernel then hangs, or pairs the wrong barriers.

The analysis tracks, for each register, the bits that may differ between warps. Sources of difference:

- the thread index, above the bits that number the threads of a warp;
- values that a warp polls itself: volatile, relaxed and acquire loads, results of atomics, and repeated loads of one
  address in a loop;
- loads from an address that differs, writes under a condition that differs, and unknown special registers.

All warps get equal values from one address of shared memory if barriers separate the load from every write, and from
the reduction of a barrier. A branch on a condition that may differ is refused if there is a barrier between the branch
and the point where its paths join again. Indirect branches, calls and endless loops are refused. Threads within a warp
are not distinguished: Triton gives each warp one condition.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

_ALL = -1  # all bits
_WARPS = ~31  # the bits of a thread index that differ between warps

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*\.(?:loc|file|version|target|address_size)\b[^\n]*$", re.M)
_BODY = re.compile(r"\.(entry|func)\b[^{;]*\{")
_PIECE = re.compile(r"\s*(?:(?P<label>[\w$]+):|(?P<brace>[{}])|(?P<statement>[^;]+);)")
_NAME = re.compile(r"(?<![\w%$.])%?[A-Za-z_$][\w$.]*")
_POLLED = re.compile(r"(?!\S*\.shared)(?:ld\.\S*\b(?:volatile|relaxed|acquire|mmio)\b|(?:atom|multimem)\.)")
_SHARED_WRITE = re.compile(r"(?:st|atom|red|cp)\.\S*\bshared\b|stmatrix\.")
_SHARED_READ = re.compile(r"ld\.\S*\bshared\b|ldmatrix\.")
_PLAIN_READ = re.compile(r"ldu?\.(?:global|param|const)\b")
_BARRIER = re.compile(r"bar\.(?!warp)|barrier\.|wgmma\.|tcgen05\.")
_VECTOR = re.compile(r"\{([^}]*)\}")
_EQUAL_SPECIAL = re.compile(r"%(?:laneid|lanemask\w*|n?ctaid\w*|ntid|nwarpid|n?smid|gridid|n?clusterid|"
                            r"cluster\w*|is_explicit_cluster|envreg\d+|\w*smem\w*)(?:\.[xyz])?$")  # fmt: skip
_REGISTER = re.compile(r"%(?:p|r|rd|rs|rq|f|fd|h|hh|b|SP|SPL)\d*$")
_NO_RESULT = re.compile(r"(?:st|stmatrix|red|bra|ret|exit|trap|prefetch|fence|membar|cp|griddepcontrol|nanosleep)\b")
_BRANCHES, _ENDS = ("bra", "bra.uni"), ("ret", "ret.uni", "exit", "trap")


class _Unknown(Exception):
    """PTX that the analysis does not support."""


@dataclass(frozen=True)
class _Instruction:
    operation: str
    guard: str  # a predicate register, or ""
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    text: str

    @property
    def target(self) -> str:
        return self.reads[0]


@dataclass
class _Block:
    instructions: list[_Instruction] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    @cached_property
    def has_barrier(self) -> bool:
        return any(_BARRIER.match(each.operation) for each in self.instructions)


def divergent_branch(ptx: str) -> str | None:
    """Find a branch at which warps may take different paths, with a barrier on one of them.

    Args:
        ptx: The PTX that Triton compiled.

    Returns:
        None if there is none, else a phrase that names the branch, or the PTX that the analysis does not support.
    """
    try:
        return next((found for each in _functions(ptx) if (found := each.divergent()) is not None), None)
    except _Unknown as unknown:
        return str(unknown)


def waiting_loops(ptx: str) -> int:
    """Count the loops that poll memory. Nested loops count as one."""
    return sum(each.polls(cycle) for each in _functions(ptx) for cycle in each.cycles)


def _functions(ptx: str) -> list[_Function]:
    text = _LINE_DIRECTIVE.sub("", _COMMENT.sub("", ptx))
    found = [_Function(_blocks(_instructions(text, match.end()))) for match in _BODY.finditer(text)]
    if not found:
        raise _Unknown("no function")
    return found


def _instructions(text: str, at: int) -> Iterator[_Instruction | str]:
    """Yield the instructions and labels of the function whose body begins at `at`.

    Registers that are declared in an inner block, as in inline assembly, get unique names.
    """
    scopes: list[dict[str, str]] = [{}]
    opened = 0
    while scopes:
        piece = _PIECE.match(text, at)
        if piece is None:
            raise _Unknown("a function without an end")
        at = piece.end()
        if piece["label"]:
            yield piece["label"]
        elif piece["brace"] == "{":
            opened += 1
            scopes.append({})
        elif piece["brace"]:
            scopes.pop()
        elif (statement := piece["statement"].strip()).startswith(".reg"):
            if len(scopes) > 1:
                declared = statement.split(None, 2)[2].split(",")
                scopes[-1] |= {name.strip(): f"{name.strip()}@{opened}" for name in declared}
        elif not statement.startswith("."):
            yield _instruction(statement, scopes)


def _instruction(statement: str, scopes: list[dict[str, str]]) -> _Instruction:
    def named(text: str) -> tuple[str, ...]:
        names = _NAME.findall(text)
        return tuple(next((scope[name] for scope in reversed(scopes) if name in scope), name) for name in names)

    guard, rest = "", statement
    if statement.startswith("@"):
        guard, _, rest = statement[1:].lstrip("!").strip().partition(" ")
        (guard,) = named(guard)
    operation, _, operands = rest.strip().partition(" ")
    operation, operands = operation.strip(), operands.strip()
    if "\t" in operation:
        operation, _, more = operation.partition("\t")
        operands = f"{more} {operands}".strip()
    if _NO_RESULT.match(operation) or (_BARRIER.match(operation) and ".red" not in operation):
        return _Instruction(operation, guard, (), named(operands), statement)
    vector = _VECTOR.match(operands)
    first, others = (vector[1], operands[vector.end() :]) if vector else operands.partition(",")[::2]
    return _Instruction(operation, guard, named(first.replace("|", " ")), named(others), statement)


def _blocks(pieces: Iterable[_Instruction | str]) -> list[_Block]:
    """Return the basic blocks. The last one is empty, and is the exit."""
    found = list(pieces)
    aimed = {piece.target for piece in found if isinstance(piece, _Instruction) and piece.operation in _BRANCHES}
    blocks, begins = [_Block()], {}
    for piece in found:
        if isinstance(piece, str):
            if piece in aimed:
                blocks.append(_Block())
                begins[piece] = len(blocks) - 1
            continue
        kind = piece.operation.partition(".")[0]
        if kind in ("call", "brx") or (kind == "bra" and piece.operation not in _BRANCHES):
            raise _Unknown(f"{piece.text!r}, which the analysis does not follow")
        blocks[-1].instructions.append(piece)
        if piece.operation in (*_BRANCHES, *_ENDS):
            blocks.append(_Block())
    blocks.append(_Block())
    for number, block in enumerate(blocks[:-1]):
        last = block.instructions[-1] if block.instructions else None
        if last is None or last.guard or last.operation not in (*_BRANCHES, *_ENDS):
            block.after.append(number + 1)
        if last is not None and last.operation in _BRANCHES:
            if last.target not in begins:
                raise _Unknown(f"a branch to {last.target}, which is nowhere")
            block.after.append(begins[last.target])
        elif last is not None and last.operation in _ENDS:
            block.after.append(len(blocks) - 1)
    return blocks


class _Function:
    def __init__(self, blocks: list[_Block]) -> None:
        self._blocks = blocks
        self._differs: dict[str, int] = {}
        written = Counter(name for block in blocks for each in block.instructions for name in each.writes)
        self._written = set(written)

    def divergent(self) -> str | None:
        """Return the result of `divergent_branch` for this function."""
        end = len(self._blocks) - 1
        if any(end not in self._reach[each] for each in self._ways([0], but=end)):
            return "a loop without an exit"
        apart: set[int] = set()  # blocks through which warps may not go together
        while True:
            self._settle(apart)
            for number, block in enumerate(self._blocks):
                if len(block.after) < 2 or not self._value(block.instructions[-1].guard):
                    continue
                between = self._between(number)
                if any(self._blocks[each].has_barrier for each in between):
                    return f"{block.instructions[-1].text!r}, with a barrier on one path"
                if not between <= apart:
                    apart |= between
                    break
            else:
                return None

    def polls(self, cycle: frozenset[int]) -> bool:
        return any(_POLLED.match(each.operation) for number in cycle for each in self._blocks[number].instructions)

    def _settle(self, apart: set[int]) -> None:
        """Compute the bits of each register that may differ, for any order of writes, by iterating to a fixed point."""
        changed = True
        while changed:
            changed = False
            for number, block in enumerate(self._blocks):
                for each in block.instructions:
                    bits = _ALL if number in apart else self._bits(each, self._cycle_of.get(number, frozenset()))
                    for name in each.writes:
                        if (joined := self._differs.get(name, 0) | bits) != self._differs.get(name, 0):
                            self._differs[name] = joined
                            changed = True

    def _bits(self, each: _Instruction, cycle: frozenset[int]) -> int:
        """Return the bits that may differ in the result of an instruction."""
        if each.guard and self._value(each.guard):
            return _ALL
        if _BARRIER.match(each.operation):
            return 0  # a reduction of all threads
        kind, values = each.operation.partition(".")[0], [self._value(name) for name in each.reads]
        if kind in ("ld", "ldmatrix", "ldu", "atom", "multimem"):
            if _reads_shared(each):
                known = id(each) not in self._unsteady
            else:
                known = bool(_PLAIN_READ.match(each.operation)) and not self._polled(each, cycle)
            return 0 if known and not any(values) else _ALL
        if not any(values):
            return 0
        return _moved(each, values)

    def _polled(self, each: _Instruction, cycle: frozenset[int]) -> bool:
        if _POLLED.match(each.operation):
            return True
        if not cycle or not each.operation.startswith("ld.global"):
            return False
        return self._written_in[cycle].isdisjoint(each.reads)

    @cached_property
    def _unsteady(self) -> set[int]:
        """The ids of shared-memory reads that no barrier separates from a write before or after them."""
        found: set[int] = set()
        for number, block in enumerate(self._blocks):
            for at, each in enumerate(block.instructions):
                if _SHARED_WRITE.match(each.operation):
                    found |= {id(read) for read in self._until_barrier(number, at + 1) if _reads_shared(read)}
                elif _reads_shared(each):
                    later = self._until_barrier(number, at + 1)
                    if any(_SHARED_WRITE.match(write.operation) for write in later):
                        found.add(id(each))
        return found

    def _until_barrier(self, number: int, begin: int) -> Iterator[_Instruction]:
        """Yield the instructions from a point on, on every path, up to the next barrier."""
        seen: set[int] = set()
        waiting = [(number, begin)]
        while waiting:
            at, first = waiting.pop()
            for each in self._blocks[at].instructions[first:]:
                if _BARRIER.match(each.operation):
                    break
                yield each
            else:
                after = [each for each in self._blocks[at].after if each not in seen]
                seen.update(after)
                waiting += [(each, 0) for each in after]

    def _value(self, name: str) -> int:
        if name in self._written or not name.startswith("%"):
            return self._differs.get(name, 0)
        if name == "%tid.x":
            return _WARPS
        return 0 if _EQUAL_SPECIAL.match(name) or _REGISTER.match(name) else _ALL

    def _between(self, number: int) -> set[int]:
        """Return the blocks on all paths from the end of a block to the point where they have joined again."""
        return self._ways(self._blocks[number].after, but=self._meets[number])

    @cached_property
    def _meets(self) -> dict[int, int]:
        """For each block the nearest block that is on every path from it (the immediate postdominator)."""
        end = len(self._blocks) - 1
        through = {number: set(range(end + 1)) for number in range(end)} | {end: {end}}
        changed = True
        while changed:
            changed = False
            for number in reversed(range(end)):
                after = [through[each] for each in self._blocks[number].after]
                now = set.intersection(*after) | {number} if after else {number}
                if now != through[number]:
                    through[number], changed = now, True
        found = {}
        for number in range(end):
            others = through[number] - {number}
            found[number] = max(others, key=lambda each: len(through[each]), default=end)
        return found

    @cached_property
    def cycles(self) -> list[frozenset[int]]:
        """The sets of blocks that reach each other (strongly connected components with a cycle)."""
        looped = [number for number, found in enumerate(self._reach) if number in found]
        return list({frozenset(at for at in looped if at in self._reach[own] and own in self._reach[at]): None
                     for own in looped})  # fmt: skip

    @cached_property
    def _cycle_of(self) -> dict[int, frozenset[int]]:
        return {number: cycle for cycle in self.cycles for number in cycle}

    @cached_property
    def _written_in(self) -> dict[frozenset[int], frozenset[str]]:
        """The registers that each cycle writes."""
        return {
            cycle: frozenset(name for at in cycle for each in self._blocks[at].instructions for name in each.writes)
            for cycle in self.cycles
        }

    @cached_property
    def _reach(self) -> list[set[int]]:
        """For each block the blocks that can be reached from its end."""
        return [self._ways(self._blocks[number].after) for number in range(len(self._blocks))]

    def _ways(self, starts: Iterable[int], but: int = -1) -> set[int]:
        """Return the blocks on all paths from `starts`, up to and without block `but`."""
        found: set[int] = set()
        waiting = list(starts)
        while waiting:
            each = waiting.pop()
            if each != but and each not in found:
                found.add(each)
                waiting += self._blocks[each].after
        return found


def _reads_shared(each: _Instruction) -> bool:
    return bool(_SHARED_READ.match(each.operation))


def _moved(each: _Instruction, values: list[int]) -> int:
    """Return the bits that may differ in a result. values: the bits that may differ in its operands"""
    kind, joined = each.operation.partition(".")[0], 0
    for value in values:
        joined |= value
    numbers = [int(found, 0) for found in re.findall(r"(?<![\w%$.])-?(?:0x[0-9A-Fa-f]+|\d+)(?![\w.])", each.text)]
    number = numbers[-1] if numbers else None
    if kind == "and" and number is not None and len(values) == 1:
        return joined & number
    if kind == "shl" and number is not None and len(values) == 1:
        return joined << number
    if kind == "shr" and number is not None and len(values) == 1:
        return joined >> number
    if kind in ("and", "or", "xor", "mov", "shfl", "cvta") or (kind == "cvt" and "f" not in each.operation[3:]):
        return joined if "{" not in each.text else _ALL
    if kind in ("add", "sub"):
        return -(joined & -joined)  # carries change higher bits
    return _ALL
