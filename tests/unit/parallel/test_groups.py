"""Names that ranks find for themselves, and that are the same on all of them."""

import torch.distributed as dist

from ep_moe.parallel import groups


def test_ranks_that_made_things_with_others_before_find_one_name(monkeypatch):
    """Rank 0 had a context of its own, and counted it: of those that ranks 0 and 1 make together it is none."""
    store = dist.HashStore()
    monkeypatch.setattr(groups, "default_store", lambda: store)

    def name(rank, ranks):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return groups.numbered("context", ranks)

    before = name(0, [0])
    first = [name(0, [0, 1]), name(1, [1, 0])]
    second = [name(0, [0, 1]), name(1, [0, 1])]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert len({before, first[0], second[0]}) == 3
