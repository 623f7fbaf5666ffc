"""The job's store, asked on a thread beside the caller's."""

from torch.distributed import HashStore

from ep_moe.parallel.answering_store import AnsweringStore


def test_a_store_answers_where_its_thread_is_gone():
    """As in a fork, which has the caller's thread alone."""
    store = AnsweringStore(HashStore(), 5.0, "this process")
    store.set("key", "value")
    store._calls.put(None)
    store._thread.join()
    assert store.get("key") == b"value"
