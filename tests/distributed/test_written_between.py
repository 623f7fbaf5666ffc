"""Parameters written in place between forward and backward are refused, as autograd does."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_moe import EPContext, ExpertMap, InputError, MoEConfig, MoELayer, ParallelConfig
from ep_moe.experts.base import ExpertsOptions
from ep_moe.testing import distributed, rank_device
from ep_moe.training import expert_parameters, fully_shard, parameter_groups, use_main_grads
from ep_moe.weights.lora import LowRank, add_lora

CONFIG = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)


@distributed(2)
@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("etp", [1, 2])
def test_experts_written_between_forward_and_backward_are_refused(etp, main_grads, world_size):
    """Experts written between forward and backward are refused, also with etp.

    Pieces of etp ranks are DTensors, whose writes do not increase the version counter of their memory.
    """
    with EPContext.from_groups(ParallelConfig(dp=2, ep=2 // etp, etp=etp), device=rank_device()) as context:
        layer = MoELayer(CONFIG, context)
        if main_grads:
            use_main_grads(layer)
        x = torch.randn(6, 16, device=context.device, requires_grad=True)
        for written in (False, True):
            out = layer(x).sum()
            if written:
                with torch.no_grad():
                    for parameter in expert_parameters(layer):
                        parameter.mul_(1.5)
                with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                    out.backward()
            else:
                out.backward()


REFUSED = r"an optimizer has updated .* between the forward and the backward of a call.*call optimizer\.step\(\) after"
LAYOUTS = {
    "ep": {},
    "etp": {"parallel": ParallelConfig(dp=2, ep=1, etp=2)},
    "a rank without experts": {"expert_map": ExpertMap.uneven([4, 0])},
    "FSDP2": {"parallel": ParallelConfig(dp=2, ep=1)},
}
KINDS = ("plain", "recompute", "exact", "main_grads", "lora", "checkpoint")
STEPS = {
    "loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False), "foreach": torch.optim.AdamW,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
}  # fmt: skip


def layer_of(context, kind, expert_map=None):
    exact, recompute = kind == "exact", kind == "recompute"
    options = ExpertsOptions(exact=exact, recompute=recompute)
    layer = MoELayer(CONFIG, context, expert_map=expert_map, experts="reference", options=options)
    if kind == "main_grads":
        use_main_grads(layer)
    if kind == "lora":
        add_lora(layer.expert_weights, {"w13": LowRank(2, 1.0)}, seed=0)
    return layer


def stepped_between(layer, kind, make, x):
    """Step between forward and backward, which is refused, and then as it should be."""
    call = (lambda x: checkpoint(layer, x, use_reentrant=False)) if kind == "checkpoint" else layer
    optimizer = make(parameter_groups(layer))
    call(x).square().sum().backward()
    out = call(x)
    optimizer.step()
    with pytest.raises(InputError, match=REFUSED):
        out.square().sum().backward()
    for _ in range(2):
        optimizer.zero_grad()
        call(x).square().sum().backward()
        optimizer.step()


@distributed(2, set_device=True, deadline_s=60)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_step_between_forward_and_backward_is_refused(layout, world_size):
    """A step between forward and backward is refused on all ranks, also where autograd does not see the write."""
    options = dict(LAYOUTS[layout])
    parallel = options.pop("parallel", None)
    with EPContext.from_groups(parallel, device=rank_device(), deadline_s=20) as context:
        x = torch.randn(6, 16, device=context.device)
        for kind in KINDS if layout == "ep" else ("plain", "recompute", "checkpoint"):
            for make in STEPS.values():
                layer = layer_of(context, kind, **options)
                if layout == "FSDP2":
                    fully_shard(layer, context)
                stepped_between(layer, kind, make, x)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_step_between_forward_and_backward_of_one_process(kind, step):
    with EPContext.local(rank_device()) as context:
        stepped_between(layer_of(context, kind), kind, STEPS[step], torch.randn(6, 16, device=context.device))


def test_a_step_that_updates_no_parameter_of_the_layer():
    """A step without gradients, and one that updates parameters after their last use in backward, are no writes."""
    with EPContext.local(rank_device()) as context:
        x, found = torch.randn(6, 16, device=context.device), []
        for in_backward in (False, True):
            torch.manual_seed(0)
            layer = layer_of(context, "plain")
            out = layer(x)
            torch.optim.AdamW(layer.parameters()).step()
            out.sum().backward()
            layer.zero_grad()
            each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in layer.parameters()}
            for parameter in each if in_backward else ():
                parameter.register_post_accumulate_grad_hook(lambda parameter, each=each: each[parameter].step())
            for _ in range(2):
                layer.zero_grad()
                (layer(x) + layer(2 * x)).sum().backward()
                for optimizer in () if in_backward else each.values():
                    optimizer.step()
            found.append([parameter.detach().clone() for parameter in layer.parameters()])
        assert all(torch.equal(*both) for both in zip(*found, strict=True)), "an optimizer in backward trains the same"
