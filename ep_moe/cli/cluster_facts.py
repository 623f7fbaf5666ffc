"""Collects the facts of a rank for `ep-moe doctor --cluster`, and finds what is odd in those of all ranks.

Facts are versions, host, GPU, clocks, ECC and peer access. A rank is odd if its version, GPU or link differs from those
of most ranks. The comparison needs no communication.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

import torch

from ep_moe._version import __version__
from ep_moe.parallel.groups import host_identity
from ep_moe.parallel.nodes import NodeLayout, format_ranks
from ep_moe.runtime.devices import memory_left
from ep_moe.runtime.versions import installed

_ASKED = {  # query fields of nvidia-smi, by the names of our facts
    "driver": "driver_version",
    "highest SM clock": "clocks.max.sm",
    "highest memory clock": "clocks.max.memory",
    "ECC": "ecc.mode.current",
    "SM clock": "clocks.current.sm",
    "uncorrected": "ecc.errors.uncorrected.volatile.total",
}
_OF_THE_MOMENT = ("SM clock", "uncorrected")
_SMI_S = 20.0
SLOW = 0.5  # a link is slow below this fraction of the median of its kind
WITHIN, BETWEEN = "within hosts", "between hosts"

Rates = Mapping[tuple[int, int], float]  # GB/s each way between two ranks, or two nodes; the lower number first


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank.

    Args:
        rank: Its rank in the job.
        local_rank: Its rank on its host.
        host: Identity and name of its host.
        compared: Facts that must be equal on all ranks, by name: versions, GPU, clocks, numbers of GPUs.
        gpu: Identity of its GPU; None without one.
        shown: Momentary facts, which are only shown in the table.
        faults: Sentences about faults of this rank that need no comparison with others.
    """

    rank: int
    local_rank: int
    host: tuple[str, str]
    compared: Mapping[str, str]
    gpu: str | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[str] = ()


