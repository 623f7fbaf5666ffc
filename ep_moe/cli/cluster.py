"""`ep-moe doctor --cluster`: all ranks compare versions, GPUs and link rates before a job, and name what is odd.

Facts are exchanged through a TCP store of torch.distributed, so they arrive even if NCCL does not work. Rates are
measured over NCCL if every rank has its own GPU and all have one version of NCCL, else over gloo.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from ep_moe.checks import deadline_problem
from ep_moe.cli.cluster_facts import RankFacts, Rates, find_odd, rank_facts, slow_links, transfer_rounds
from ep_moe.errors import ConfigError
from ep_moe.parallel.consensus import StoreConsensus
from ep_moe.parallel.nodes import NodeLayout, format_ranks
from ep_moe.parallel.rank_group import barrier
from ep_moe.runtime.devices import on_device

PASSES = 3  # a link counts as slow if it is slow in all passes, because other work may disturb one of them
_BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}  # bytes of one transfer, one way
_REPEATS = 5
_POLL_S = 0.1
_FAREWELL_S = 10.0

TimePair = Callable[[torch.device, int, int], float]


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place in the job, and the address of the store where the ranks meet."""

    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    hosted: bool  # torchrun's agent hosts the store; else rank 0 does
    attempt: str
    may_bind_gpus: bool  # the launcher may make only its own GPU visible to each process

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchEnvironment:
        """Read the environment variables of torchrun, or of srun if there are none.

        Raises:
            ConfigError: A variable is missing, or is not a number.
        """
        slurm = "RANK" not in environment and "SLURM_PROCID" in environment
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID") if slurm else ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        numbers = []
        for name in (*names, "MASTER_PORT"):
            text = environment.get(name, "")
            if not text.isdigit():
                raise ConfigError(
                    f"environment variable {name} must be a number, got {text!r}; launch ep-moe doctor --cluster with "
                    f"torchrun, or with srun and MASTER_ADDR, MASTER_PORT of the first host"
                )
            numbers.append(int(text))
        rank, world, local_rank, port = numbers
        if not (host := environment.get("MASTER_ADDR")):
            raise ConfigError("environment variable MASTER_ADDR must name the first host, got nothing; set it")
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank, world, local_rank, host, port, hosted, environment.get("TORCHELASTIC_RESTART_COUNT", "0"), slurm
        )

    def store(self, deadline_s: float, *, serve: bool = True) -> Store:
        """Connect to the store. Rank 0 hosts it, unless torchrun's agent does."""
        store = TCPStore(
            self.host, self.port, None, serve and self.rank == 0 and not self.hosted,
            timedelta(seconds=deadline_s), wait_for_workers=False,
        )  # fmt: skip
        return PrefixStore(f"ep_moe doctor {self.attempt}", store)

    def gpu(self) -> int | None:
        """Return the index of this rank's GPU, even if it does not exist; None if no GPU is visible."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            return None
        return self.local_rank % count if self.may_bind_gpus else self.local_rank


@dataclass(frozen=True)
class ClusterReport:
    """The result of the check, the same on all ranks.

    Args:
        odd: Sentences about what is odd; none for a sound cluster.
        facts: Facts of all ranks; empty if some ranks did not connect.
        nodes: Which ranks share a host.
        backend: The backend of the rate measurements, with the reason if it is not NCCL.
        rates: GB/s each way for each pair of ranks.
    """

    odd: list[str]
    facts: list[RankFacts] = field(default_factory=list)
    nodes: NodeLayout | None = None
    backend: str = ""
    rates: Rates = field(default_factory=dict)


def run(
    deadline_s: float,
    show: Callable[[ClusterReport], None],
    *,
    facts: Callable[[int, int, int | None], RankFacts] = rank_facts,
    time_pair: TimePair | None = None,
    environment: Mapping[str, str] | None = None,
) -> ClusterReport:
    """Check the cluster. Called by all ranks of the job.

    Args:
        deadline_s: Seconds to wait for ranks to connect, and again for their transfers.
        show: Called with the report on one rank, before any rank returns.
        facts: Collects a rank's facts from its rank, local rank and GPU index.
        time_pair: Measures GB/s each way from the device, the peer and the bytes of a transfer. Default: `pair_rate`.
        environment: The launcher's variables. Default: those of this process.

    Returns:
        The report, the same on all ranks that connected. If a transfer does not end, the process exits with code 1.

    Raises:
        ConfigError: The environment variables do not describe the ranks, or the deadline is invalid.
    """
    if (wrong := deadline_problem("--deadline", deadline_s)) is not None:
        raise ConfigError(wrong)
    launch = LaunchEnvironment.read(os.environ if environment is None else environment)
    gpu = launch.gpu()
    own = facts(launch.rank, launch.local_rank, gpu)
    try:
        store = launch.store(deadline_s)
    except RuntimeError as error:
        where = f"{launch.host}:{launch.port}"
        report = ClusterReport(
            [
                f"rank {launch.rank}: no answer from the store of rank 0 at {where} within {deadline_s:g} s: "
                f"{_line(error)}"
            ]
        )
        show(report)
        return report
    exchange = _StoreExchange(launch, store, deadline_s)
    exchange.publish("facts", asdict(own))
    if missing := exchange.missing("facts"):
        report = ClusterReport(
            [f"{format_ranks(missing)} did not come within {deadline_s:g} s, of {launch.world} ranks"]
        )
        return exchange.show_and_leave(report, show, missing)
    every = [_read_facts(entry) for entry in exchange.answers("facts")]
    nodes = NodeLayout.from_hosts(range(launch.world), [entry.host for entry in every])
    backend, reason = chosen_backend(every)
    device = torch.device("cpu") if backend == "gloo" or gpu is None else torch.device("cuda", gpu)
    rates, failures, lost = _measure(exchange, nodes, backend, device, time_pair or pair_rate, show)
    report = ClusterReport(find_odd(every, nodes, rates) + failures, every, nodes, backend + reason, rates)
    return exchange.show_and_leave(report, show, lost)


def chosen_backend(facts: Sequence[RankFacts]) -> tuple[str, str]:
    """Return the backend of the transfers, and the reason if it is not NCCL despite GPUs."""
    if all(entry.compared.get("device") == "cpu" for entry in facts):
        return "gloo", ""
    gpus = [entry.gpu for entry in facts]
    if None in gpus or len(set(gpus)) < len(gpus):
        return "gloo", " on the CPU: not every rank has a GPU of its own"
    if any("fails" in fault for entry in facts for fault in entry.faults):
        return "gloo", " on the CPU: a GPU fails"
    if len({entry.compared.get("NCCL") for entry in facts}) > 1:
        return "gloo", " on the CPU: the ranks have different versions of NCCL"
    return "nccl", ""


def pair_rate(device: torch.device, peer: int, size: int) -> float:
    """Measure the rate to a peer, which makes the same call.

    Args:
        device: The device of the bytes.
        peer: A rank of the default process group.
        size: Bytes each way.

    Returns:
        GB/s each way, the best of several transfers.
    """
    rows = torch.zeros(size, dtype=torch.uint8, device=device)
    arrived = torch.empty_like(rows)
    best = float("inf")
    for repeat in range(_REPEATS + 1):
        began = time.perf_counter()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, rows, peer), dist.P2POp(dist.irecv, arrived, peer)])
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:  # the first transfer sets up the connection
            best = min(best, time.perf_counter() - began)
    return size / best / 1e9


def _measure(
    exchange: _StoreExchange,
    nodes: NodeLayout,
    backend: str,
    device: torch.device,
    time_pair: TimePair,
    show: Callable[[ClusterReport], None],
) -> tuple[dict[tuple[int, int], float], list[str], list[int]]:
    """Return the rate of each pair (best of up to PASSES passes), sentences about failed transfers, and lost ranks."""
    rates: dict[tuple[int, int], float] = {}
    if exchange.launch.world == 1:
        return rates, [], []
    for attempt in range(PASSES):
        what = f"rates {attempt}"
        watch = threading.Timer(exchange.deadline_s, _transfers_hang, (exchange.launch, exchange.deadline_s, show))
        watch.daemon = True
        watch.start()
        own = _own_rates(exchange, nodes, backend, device, time_pair)
        watch.cancel()
        exchange.publish(what, own)
        if lost := exchange.missing(what):
            return {}, [f"{format_ranks(lost)}: lost during transfers, no rates within {exchange.deadline_s:g} s"], lost
        answers = exchange.answers(what)
        failures = [f"rank {rank} (host {nodes.host(rank)}): {text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            return {}, failures, []
        rows = [dict(row) for _, row in answers]
        for one, other in ((rank, peer) for rank, row in enumerate(rows) for peer in row if rank < peer):
            rate = min(rows[one][other], rows[other][one])  # both ends time the same transfers
            rates[one, other] = max(rates.get((one, other), 0.0), rate)
        if not slow_links(rates, nodes):
            break
    return rates, [], []


def _own_rates(
    exchange: _StoreExchange, nodes: NodeLayout, backend: str, device: torch.device, time_pair: TimePair
) -> tuple[str, list[tuple[int, float]]]:
    """Return the failure ("" for none) and this rank's rate to each peer."""
    rank, row = exchange.launch.rank, []
    try:
        with on_device(device):
            if not dist.is_initialized():
                dist.init_process_group(
                    backend, store=exchange.transfers, rank=rank, world_size=exchange.launch.world,
                    timeout=timedelta(seconds=2 * exchange.deadline_s + 60),  # longer than the watchdog timer's
                    device_id=device if device.type == "cuda" else None,
                )  # fmt: skip
            for pairs in transfer_rounds(nodes):
                exchange.step()
                barrier(device)
                exchange.step()
                for pair in pairs:
                    if rank in pair:
                        peer = pair[pair[0] == rank]
                        row.append((peer, time_pair(device, peer, _BYTES[backend])))
    except RuntimeError as error:
        return f"transfers over {backend} failed: {_line(error)}", []
    return "", row


