"""Models with expert-parallel layers saved as checkpoints that transformers loads bit for bit."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from ep_moe import EPContext, ExpertMap, ParallelConfig
from ep_moe.checkpoint.source import INDEX
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.integrations.transformers import (
    expert_parallel,
    export_weights,
    load_pretrained,
    moe_layers,
    save_pretrained,
)
from ep_moe.testing import distributed, rank_device
from ep_moe.training import fully_shard
from tests.fixtures.checkpoint_files import FAMILIES, check_equal, quiet, save, tensors_of, tiny_model
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error
from tests.fixtures.interface_models import FORMATS, MODELS, interface_model

KINDS = {kind: interface_model for kind in MODELS if kind not in FAMILIES} | dict.fromkeys(FAMILIES, tiny_model)
# sizes, map (None: linear)
LAYOUTS = {
    1: [({}, None)],
    2: [({"tp": 2, "ep": 1, "etp": 2}, None), ({"dp": 2, "ep": 1}, None), ({"dp": 2}, ExpertMap.redundant(8, 2, 5))],
    4: [({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, None), ({"dp": 4}, ExpertMap.round_robin(8, 4))],
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Write what transformers saves for each kind and format; return the root, where tests save too."""
    quiet()
    root = tmp_path_factory.mktemp("saved")
    for kind, make in KINDS.items():
        for form, original in FORMATS.items():
            save(make(kind), root / kind / form, save_original_format=original, max_shard_size="60KB")
    return root


def check_sizes(folder, most):
    """Check that files hold at most `most` bytes of tensors, unless a file has only one tensor."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118 (no mapping)
        assert len(sizes) == 1 or sum(sizes) <= most, file
        assert file.stat().st_size < sum(sizes) + 20_000, "what a view is cut from is no part of it"


def kinds_of(sizes, at):
    """Return all kinds for one process and for etp, which cuts experts in a way of each kind; else every other kind."""
    kinds = list(KINDS)
    return kinds if sizes in ({}, {"tp": 2, "ep": 1, "etp": 2}) else kinds[at % 2 :: 2]


@distributed(1, 2, 4)
def test_files_are_those_of_transformers(folders, world_size):
    quiet()
    for at, (sizes, expert_map) in enumerate(LAYOUTS[world_size]):
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            for kind in kinds_of(sizes, at):
                model = load_pretrained(folders / kind / "per_expert", context, expert_map=expert_map, progress=False)
                for form, original in FORMATS.items():
                    to = folders / f"by {world_size}" / str(at) / kind / form
                    save_pretrained(model, to, save_original_format=original, max_shard_bytes=60_000)
                    assert (to / INDEX).exists() or rank_device().type == "cuda", "no rank returns before it is there"
                    if dist.get_rank() == 0:  # hosts do not share the folder
                        check_equal(tensors_of(to), tensors_of(folders / kind / form))
                        check_sizes(to, 60_000)
                        whole = json.loads((to / INDEX).read_text())
                        assert whole["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(to).values())
                        index = whole["weight_map"]
                        assert len(set(index.values())) > 1
                        assert {path.name for path in to.glob("*.safetensors")} == set(index.values())
                        sources = (AutoModelForCausalLM.from_pretrained(one) for one in (to, folders / kind / form))
                        check_equal(*(one.state_dict() for one in sources))


@distributed(4)
def test_experts_travel_to_the_rank_that_writes_alone(folders, monkeypatch, world_size):
    """Only ranks of the writing rank's EP group send experts. Other EP groups hold nothing that it lacks."""
    send, sent = dist.batch_isend_irecv, []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda works: sent.extend(works) or send(works))
    for sizes, senders in (({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {0, 2}), ({"dp": 4, "ep": 2}, {0, 1})):
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            model = load_pretrained(folders / "olmoe" / "per_expert", context, progress=False)
            sent.clear()
            save_pretrained(model, folders / "once" / str(len(senders)))
            found = {rank for rank, count in enumerate(gather_from_all_ranks(len(sent))) if count}
            assert found == senders, context.layout


@distributed(2)
def test_a_folder_that_cannot_be_written_is_one_error_on_all_ranks(folders):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        model = load_pretrained(folders / "olmoe" / "per_expert", context, progress=False)
        with pytest.raises(CheckpointError, match=r"cannot be saved: .*config\.json") as caught:
            save_pretrained(model, folders / "olmoe" / "per_expert" / "config.json")
        assert len(set(gather_from_all_ranks(str(caught.value)))) == 1
        ids = torch.arange(5)[None].to(rank_device())
        assert model(input_ids=ids, use_cache=False).logits.isfinite().all()  # all ranks can go on


def averaged(model, rank):
    """Average all parameters in place, as loops do before a save. No later call would report it."""
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.div_(dist.get_world_size())


def written_by_one(model, rank):
    with torch.no_grad():
        next(iter(moe_layers(model))).router.weight.add_(rank)


@distributed(2, deadline_s=60)
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (averaged, "the experts of rank 1 have the values of rank 0's experts"),
        (written_by_one, "all ranks must hold the same router and shared experts, and router.weight on rank 1 differs"),
    ],
)
def test_wrong_weights_are_saved_with_a_warning_on_all_ranks(spoil, sentence, folders, tmp_path, world_size):
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        model = load_pretrained(folders / "qwen3_moe" / "per_expert", context, progress=False)
        for wrong in (False, True):
            if wrong:
                spoil(model, dist.get_rank())
            for call, give in (
                ("save_pretrained", lambda: save_pretrained(model, tmp_path / "saved")),
                ("export_weights", lambda: list(export_weights(model))),
            ):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    give()
                found = [str(w.message) for w in caught if "continues" in str(w.message)]
                assert len(found) == (len(moe_layers(model)) if wrong and spoil is averaged else int(wrong)), found
                assert all(sentence in text and text.startswith(f"{call} continues") for text in found)


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("ep", [1, 2])
def test_a_model_that_fsdp_has_cut_is_refused(ep, tmp_path, world_size):
    """A model sharded by FSDP2 is refused on all ranks.

    With ep < dp, ranks that do not write hold shards of experts.
    """
    quiet()
    with EPContext.from_groups(ParallelConfig(dp=2, ep=ep), device=rank_device(), deadline_s=20) as context:
        model = fully_shard(expert_parallel(tiny_model("qwen3_moe").to(rank_device()), context), context)
        text = same_error(ConfigError, lambda: save_pretrained(model, tmp_path / "saved"))
        assert "is sharded over ranks, and save_pretrained writes whole tensors" in text
