"""Test ranks in processes of this host, and what ends them."""

import multiprocessing
import os
import shutil
import signal
import time

import pytest

from ep_moe.parallel import local_launch


def wait(file):
    file.write_text("")
    time.sleep(60)


def test_a_rank_ends_where_no_process_reads_its_report(tmp_path):
    """A rank ends if no process reads its report. After SIGKILL of its parent, nothing else can end it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([local_launch._PRELOAD])
    local_launch._start_server()
    reader, pipe = context.Pipe(duplex=False)
    folder, begun = tmp_path / "store", tmp_path / "begun"
    folder.mkdir()
    arguments = (f"{__name__}:wait", {"file": begun}, 0, 1, 60.0, 1, False, pipe, str(folder))
    rank = context.Process(target=local_launch._rank_main, args=arguments, daemon=True)
    rank.start()
    pipe.close()
    while not begun.exists():
        assert rank.is_alive()
        time.sleep(0.01)
    reader.close()
    rank.join(timeout=10)
    assert rank.exitcode == 1
    assert not folder.exists()


def test_a_rank_that_begins_while_another_clears_up_ends_without_a_word(tmp_path, monkeypatch, capfd):
    """A rank that starts while another cleans up ends silently.

    The reader closes after this rank looked for it, and another rank has removed the folder.
    """
    reader, pipe = multiprocessing.Pipe(duplex=False)
    folder = tmp_path / "store"
    folder.mkdir()

    class Gone:
        """A thread that starts just as the other ranks end."""

        def __init__(self, **_):
            pass

        def start(self):
            reader.close()
            shutil.rmtree(folder)
            assert local_launch._reader_is_gone(pipe.fileno(), 10_000)  # true once the test has closed its copy too

    monkeypatch.setattr(local_launch.threading, "Thread", Gone)
    if (child := os.fork()) == 0:
        try:
            local_launch._rank_main("unused:unused", {}, 0, 1, 60.0, 1, False, pipe, str(folder))
        finally:
            os._exit(0)
    reader.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("how", [signal.SIG_BLOCK, signal.SIG_UNBLOCK], ids=["blocked", "not blocked"])
def test_the_signals_that_the_caller_blocks_stay_as_they_are(how):
    """The fork server's start keeps the caller's blocked signals. Ctrl-C is blocked only while it starts."""
    before = signal.pthread_sigmask(how, {signal.SIGINT})
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        local_launch._start_server()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
