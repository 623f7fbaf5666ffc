"""Ranks on this host without a launcher: N gloo processes from a preloaded fork server.

For `ep-moe run` on a laptop and for tests; real jobs use torchrun. If a rank raises, exits or hangs, all ranks are
ended, and the error has every rank's traceback (or the stack of a rank that hangs). Ranks end with the process that
started them, however it ends. They ignore Ctrl-C, which that process handles.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ep_moe.errors import EPMoEError
from ep_moe.parallel.rank_group import barrier

_PRELOAD = "ep_moe.testing.preload"
_GRACE_S = 2.0  # seconds that the other ranks have to report after the first failure

# A process that ends the fork server when the process that started it ends, which closes its end of a pipe. The server
# itself checks that only after its imports, which take seconds. Ranks check it themselves.
_GUARD = """
import os, select, signal, sys, time
pid, pipe = map(int, sys.argv[1:])
try:
    server = os.pidfd_open(pid)  # no other process that gets its number later
except (AttributeError, OSError):
    server = None
if server is None:
    os.read(pipe, 1)
    time.sleep(0.3)  # one that serves ends by itself
    if os.getpgid(pid) == os.getpgid(0):
        os.kill(pid, signal.SIGKILL)
elif server not in select.select([pipe, server], [], [])[0] and not select.select([server], [], [], 0.3)[0]:
    signal.pidfd_send_signal(server, signal.SIGKILL)
"""
_guards: dict[int, int] = {}  # the pipe to the guard, by the fork server's process id; a process has one fork server


class RanksFailed(RuntimeError):
    """One or more ranks raised, exited or hung. errors: the EPMoEErrors that ranks raised, by rank."""

    def __init__(self, message: str, errors: Mapping[int, EPMoEError]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


@dataclass(frozen=True)
class _Report:
    """The report of a rank: its result, or the text of its failure and the error if it is an EPMoEError."""

    ok: bool
    value: Any
    error: EPMoEError | None = None


def run_local_ranks(
    target: str,
    world: int,
    kwargs: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = 60.0,
    threads: int = 1,
    expect_dead: Collection[int] = (),
) -> list[Any]:
    """Call `target` ("module:function") with `kwargs` on `world` ranks; return their results in rank order.

    Each rank has an initialized gloo process group. Raises RanksFailed if a rank raises, exits or hangs.

    The ranks share a FileStore, so they need no port and no name server. A TCPStore looks up the name of 127.0.0.1 at
    every connection, which takes 5 s if an answer is lost.

    deadline_s: seconds for the whole run, and the timeout of collectives; threads: torch threads per rank
    expect_dead: ranks that may die or hang (for tests of failures); their result is None
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world):
                parent, child = context.Pipe(duplex=False)
                together = not expect_dead
                arguments = (target, dict(kwargs or {}), rank, world, deadline_s, threads, together, child, folder)
                process = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                child.close()
                pipes.append(parent)
                processes.append(process)
            reports = _collect(pipes, processes, time.monotonic() + deadline_s, set(expect_dead), Path(folder))
            for rank, process in enumerate(processes):
                process.join(_GRACE_S if reports[rank].ok and rank not in expect_dead else 0)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"--- rank {rank} ---\n{report.value}" for rank, report in enumerate(reports) if not report.ok]
    if failures:
        errors = {rank: report.error for rank, report in enumerate(reports) if report.error is not None}
        raise RanksFailed(f"{len(failures)} of {world} ranks failed in {target}\n" + "\n".join(failures), errors)
    return [report.value for report in reports]


def _start_server() -> None:
    """Start the fork server unless it runs, and its guard, which ends it with this process."""
    resource_tracker.ensure_running()  # first, because it unblocks the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:  # processes that are started here inherit the mask, so Ctrl-C reaches only this process
        forkserver.ensure_running()
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is None or pid in _guards:
            return
        while _guards:  # the guard of a fork server that has ended
            os.close(_guards.popitem()[1])
        reader, _guards[pid] = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", _GUARD, str(pid), str(reader)]
        util.spawnv_passfds(os.fsencode(sys.executable), command, [reader])
        os.close(reader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _collect(
    pipes: list[Connection], processes: list[Any], deadline: float, expect_dead: set[int], folder: Path
) -> list[_Report]:
    """Return one report per rank. After the first failure the others have `_GRACE_S` to report."""
    reports: dict[int, _Report] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while set(open_pipes.values()) - expect_dead and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                reports[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                on_purpose = rank in expect_dead
                text = None if on_purpose else f"exited with code {processes[rank].exitcode}"
                reports[rank] = _Report(on_purpose, text)
            if not reports[rank].ok:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in range(len(pipes)):
        if rank in expect_dead:
            reports.setdefault(rank, _Report(True, None))
        elif rank not in reports:
            stack = _where(processes[rank], rank, folder)
            reports[rank] = _Report(False, f"hangs (or was stopped after another rank failed) at\n{stack}")
    return [reports[rank] for rank in range(len(pipes))]


def _where(process: Any, rank: int, folder: Path) -> str:
    """Return the stack of a rank that does not answer, by faulthandler."""
    if process.pid is None or not process.is_alive():
        return "no process"
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    return (folder / f"stack{rank}").read_text()


def _rank_main(
    target: str,
    kwargs: dict[str, Any],
    rank: int,
    world: int,
    deadline_s: float,
    threads: int,
    together: bool,
    pipe: Connection,
    folder: str,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent ends the ranks
    reports = os.dup(pipe.fileno())  # stays open until this process ends
    if _reader_is_gone(reports, 0):
        os._exit(1)
    threading.Thread(target=_end_with_reader, args=(reports, folder), daemon=True, name="ep_moe parent").start()
    try:
        stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115  (faulthandler writes to it until the process ends)
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(threads)
        tqdm.set_lock(threading.RLock())  # its default is a named semaphore, which a killed rank would leave behind
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        store = dist.FileStore(f"{folder}/store", -1)
        timeout = timedelta(seconds=deadline_s)
        store.set_timeout(timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        # a target that ends at once must not close a connection that a peer is still opening
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(world)])
        result = _resolve(target)(**kwargs)
        if together:  # gloo may still be connecting sub-groups: a rank that leaves early breaks a peer's connection
            barrier(torch.device("cpu"))
        pipe.send_bytes(pickle.dumps(_Report(True, result)))  # pickle copies tensors: this process ends, and its memory
    except BaseException as error:
        if _reader_is_gone(reports, 0):  # another rank may have noticed first and removed the folder
            os._exit(1)
        ours = error if isinstance(error, EPMoEError) else None
        pipe.send_bytes(pickle.dumps(_Report(False, traceback.format_exc(), ours)))
    pipe.close()


def _end_with_reader(pipe: int, folder: str) -> None:
    """End this process when nothing reads its reports any more, because the process that started it was killed."""
    _reader_is_gone(pipe, None)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _reader_is_gone(pipe: int, timeout_ms: int | None) -> bool:
    """Return whether the other end of a pipe is closed. timeout_ms: how long to wait for that, None for no limit"""
    poll = select.poll()
    poll.register(pipe, 0)  # reports only errors, such as a closed other end
    return bool(poll.poll(timeout_ms))


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function
