"""Ranks in processes of this host: what ends them."""

import multiprocessing
import time

from ep_moe.parallel import local_launch


def wait(file):
    file.write_text("")
    time.sleep(60)


def test_a_rank_ends_where_no_process_reads_its_report(tmp_path):
    """As after SIGKILL of the process that began it, which can end no rank."""
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
