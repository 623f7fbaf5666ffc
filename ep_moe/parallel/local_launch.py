"""Ranks on this machine without a launcher: N gloo processes from a preloaded fork server.

For `ep-moe run` on a laptop and for tests; real jobs use torchrun. A rank that raises, exits or hangs ends all of them
at once, with every rank's traceback (or the line it stands on) in the error. Ranks end with the process that began
them, however it ends, and leave Ctrl-C to it.
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
_GRACE_S = 2.0  # how long the others may take to report after the first failure

# Ends the fork server with the process that began it, which holds the other end of its pipe. The server looks whether
# that one is there only once it has imported everything, seconds later. Ranks look for themselves.
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
_guards: dict[int, int] = {}  # the pipe to the guard of a fork server, of which multiprocessing has one a process


class RanksFailed(RuntimeError):
    """One or more ranks raised, exited or hung. errors: what ranks raised on purpose (EPMoEError), by rank."""

    def __init__(self, message: str, errors: Mapping[int, EPMoEError]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


@dataclass(frozen=True)
class _Report:
    """What a rank sent: its result, or the text of its failure, with the error where that was one of ours."""

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
    """Call `target` ("module:function") with `kwargs` on `world` ranks; returns their results in rank order.

    Each rank has an initialized gloo process group. threads: torch threads per rank.
    expect_dead: ranks that may die or hang (for tests of that); their result is None.

    The ranks meet in a file: no port, and no name server (TCPStore looks up the name of 127.0.0.1 at every connection,
    which costs 5 s wherever one answer is lost).
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
    """Start the fork server unless it runs, and what ends it with this process."""
    resource_tracker.ensure_running()  # unblocks the signal, and so comes first
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:  # what is started here, ranks too, inherits this: Ctrl-C reaches this process alone
        forkserver.ensure_running()
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is None or pid in _guards:
            return
        while _guards:  # of a server that is gone
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
    """One report per rank; stops early after the first failure."""
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
    """The stack of a rank that does not answer, by faulthandler."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the first one ends the others
    reports = os.dup(pipe.fileno())  # open until this process ends
    if _reader_is_gone(reports, 0):
        os._exit(1)
    threading.Thread(target=_end_with_reader, args=(reports, folder), daemon=True, name="ep_moe parent").start()
    try:
        stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115  (faulthandler writes to it until the process ends)
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(threads)
        tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which a rank that is killed leaves behind
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        store = dist.FileStore(f"{folder}/store", -1)
        timeout = timedelta(seconds=deadline_s)
        store.set_timeout(timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        # a target that ends at once must not break the connection of a peer that still opens it
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(world)])
        result = _resolve(target)(**kwargs)
        if together:  # gloo connects sub-groups in its own time: a rank that leaves early breaks a peer's connection
            barrier(torch.device("cpu"))
        pipe.send_bytes(pickle.dumps(_Report(True, result)))  # tensors by value: this process does not stay
    except BaseException as error:
        if _reader_is_gone(reports, 0):  # another rank saw that first, and took the folder away
            os._exit(1)
        ours = error if isinstance(error, EPMoEError) else None
        pipe.send_bytes(pickle.dumps(_Report(False, traceback.format_exc(), ours)))
    pipe.close()


def _end_with_reader(pipe: int, folder: str) -> None:
    """End this process when nothing reads its reports any more: the one that began it was killed."""
    _reader_is_gone(pipe, None)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _reader_is_gone(pipe: int, timeout_ms: int | None) -> bool:
    """Whether the other end of a pipe is closed. timeout_ms: how long to wait for that, None for ever"""
    poll = select.poll()
    poll.register(pipe, 0)  # errors alone, of which a closed other end is one
    return bool(poll.poll(timeout_ms))


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function
