"""Use torch's data-parallel wrappers, DDP and FSDP2, with models whose ranks hold different experts."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.placement.placement import Placement
from ep_moe.router import Router
from ep_moe.runtime.devices import is_other_gpu_current
from ep_moe.training.parameters import check_context, compare_ranks, expert_parameters, expert_weights_of
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.optimizers import guard_optimizers, mark_replaced_parameters

Model = TypeVar("Model", bound=nn.Module)


def exclude_experts(model: Model) -> Model:
    """Exclude expert parameters from `DistributedDataParallel`.

    The wrapper then broadcasts and averages all other parameters. The layer's backward sums experts' gradients over
    ranks, and divides them by the number of ranks with different tokens, as the wrapper does. No call is needed after
    backward. A communication hook (`register_comm_hook`) must average too. A hook that is not torch's causes a warning,
    unless it has an attribute `averages_gradients = True`. The wrapper's `join()` is refused.

    Args:
        model: The model. Pass it to `DistributedDataParallel(model)` or `accelerator.prepare(model)` afterwards.

    Returns:
        The same model.
    """
    own = {id(parameter) for parameter in expert_parameters(model)}
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own}
    names |= {f"_orig_mod.{name}" for name in names}  # names in the model that torch.compile returns
    before = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    buffers = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, Placement)  # its buffers count the load of one rank
        for name, _ in module.named_buffers()
    }
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(before | names | buffers))
    return model


def fully_shard(
    model: Model, context: EPContext, *, mesh: DeviceMesh | None = None, shard_experts: bool = True, **options: Any
) -> Model:
    """Apply FSDP2 (`torch.distributed.fsdp.fully_shard`) to a model with `MoELayer`s.

    Expert parameters are sharded over the ranks that hold the same experts (`RankLayout.groups["expert_data"]`). If
    there is only one such rank, it keeps its experts whole. Gradients are means over ranks after backward, including
    those of experts.

    Args:
        model: The root module.
        context: The context of its layers.
        mesh: The mesh of all other parameters: 1-D to shard, 2-D to replicate and shard (HSDP). Its ranks must be all
            ranks with different tokens, or all of the stage. Default: all ranks.
        shard_experts: Whether to shard experts.
        options: Options of torch's function, such as `mp_policy`, `reshard_after_forward`, `offload_policy`. FSDP2
            neither shards `ignored_params` nor averages their gradients: call `sync_gradients` after backward.

    Returns:
        The same model, now an `FSDPModule`.

    Raises:
        ConfigError: torch.distributed is not initialized, the layers have a context of another layout, the mesh has
            other ranks, `mp_policy` casts parameters, routers are float32 and the model is not, or experts to be
            sharded have LoRA factors or main gradients. The current device, which FSDP2 uses, is not the context's.
        InputError: Ranks hold different values of a parameter that must be equal. All ranks raise.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    check_context("fully_shard", model, context)
    inspect.signature(shard).bind(model, **options)  # refuse unknown options before any layer is sharded
    layout, ignored = context.layout, set(options.pop("ignored_params", None) or ())
    param_dtype = getattr(options.get("mp_policy"), "param_dtype", None)
    if param_dtype is not None and any(weights.dtype != param_dtype for weights in expert_weights_of(model)):
        raise ConfigError(
            f"fully_shard: mp_policy.param_dtype={param_dtype} would cast a layer's router and input but not its "
            "experts; leave param_dtype out, and compute in 16 bits under torch.autocast"
        )
    if is_other_gpu_current(context._gpu):
        raise ConfigError(
            f"fully_shard: FSDP2 uses the current device, cuda:{torch.cuda.current_device()}, and the model is on "
            f"{context.device}; call torch.cuda.set_device({str(context.device)!r}) first"
        )
    # under torchrun, init_device_mesh initializes torch.distributed from the environment
    if mesh is None and not dist.is_initialized() and not TorchrunEnv.present():
        raise ConfigError(
            "fully_shard: FSDP2 needs the ranks of torch.distributed, got a context of one process without it; call "
            "EPContext.from_torchrun() under torchrun, or leave fully_shard out"
        )
    if mesh is None:
        mesh = init_device_mesh(context.device.type, (layout.world,), mesh_dim_names=("dp",))
    if mesh.size() not in (layout.token_ranks, layout.stage):
        raise ConfigError(
            f"fully_shard: mesh must have the {layout.token_ranks} ranks with different tokens, or all "
            f"{layout.stage} of the stage, got {mesh.size()}"
        )
    if _routers_apart(model):
        raise ConfigError(
            "fully_shard: routers with RoutingConfig.float32_logits=True are float32 and the model is not, and FSDP2 "
            "shards only parameters of one dtype together; call model.float(), and compute in 16 bits under "
            "torch.autocast, or set float32_logits=False"
        )
    if shard_experts and any(w.main_grads is not None and _to_be_sharded(w) for w in expert_weights_of(model)):
        raise ConfigError(
            "fully_shard: FSDP2 would shard experts whose gradients use_main_grads keeps in buffers; pass "
            "shard_experts=False, or leave out use_main_grads"
        )
    if shard_experts and any(w.lora is not None and _to_be_sharded(w) for w in expert_weights_of(model)):
        raise ConfigError("fully_shard: experts with LoRA factors are not sharded; pass shard_experts=False")
    compare_ranks(model, context, "fully_shard")  # each rank cuts its shard from its own values
    before = {p: weights for weights in expert_weights_of(model) for p in weights.parameters()}
    for weights in expert_weights_of(model):
        gradients = weights.gradient_sum
        gradients.divide(layout.token_ranks)
        if not shard_experts or weights.sharded or not _to_be_sharded(weights):
            continue
        if not ignored.isdisjoint(weights.parameters()):
            continue
        weights.sharded = True  # also on ranks without experts: comparisons over ranks depend on it
        if not weights.slots_of_expert:
            continue
        group, kind = gradients.replicas.group, context.device.type
        ranks = torch.tensor(gradients.replicas.ranks, dtype=torch.int64, device="cpu")
        own = DeviceMesh.from_group(group, kind, mesh=ranks, mesh_dim_names=("expert_data",))  # type: ignore[arg-type]
        weights.unstack()
        gradients.sharded = True
        shard(weights, mesh=own, **options)
        for parameter in weights.parameters():  # FSDP2 has made new ones
            guard_optimizers(parameter, weights)
        gradients.shard_divisor = _divisor_of(weights, gradients.replicas.size)
    kept = {p for weights in expert_weights_of(model) for p in weights.parameters()}
    for parameter, weights in before.items():
        if parameter not in kept:
            mark_replaced_parameters([parameter], weights)
    shard(model, mesh=mesh, ignored_params=kept | ignored, **options)
    divisor = _divisor_of(model, mesh.size(), mesh.size() // layout.token_ranks)
    for weights in expert_weights_of(model):
        if weights.gradient_sum.wrapper_divisor is None:  # else an inner module with its router was sharded earlier
            weights.gradient_sum.wrapper_divisor = divisor
    return model


def _divisor_of(module: nn.Module, ranks: int, alike: int = 1) -> Callable[[], float]:
    """Return a function that returns FSDP2's current divisor of gradients.

    `set_gradient_divide_factor` may change the divisor at any time.

    module: an FSDPModule, referenced weakly
    ranks: the number of ranks that it reduces over, which is the default divisor
    alike: the number of ranks with the same tokens; the experts' sum contains each token once
    """
    held = weakref.ref(module)

    def divisor() -> float:
        state = getattr(held(), "_get_fsdp_state", lambda: None)()
        # torch 2.11 has a single group, in another attribute
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        factor = getattr(groups[0], "gradient_divide_factor", None)
        return (ranks if factor is None else factor) / alike

    return divisor


def _to_be_sharded(weights: ExpertWeights) -> bool:
    """Return whether experts can be sharded: several EP groups hold them, without etp and redundant experts."""
    alike = weights.gradient_sum.replicas.size > 1 and not weights.expert_map.num_redundant
    return alike and weights.has_expert_parameters and weights.etp.size == 1


def _routers_apart(model: nn.Module) -> list[Router]:
    """Return the routers with float32 logits whose dtype the rest of the model does not have."""
    routers = [m for m in model.modules() if isinstance(m, Router) and m.config.float32_logits]
    of_experts = {id(p) for weights in expert_weights_of(model) for p in weights.parameters()}
    apart = {id(p) for router in routers for p in router.parameters()}
    rest = {p.dtype for p in model.parameters() if id(p) not in of_experts | apart}
    return [router for router in routers if rest and router.weight.dtype not in rest]