def _transfers_hang(launch: LaunchEnvironment, deadline_s: float, show: Callable[[ClusterReport], None]) -> NoReturn:
    """Report the ranks that are behind, and end this process, which hangs in a transfer.

    It runs in a timer thread with a new connection to the store. The main thread hangs, and holds the other connection.
    """
    try:
        store = launch.store(_FAREWELL_S, serve=False)
        steps = [store.add(f"steps/{rank}", 0) for rank in range(launch.world)]
        behind = [rank for rank, number in enumerate(steps) if number == min(steps)]
        text = f"{format_ranks(behind)}: transfers did not end within {deadline_s:g} s, and these ranks are behind"
        consensus = StoreConsensus(store, range(launch.world), launch.rank, deadline_s)
        if consensus.first("report of a hang", str(launch.rank)) == str(launch.rank):
            show(ClusterReport([text]))
    finally:
        time.sleep(1.0)  # other ranks may still use the store that rank 0 hosts
        os._exit(1)


class _StoreExchange:
    """Exchanges small values between the ranks through the store."""

    def __init__(self, launch: LaunchEnvironment, store: Store, deadline_s: float) -> None:
        self.launch, self.store, self.deadline_s = launch, store, deadline_s
        self.transfers = PrefixStore("transfers", store)
        self._consensus = StoreConsensus(store, range(launch.world), launch.rank, deadline_s)

    def publish(self, what: str, value: Any) -> None:
        self.store.set(f"{what}/{self.launch.rank}", json.dumps(value))

    def answers(self, what: str) -> list[Any]:
        return [json.loads(self.store.get(f"{what}/{rank}")) for rank in range(self.launch.world)]

    def step(self) -> None:
        """Count a completed step of this rank's transfers."""
        self.store.add(f"steps/{self.launch.rank}", 1)

    def missing(self, what: str) -> list[int]:
        """Return the ranks without an answer within the deadline, as seen by the first rank that stopped waiting."""
        keys = [f"{what}/{rank}" for rank in range(self.launch.world)]
        decided = f"first/{what} missing"
        ends = time.monotonic() + self.deadline_s
        while time.monotonic() < ends and not self.store.check(keys) and not self.store.check([decided]):
            time.sleep(_POLL_S)
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        found: list[int] = json.loads(self._consensus.first(f"{what} missing", json.dumps(missing)))
        return found

    def show_and_leave(
        self, report: ClusterReport, show: Callable[[ClusterReport], None], missing: Sequence[int]
    ) -> ClusterReport:
        """Show the report on the first rank, and let the ranks leave.

        The first rank leaves last, because rank 0 may host the store.
        """
        here = [rank for rank in range(self.launch.world) if rank not in missing]
        if self.launch.rank in missing:  # this rank connected after the others had given up
            return report
        if self.launch.rank == here[0]:
            show(report)
            self.store.set("shown", "")
        else:
            self.store.wait(["shown"], timedelta(seconds=self.deadline_s))
        left = self.store.add("left", 1)
        ends = time.monotonic() + _FAREWELL_S
        while self.launch.rank == here[0] and left < len(here) and time.monotonic() < ends:
            time.sleep(_POLL_S)
            left = self.store.add("left", 0)
        if dist.is_initialized() and report.rates:  # without rates, transfers failed, and NCCL might wait for them
            dist.destroy_process_group()
        return report


def _read_facts(entry: Mapping[str, Any]) -> RankFacts:
    identity, name = entry["host"]
    return RankFacts(**{**entry, "host": (identity, name)})


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
