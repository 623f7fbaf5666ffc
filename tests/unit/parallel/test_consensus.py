"""Test the consensus of ranks, on one rank or with one thread per rank."""

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from ep_moe import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    EPMoEError,
    InputError,
    OutOfMemory,
    PeerTimeout,
)
from ep_moe.parallel.consensus import StoreConsensus


def test_an_error_that_ranks_agreed_on_leaves_the_agreement_around_it_as_it_is():
    """An error that all ranks agreed on passes through an enclosing consensus unchanged.

    To agree on it again would need all ranks once more.
    """
    consensus, raised = StoreConsensus(None, [0], 0, 1.0), []

    def fails():
        try:
            consensus.raise_on_all_ranks("one", InputError("bad"))
        except InputError as error:
            raised.append(error)
            raise

    with pytest.raises(InputError, match="bad") as left, consensus.propagate_errors("all"):
        fails()
    assert left.value is raised[0]


def test_a_peer_that_was_lost_is_not_waited_for_again():
    """After a lost peer, an enclosing consensus does not wait for it again."""
    consensus, lost = StoreConsensus(None, [0], 0, 1.0), PeerTimeout("rank 1 did not arrive")
    with pytest.raises(PeerTimeout) as left, consensus.propagate_errors("all"):
        raise lost
    assert left.value is lost


def test_an_agreement_on_longer_work_has_a_longer_deadline(monkeypatch):
    waited = []
    monkeypatch.setattr(
        StoreConsensus, "_decide", lambda self, key, what, deadline_s: waited.append((what, deadline_s))
    )
    consensus = StoreConsensus(dist.HashStore(), [0, 1], 0, 5.0)
    consensus.raise_on_all_ranks("usual", None)
    consensus.raise_on_all_ranks("long", None, deadline_s=60.0)
    consensus.raise_on_all_ranks("short", None, deadline_s=1.0)
    assert consensus.compute_on_owner("made", lambda: 7, deadline_s=60.0) == 7
    assert waited == [("usual", 5.0), ("long", 60.0), ("short", 5.0), ("made", 60.0)]


def test_an_error_of_fewer_ranks_is_reported_to_all_of_the_agreement_around_it(monkeypatch):
    """An error of a smaller group is reported to all ranks of the enclosing consensus.

    The other ranks did not learn of it, and would wait.
    """
    pair, whole, reported = StoreConsensus(None, [0], 0, 1.0), StoreConsensus(None, [0], 0, 1.0), []
    monkeypatch.setattr(whole, "raise_on_all_ranks", lambda what, problem: reported.append((what, str(problem))))
    with pytest.raises(InputError, match="bad"), whole.propagate_errors("all"):
        pair.raise_on_all_ranks("one", InputError("bad"))
    assert [what for what, _ in reported] == ["all"]
    assert "bad" in reported[0][1]


def agree(*turns: Callable[[StoreConsensus], None] | None, deadline_s: float = 5.0) -> list[EPMoEError | None]:
    """Run one StoreConsensus call per rank in threads, and return what each raised. A rank with None does not come."""
    store = HashStore()
    outcome: list[EPMoEError | None] = [None] * len(turns)

    def run(rank: int) -> None:
        try:
            turns[rank](StoreConsensus(store, range(len(turns)), rank, deadline_s))
        except EPMoEError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(turns)) if turns[rank] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_agreement_on_equal_facts():
    assert agree(*[lambda a: a.require_equal("layer", {"x": 1, "y": [2, None]})] * 3) == [None] * 3


def test_agreement_names_every_field_that_differs():
    outcome = agree(
        lambda a: a.require_equal("layer", {"x": 1, "y": "a", "z": 0}),
        lambda a: a.require_equal("layer", {"x": 2, "y": "a", "z": 0}),
        lambda a: a.require_equal("layer", {"x": 1, "y": "b", "z": 0}),
    )
    assert {type(error) for error in outcome} == {ConfigError}
    assert {str(error) for error in outcome} == {
        "layer: the ranks were given different values; pass the same values on all ranks. "
        'x: 1 on ranks 0, 2, 2 on rank 1; y: "a" on ranks 0, 1, "b" on rank 2'
    }


def test_agreement_names_a_field_that_one_rank_lacks():
    outcome = agree(lambda a: a.require_equal("layer", {"x": 1}), lambda a: a.require_equal("layer", {}))
    assert "x: 1 on rank 0, null on rank 1" in str(outcome[0])