def rank_facts(rank: int, local_rank: int, gpu: int | None) -> RankFacts:
    """Collect the facts of this rank.

    Args:
        rank: Its rank in the job.
        local_rank: Its rank on its host.
        gpu: Index of its GPU among the visible ones; None if no GPU is visible.

    Returns:
        The facts. A fact that cannot be determined is "unknown". A GPU that fails is listed in `faults`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    compared = {
        "ep_moe": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if count else "none",
        "Triton": installed("triton") or "none",
        "FlashInfer": installed("flashinfer-python") or "none",
        "GPUs visible": str(count),
        "device": "cpu" if gpu is None else "cuda",
    }
    if gpu is None:
        return RankFacts(rank, local_rank, host_identity(), compared)
    if gpu >= count:
        fault = f"no GPU: it needs the one with index {gpu}, and {count} are visible"
        return RankFacts(rank, local_rank, host_identity(), compared | {"device": "none"}, faults=(fault,))
    device = torch.device("cuda", gpu)
    broken = _does_not_compute(device)
    faults = [] if broken is None else [broken]
    found = torch.cuda.get_device_properties(device)
    smi = _smi(str(found.uuid))
    peers = sum(torch.cuda.can_device_access_peer(device, other) for other in range(count) if other != gpu)
    if (errors := smi.get("uncorrected", "")).isdigit() and int(errors):
        faults.append(f"its GPU had {errors} uncorrected ECC errors since the driver was loaded")
    compared |= {
        "GPU": f"{found.name}, compute capability {found.major}.{found.minor}",
        "GPU memory": f"{found.total_memory / 2**30:.1f} GiB",
        "peer access": f"to {peers} of {count - 1} other visible GPUs",
    }
    compared |= {name: smi.get(name, "unknown") for name in _ASKED if name not in _OF_THE_MOMENT}
    shown = {"SM clock": smi.get("SM clock", "unknown"), "free": f"{memory_left(device)[0] / 2**30:.1f} GiB"}
    return RankFacts(rank, local_rank, host_identity(), compared, str(found.uuid), shown, faults)


def _does_not_compute(device: torch.device) -> str | None:
    try:
        total = torch.ones(1024, dtype=torch.float32, device=device).sum().item()
    except RuntimeError as error:
        return f"its GPU fails: {str(error).splitlines()[0]}"
    return None if total == 1024 else f"its GPU adds 1024 ones to {total}"


def _smi(uuid: str) -> dict[str, str]:
    """Return the values of nvidia-smi for a GPU, by the names in `_ASKED`; {} if nvidia-smi is missing or fails."""
    try:
        printed = subprocess.run(
            ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", "--format=csv,noheader,nounits",
             f"--query-gpu={','.join(_ASKED.values())}"],
            capture_output=True, text=True, timeout=_SMI_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in printed.strip().split(",")]
    return dict(zip(_ASKED, values, strict=True)) if len(values) == len(_ASKED) else {}


# --- the verdict ------------------------------------------------------------------------------------------------------


def find_odd(facts: Sequence[RankFacts], nodes: NodeLayout, rates: Rates) -> list[str]:
    """Describe everything odd in a cluster.

    Args:
        facts: Facts of all ranks.
        nodes: The node of each rank.
        rates: Rates of all pairs of ranks; empty if none were measured.

    Returns:
        One sentence for each oddity, with its ranks and hosts. Empty for a sound cluster.
    """
    return [
        *(f"{_at([entry.rank], nodes)}: {fault}" for entry in facts for fault in entry.faults),
        *_shared_gpus(facts, nodes),
        *_different(facts, nodes),
        *_fewer_ranks(nodes),
        *slow_links(rates, nodes),
    ]


def slow_links(rates: Rates, nodes: NodeLayout) -> list[str]:
    """Describe links, ranks and pairs of nodes that are slower than half of the median of their kind.

    Args:
        rates: Rates of pairs of ranks.
        nodes: The node of each rank.

    Returns:
        Sentences. A rank whose links of one kind are all slow gets one sentence, and so does a pair of nodes.
    """
    found: list[str] = []
    for kind, links in by_kind(rates, nodes).items():
        if not links:
            continue
        usual = median(links.values())
        slow = {pair: rate for pair, rate in links.items() if rate < SLOW * usual}
        unlike = f"less than half of the median {kind}, {usual:.3g} GB/s"
        for rank in sorted({rank for pair in slow for rank in pair}):
            own = [rate for pair, rate in links.items() if rank in pair]
            if len(own) > 1 and all(rate < SLOW * usual for rate in own):
                found.append(
                    f"{_at([rank], nodes)}: all {len(own)} links {kind} are slow, {max(own):.3g} GB/s: {unlike}"
                )
                slow = {pair: rate for pair, rate in slow.items() if rank not in pair}
        if kind == BETWEEN:
            for ends, pairs in _by_nodes(links, nodes).items():
                if len(pairs) > 1 and all(pair in slow for pair in pairs):
                    hosts = " and ".join(nodes.hosts[end] for end in ends)
                    best = max(slow[pair] for pair in pairs)
                    found.append(f"hosts {hosts}: all links between them are slow, {best:.3g} GB/s: {unlike}")
                    slow = {pair: rate for pair, rate in slow.items() if pair not in pairs}
        found += [f"link of {_at(pair, nodes)}: {rate:.3g} GB/s, {unlike}" for pair, rate in slow.items()]
    return found


def by_kind(rates: Rates, nodes: NodeLayout) -> dict[str, dict[tuple[int, int], float]]:
    """Split links into those within hosts and those between hosts. Each kind has a median of its own."""
    found: dict[str, dict[tuple[int, int], float]] = {WITHIN: {}, BETWEEN: {}}
    for (one, other), rate in sorted(rates.items()):
        found[WITHIN if nodes.node(one) == nodes.node(other) else BETWEEN][one, other] = rate
    return found


def node_rates(rates: Rates, nodes: NodeLayout) -> dict[tuple[int, int], float]:
    """Return the rate between each two nodes if all ranks of the smaller node send at once.

    It is the mean rate of their links times the number of these ranks.
    """
    found = {}
    for ends, pairs in _by_nodes(by_kind(rates, nodes)[BETWEEN], nodes).items():
        at_once = min(nodes.nodes.count(end) for end in ends)
        found[ends] = at_once * sum(rates[pair] for pair in pairs) / len(pairs)
    return found


def values_of(facts: Sequence[RankFacts]) -> dict[str, dict[str, list[int]]]:
    """Return the ranks with each value of each compared fact, the most frequent value first."""
    names = list(dict.fromkeys(name for entry in facts for name in entry.compared))
    found: dict[str, dict[str, list[int]]] = {}
    for name in names:
        by_value: dict[str, list[int]] = {}
        for entry in facts:
            by_value.setdefault(entry.compared.get(name, "unknown"), []).append(entry.rank)
        found[name] = dict(sorted(by_value.items(), key=lambda item: -len(item[1])))
    return found


def transfer_rounds(nodes: NodeLayout) -> list[list[tuple[int, int]]]:
    """Order all pairs of ranks in rounds so that all links of a kind are measured under equal load.

    Within hosts, and between hosts with equal numbers of ranks, all ranks transfer at once, each with one peer (a
    round-robin tournament by the circle method). Pairs between hosts with different numbers of ranks transfer one
    after another.

    Args:
        nodes: The node of each rank.

    Returns:
        Rounds of pairs, the lower rank first. A rank is in at most one pair of a round.
    """
    members = nodes.split(nodes.ranks)
    inside = [_circle(part) for part in members]
    rounds = [
        [pair for games in inside if step < len(games) for pair in games[step]]
        for step in range(max(map(len, inside), default=0))
    ]
    if len({len(part) for part in members}) == 1:
        size = len(members[0])
        for games in _circle(range(len(members))):
            rounds += [
                [(members[a][i], members[b][(i + shift) % size]) for a, b in games for i in range(size)]
                for shift in range(size)
            ]
    else:
        rounds += [[pair] for a, b in combinations(members, 2) for pair in ((i, j) for i in a for j in b)]
    return [[(min(pair), max(pair)) for pair in pairs] for pairs in rounds if pairs]


def _circle(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which all players meet once. With an odd number, one player rests in each round."""
    seats: list[int | None] = [*players, *([None] * (len(players) % 2))]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats.insert(1, seats.pop())
    return rounds


