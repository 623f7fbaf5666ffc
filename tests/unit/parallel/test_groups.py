"""Names that ranks find for themselves, and that are the same on all of them; the environment of torchrun."""

import pytest
import torch.distributed as dist

from ep_moe import ConfigError
from ep_moe.parallel import groups
from ep_moe.parallel.groups import TorchrunEnv


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


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, r"RANK must be a number, got None; launch with torchrun, or use EPContext\.local\(\) for one process"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a number, got 'one'"),
        ({"RANK": "1"}, "WORLD_SIZE must be a number, got None"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number, got '-1'"),
    ],
)
def test_torchruns_environment_is_incomplete(env, sentence, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^environment variable {sentence}"):
        TorchrunEnv.read()


def test_torchruns_environment(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert TorchrunEnv.read() == TorchrunEnv(rank=5, local_rank=1, world_size=8, local_world_size=4)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert TorchrunEnv.read() == TorchrunEnv(rank=5, local_rank=5, world_size=8, local_world_size=8)