def test_agreement_on_facts_that_json_has_no_word_for():
    """Values that JSON cannot represent are compared too, such as a user's argument of a wrong type."""
    outcome = agree(*[lambda a, value=value: a.require_equal("layer", {"x": value}) for value in ({1}, {2})])
    assert {str(error) for error in outcome} == {
        "layer: the ranks were given different values; pass the same values on all ranks. "
        'x: "{1}" on rank 0, "{2}" on rank 1'
    }


def test_agreement_of_ranks_that_are_elsewhere():
    outcome = agree(
        lambda a: a.raise_on_all_ranks("EPContext.destroy", None), lambda a: a.require_equal("MoELayer moe0", {"x": 1})
    )
    assert {str(error) for error in outcome} == {
        "EPContext.destroy: the ranks were given different values; pass the same values on all ranks. "
        'what: "EPContext.destroy" on rank 0, "MoELayer moe0" on rank 1'
    }


@pytest.mark.parametrize(
    "kind", [ConfigError, BackendUnavailable, CheckpointError, InputError, OutOfMemory, PeerTimeout]
)
def test_agreement_passes_a_problem_on(kind):
    fine = lambda a: a.require_equal("layer", {})  # noqa: E731
    outcome = agree(fine, lambda a: a.require_equal("layer", {}, kind("no such thing")), fine)
    assert {(type(error), str(error)) for error in outcome} == {(kind, "layer: rank 1: no such thing")}


def test_of_several_problems_that_of_the_first_rank_is_raised():
    outcome = agree(
        lambda a: a.raise_on_all_ranks("layer", None),
        lambda a: a.raise_on_all_ranks("layer", InputError("the first")),
        lambda a: a.raise_on_all_ranks("layer", CheckpointError("the second")),
    )
    assert {(type(error), str(error)) for error in outcome} == {(InputError, "layer: ranks 1, 2: the first")}


def test_a_problem_that_fewer_ranks_agreed_on_is_named_once():
    found = ConfigError("layer: rank 1: no such thing")
    outcome = agree(*[lambda a: a.raise_on_all_ranks("layer", found)] * 2)
    assert {str(error) for error in outcome} == {"layer: rank 1: no such thing"}
    outcome = agree(
        lambda a: a.raise_on_all_ranks("layer", None),
        lambda a: a.raise_on_all_ranks("layer", ConfigError("layer: no such")),
    )
    assert {str(error) for error in outcome} == {"layer: rank 1: no such"}


def test_agreement_on_a_problem_that_is_not_ours():
    outcome = agree(
        lambda a: a.raise_on_all_ranks("groups", None), lambda a: a.raise_on_all_ranks("groups", OSError("disk"))
    )
    assert {(type(error), str(error)) for error in outcome} == {(ConfigError, "groups: rank 1: disk")}


def test_agreement_of_one_rank_needs_no_store():
    alone = StoreConsensus(None, [0], 0, 1.0)
    alone.require_equal("layer", {})
    with pytest.raises(BackendUnavailable, match="no such thing"):
        alone.raise_on_all_ranks("layer", BackendUnavailable("no such thing"))


def test_agreements_come_in_order():
    def three(a: StoreConsensus) -> None:
        for turn in range(3):
            a.require_equal("layer", {"turn": turn})

    assert agree(three, three) == [None, None]


def test_one_rank_of_each_place_is_the_first_each_time():
    found: dict[str, list[bool]] = {place: [] for place in "ab"}

    def twice(place: str) -> Callable[[StoreConsensus], None]:
        def ask(a: StoreConsensus) -> None:
            for turn in range(2):
                found[place].append(a.first_here("download", place))
                a.raise_on_all_ranks(f"download {turn}", None)

        return ask

    assert agree(twice("a"), twice("b"), twice("a"), twice("a")) == [None] * 4
    assert {place: sum(firsts) for place, firsts in found.items()} == {"a": 2, "b": 2}


def test_agreement_names_who_did_not_come():
    comes = lambda a: a.raise_on_all_ranks("destroy", None)  # noqa: E731
    outcome = agree(comes, None, comes, None, deadline_s=0.2)
    sentence = "destroy: ranks 1, 3 did not arrive within 0.2 s; all ranks must make the same calls in the same order"
    assert {str(error) for error in outcome if error} == {sentence}


def test_agreement_without_the_rank_that_decides():
    outcome = agree(None, lambda a: a.raise_on_all_ranks("destroy", None), deadline_s=0.2)
    assert isinstance(outcome[1], PeerTimeout)
    assert str(outcome[1]) == "destroy: no verdict from rank 0 within 0.4 s; it died, or did not make this call"
