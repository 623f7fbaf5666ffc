"""torch.distributed.checkpoint of a model and AdamW: saved under one layout, training goes on under another."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ep_moe import EPContext, ExpertMap, MoELayer, ParallelConfig, PeerTimeout, training
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import run_local_ranks
from ep_moe.testing import distributed
from ep_moe.weights.optimizers import KEY
from tests.fixtures.training_model import CONFIG, CPU, EPS, EXPERTS, furthest, made, one_process, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs of CPU ranks, over gloo")

# the optimizer's state affects the third loss first
STEPS, BOUND = 3, 1e-5
LAYOUTS = {
    "dp 2": (2, {"dp": 2}, "linear"),
    "dp 2, ep 1": (2, {"dp": 2, "ep": 1}, "linear"),
    "dp 4": (4, {"dp": 4}, "redundant"),
    "dp 2, tp 2, etp 2": (4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, "round robin"),
    "dp 4, ep 2, FSDP2": (4, {"dp": 4, "ep": 2}, "linear"),
}
# A checkpoint does not depend on the layout. Each layout is saved from once and loaded into once, with experts sharded
# over other ranks on both sides, replicated, and whole.
GOES_ON = {
    "dp 2": ("dp 4", "dp 2, ep 1"),
    "dp 2, tp 2, etp 2": ("dp 2", "dp 4, ep 2, FSDP2"),
    "dp 4, ep 2, FSDP2": ("dp 4", "dp 2, tp 2, etp 2"),
}


def part(name: str, folder: str, first: int, flat: bool) -> list[float]:
    """Train for STEPS steps from the checkpoint in `folder`; the first part (`first=0`) writes it instead. Return
    losses."""
    _, sizes, kind = LAYOUTS[name]
    with EPContext.from_groups(ParallelConfig(**sizes), device=CPU, deadline_s=30) as context:
        ep = context.layout.ep
        expert_map = ExpertMap.round_robin(EXPERTS, ep) if kind == "round robin" else None
        if kind == "redundant":
            expert_map = ExpertMap.redundant(EXPERTS, ep, 2)
        model = made(context, expert_map, seed=first)  # other initial weights where a checkpoint is loaded
        wrapped = "FSDP2" in name
        if wrapped:
            training.fully_shard(model, context)
        groups = [training.dense_parameters(model), training.expert_parameters(model)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3 if first else 1e-2, eps=EPS)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)

        def state():
            return {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
            }

        if first:
            found = state()
            dcp.load(found, checkpoint_id=folder)
            set_model_state_dict(model, found["model"])
            set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)
        after = (lambda: None) if wrapped else (lambda: training.sync_gradients(model, context))
        losses = run(model, context, optimizer, after, range(first, first + STEPS))
        if not first:
            dcp.save(state(), checkpoint_id=f"{folder}-{name}")
        return losses


@pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own, in two numbers")
@pytest.mark.parametrize("source", GOES_ON)
def test_a_run_goes_on_under_another_layout(source, tmp_path):
    folder, wanted = str(tmp_path / "checkpoint"), one_process("adamw", 2 * STEPS)
    here = f"{__name__}:part"
    arguments = {"folder": folder, "flat": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = run_local_ranks(here, LAYOUTS[source][0], arguments | {"name": source, "first": 0}, deadline_s=120)
        assert furthest(saved[0], wanted[:STEPS]) <= BOUND
        arguments["folder"] = f"{folder}-{source}"
        for target in GOES_ON[source]:
            again = run_local_ranks(
                here, LAYOUTS[target][0], arguments | {"name": target, "first": STEPS}, deadline_s=120
            )
            assert furthest(again[0], wanted[STEPS:]) <= BOUND, f"{source} to {target}"


@distributed(2)
def test_an_optimizers_own_state_is_refused(world_size):
    """`dcp.save` of `optimizer.state_dict()` is refused.

    This dict keys state by parameter index, so the state of one rank would stand for all ranks.
    """
    import tempfile

    with EPContext.from_groups(device=CPU, deadline_s=10) as context, tempfile.TemporaryDirectory() as folder:
        model = made(context)
        optimizer = torch.optim.AdamW(model.parameters())
        run(model, context, optimizer, lambda: None, range(1))
        with pytest.raises(BaseException, match="keep optimizer of one rank alone; save get_optimizer_state_dict"):
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
        path = f"{folder}/rank{dist.get_rank()}.pt"
        torch.save(optimizer.state_dict(), path)  # a file per rank is correct
        loaded = torch.load(path)
        assert loaded.pop(KEY) == set()
        optimizer.load_state_dict(loaded)
        dist.barrier()


@distributed(2)
def test_the_state_of_experts_that_joined_an_optimizer_later_is_refused(tmp_path, world_size):
    """`dcp.save` of `optimizer.state_dict()` is also refused if experts joined by `add_param_group`.

    Gradual unfreezing does this: the first steps train dense parameters only.
    """
    with EPContext.from_groups(device=CPU, deadline_s=10) as context:
        model = made(context)
        optimizer = torch.optim.AdamW(training.dense_parameters(model))
        run(model, context, optimizer, lambda: training.sync_gradients(model, context), range(1))
        assert KEY not in optimizer.state_dict(), "all ranks have the same parameters"
        optimizer.add_param_group({"params": training.expert_parameters(model)})
        run(model, context, optimizer, lambda: training.sync_gradients(model, context), range(1))
        with pytest.raises(BaseException, match="keep optimizer of one rank alone; save get_optimizer_state_dict"):
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path))
        dist.barrier()


@distributed(2)
def test_a_rank_finds_its_experts_after_they_moved(world_size):
    """A state dict saved under a map that EPLB chose loads into a fresh layer with the first map."""
    with EPContext.from_groups(device=CPU, deadline_s=10) as context:
        first = ExpertMap.redundant(EXPERTS, 2, 2)
        moved = ExpertMap.from_ranks([[7, 1, 5, 0, 6], [4, 2, 3, 0, 7]], EXPERTS)
        torch.manual_seed(1)
        old = MoELayer(CONFIG, context, expert_map=moved)
        state = old.state_dict()
        torch.manual_seed(2)
        new = MoELayer(CONFIG, context, expert_map=first)
        new.load_state_dict(state)
        assert new.placement.expert_map == new.expert_weights.expert_map == moved
        x = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank()))
        with torch.no_grad():
            assert torch.equal(old(x), new(x))
        whole = [None, None]
        dist.all_gather_object(whole, dict(state))
        other = MoELayer(CONFIG, context, expert_map=first)
        other.load_state_dict(whole[0] | whole[1])
        assert other.placement.expert_map == first, "what has all experts serves any map"
        with torch.no_grad():
            torch.testing.assert_close(other(x), old(x))


@distributed(2)
def test_a_state_dict_of_one_rank_alone_says_who_is_missing(world_size):
    with EPContext.from_groups(ParallelConfig(dp=2, ep=1, etp=2), device=CPU, deadline_s=2) as context:
        layer = MoELayer(CONFIG, context)
        if dist.get_rank() == 0:
            with pytest.raises(PeerTimeout, match=r"state_dict\(\) of a layer with etp > 1 needs rank 1 too"):
                layer.state_dict()
        dist.barrier()


@distributed(2, deadline_s=60)
def test_state_is_read_on_the_groups_of_a_later_context(world_size):
    """State dicts can be read in a second context.

    torch caches DTensor operations by ranks, and with them the groups of the first context.
    """
    found = []
    for _ in range(2):
        with EPContext.from_groups(ParallelConfig(dp=2, ep=1), device=CPU, deadline_s=20) as context:
            model = training.fully_shard(made(context), context)
            state = get_model_state_dict(model)
            set_model_state_dict(model, state)
            name = next(name for name in state if name.endswith("expert_weights.0.w2"))
            training.clip_grad_norm_(model, context, 1.0)
            found.append((state[name].full_tensor(), state[name].sum().full_tensor()))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
