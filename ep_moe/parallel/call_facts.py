"""The facts of a call that its ranks compare ("name=value, name=value"), and what a difference means to a user."""

from __future__ import annotations

from collections.abc import Sequence

MODEL_FACTS_PREFIX = "layers="  # begins the facts of functions that take a model, such as clip_grad_norm_
LEARNING_FACTS_PREFIX = "requires_grad="  # begins the facts of ranks that hold the same experts, in backward
_NUMBERS = ("max_norm=", "norm_type=")  # arguments of clip_grad_norm_


def facts_difference(name: str, facts: Sequence[str], ranks: tuple[int, int]) -> str:
    """Return the error message about two ranks whose facts of a call differ.

    name: the layer or function that is called
    facts: those of each of the two ranks
    """
    each = [own.split(", ") for own in facts]
    first, second = (", ".join(fact for fact in own if fact not in other) for own, other in (each, each[::-1]))
    one, two = f"rank {ranks[0]}", f"rank {ranks[1]}"
    if facts[0].startswith(MODEL_FACTS_PREFIX):
        if first.startswith(_NUMBERS):
            return f"{name} got {first} on {one}, and {second} on {two}; pass the same on all ranks"
        return (
            f"{name} got a model with {first} on {one}, and with {second} on {two}; pass the same models in the same "
            "order on all ranks, with the same requires_grad"
        )
    if facts[0].startswith(LEARNING_FACTS_PREFIX):
        return (
            f"{name}: some expert parameters have requires_grad=True on {one} and False on {two}, or the reverse, and "
            f"both hold the same experts; set requires_grad by the parameters' names, alike on all ranks"
        )
    if first.startswith("expert_map="):
        return (
            f"{name}: the ranks use different expert maps, at least {one} and {two}; call load_state_dict, "
            "ExpertBalancer.step and Placement.update on all ranks alike"
        )
    if "loaded=" in first + second:
        return (
            f"{name}: ranks have loaded different state dicts since the last call: {one} {first or 'none'}, {two} "
            f"{second or 'none'} (a checksum of router and shared experts); call load_state_dict on all ranks, with "
            "the same router and shared experts"
        )
    if first.startswith("exchange="):
        return different_backwards(name, ranks)
    return (
        f"{name} has {first} on {one}, and {second} on {two}; build the layer alike on all ranks, and convert it (.to, "
        ".half, .bfloat16) on all of them or on none"
    )


def different_layers(ranks: tuple[int, int], names: Sequence[str]) -> str:
    """Return the message about two ranks that are in different layers, or in different directions of one.

    names: the call of each of the two ranks, such as `the backward of NAME`
    """
    return (
        f"the ranks are not in the same layer: rank {ranks[0]} is in {names[0]!r}, rank {ranks[1]} in {names[1]!r}; "
        "call the layers in the same order on all ranks, and backward equally often"
    )


def different_backwards(where: str, ranks: tuple[int, int]) -> str:
    """Return the message about two ranks in the backward of different calls. where: `the backward of NAME`"""
    return (
        f"{where}: the ranks run backward of different calls, at least rank {ranks[0]} and rank {ranks[1]}; run "
        "backward of the same losses in the same order on all ranks, and of a sum of losses on all ranks or on none"
    )
