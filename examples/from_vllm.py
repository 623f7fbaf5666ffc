"""Turn a FusedMoE with vLLM's names into a MoELayer, and compare both.

    torchrun --standalone --nproc-per-node 2 examples/from_vllm.py

vLLM is not needed: `fused_moe` computes in plain torch what vLLM's FusedMoE computes from the same parameters. The
parameters have its names: `gate.weight` [E, H], `experts.w13_weight` [E, 2I, H] with gate above up, `experts.w2_weight`
[E, H, I], and `gate.e_score_correction_bias` [E]. docs/how-to/from_vllm.md lists more names.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ep_moe import Activation, EPContext, MoEConfig, MoELayer, RoutingConfig, RoutingMethod

# Arguments of FusedMoE as vLLM's model files pass them: Mixtral and Qwen3-MoE (SOFTMAX), DeepSeek-V3 (GROUPED).
SIZES = {"num_experts": 16, "top_k": 4, "hidden_size": 64, "intermediate_size": 32}
SOFTMAX = SIZES | {"renormalize": True}
GROUPED = SIZES | {
    "renormalize": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
    "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2,
}  # fmt: skip
ACTIVATIONS = {"silu": Activation.SWIGLU, "gelu": Activation.GEGLU, "relu2_no_mul": Activation.RELU2}


def config_of(arguments: dict[str, Any]) -> MoEConfig:
    """Return the MoEConfig that corresponds to FusedMoE's arguments."""
    sigmoid = arguments.get("scoring_func", "softmax") == "sigmoid"
    grouped = arguments.get("use_grouped_topk", False)
    if grouped and not sigmoid:
        raise ValueError("groups with softmax scores (DeepSeek-V2) are not mapped here; pass a router of your own")
    routing = RoutingConfig(
        method=RoutingMethod.SIGMOID_TOPK if sigmoid else RoutingMethod.SOFTMAX_TOPK,
        renormalize=arguments.get("renormalize", True),
        scaling_factor=arguments.get("routed_scaling_factor", 1.0),
        num_groups=arguments["num_expert_group"] if grouped else 1,
        top_groups=arguments["topk_group"] if grouped else 1,
        correction_bias=sigmoid,
    )
    activation = ACTIVATIONS[arguments.get("activation", "silu")]
    return MoEConfig(**{name: arguments[name] for name in SIZES}, activation=activation, routing=routing)


@torch.no_grad()
def load(layer: MoELayer, parameters: dict[str, Tensor]) -> None:
    """Load FusedMoE's parameters into the layer. All ranks pass the same tensors, and each keeps its own experts."""
    for expert in range(layer.config.num_experts):
        layer.update_expert(
            expert, w13=parameters["experts.w13_weight"][expert], w2=parameters["experts.w2_weight"][expert]
        )
    layer.router.weight.copy_(parameters["gate.weight"])
    if layer.config.routing.correction_bias:
        layer.router.e_score_correction_bias.copy_(parameters["gate.e_score_correction_bias"])


def fused_moe(x: Tensor, parameters: dict[str, Tensor], arguments: dict[str, Any]) -> Tensor:
    """Compute what FusedMoE computes, one token after another."""
    logits = linear(x, parameters["gate.weight"])
    sigmoid = arguments.get("scoring_func", "softmax") == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    choice = scores + parameters["gate.e_score_correction_bias"] if sigmoid else scores
    if arguments.get("use_grouped_topk", False):
        groups = choice.view(len(x), arguments["num_expert_group"], -1)
        best = groups.topk(2, dim=2).values.sum(2).topk(arguments["topk_group"], dim=1).indices
        closed = torch.ones(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, False)
        choice = groups.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)
    ids = choice.topk(arguments["top_k"], dim=1).indices
    weights = scores.gather(1, ids)
    if arguments["renormalize"]:
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * arguments.get("routed_scaling_factor", 1.0)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = linear(x[token], parameters["experts.w13_weight"][expert]).chunk(2)
            out[token] += weight * linear(silu(gate) * up, parameters["experts.w2_weight"][expert])
    return out


def main() -> int:
    with EPContext.from_torchrun() as context:
        for name, arguments in (("softmax", SOFTMAX), ("grouped sigmoid", GROUPED)):
            experts, hidden, inner = (arguments[key] for key in ("num_experts", "hidden_size", "intermediate_size"))
            torch.manual_seed(0)  # a checkpoint holds the same numbers for all ranks
            shapes = {"gate.weight": (experts, hidden), "experts.w13_weight": (experts, 2 * inner, hidden)}
            shapes |= {"experts.w2_weight": (experts, hidden, inner), "gate.e_score_correction_bias": (experts,)}
            parameters = {key: (torch.randn(shape) * 0.2).to(context.device) for key, shape in shapes.items()}
            layer = MoELayer(config_of(arguments), context, dtype=torch.float32)
            load(layer, parameters)
            torch.manual_seed(1 + context.layout.rank)
            x = torch.randn(10 + context.layout.rank, hidden).to(context.device)  # this rank's tokens
            with torch.no_grad():
                torch.testing.assert_close(layer(x), fused_moe(x, parameters, arguments), rtol=1e-4, atol=1e-4)
            if context.layout.rank == 0:
                print(f"{name}: {layer.choice.all2all} with {layer.choice.experts} gives what FusedMoE gives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