def _by_nodes(links: Rates, nodes: NodeLayout) -> dict[tuple[int, int], list[tuple[int, int]]]:
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for pair in links:
        one, other = sorted(nodes.node(rank) for rank in pair)
        found.setdefault((one, other), []).append(pair)
    return found


def _different(facts: Sequence[RankFacts], nodes: NodeLayout) -> list[str]:
    found = []
    for name, by_value in values_of(facts).items():
        if len(by_value) == 1:
            continue
        (usual, most), *others = by_value.items()
        if len(most) == len(others[0][1]):
            sides = "; ".join(f"{value} on {_at(ranks, nodes)}" for value, ranks in by_value.items())
            found.append(f"{name} differs, without a majority: {sides}")
            continue
        found += [
            f"{_at(ranks, nodes)}: {name} is {value}, but {usual} on {len(most)} of {len(facts)} ranks"
            for value, ranks in others
        ]
    return found


def _shared_gpus(facts: Sequence[RankFacts], nodes: NodeLayout) -> list[str]:
    users: dict[str, list[int]] = {}
    for entry in facts:
        if entry.gpu is not None:
            users.setdefault(entry.gpu, []).append(entry.rank)
    return [f"{_at(ranks, nodes)}: share one GPU, {gpu}" for gpu, ranks in users.items() if len(ranks) > 1]


def _fewer_ranks(nodes: NodeLayout) -> list[str]:
    sizes = [len(part) for part in nodes.split(nodes.ranks)]
    if len(set(sizes)) == 1:
        return []
    usual = max(sorted(set(sizes), reverse=True), key=sizes.count)  # in a tie the larger
    return [
        f"host {host}: {size} rank{'s' * (size > 1)}, but other hosts have {usual}"
        for host, size in zip(nodes.hosts, sizes, strict=True)
        if size != usual
    ]


def _at(ranks: Sequence[int], nodes: NodeLayout) -> str:
    hosts = list(dict.fromkeys(nodes.host(rank) for rank in ranks))
    return f"{format_ranks(ranks)} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)})"
