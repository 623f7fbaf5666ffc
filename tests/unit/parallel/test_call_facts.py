"""Test the messages about ranks whose facts of a call differ."""

import pytest

from ep_moe.parallel.call_facts import MODEL_FACTS_PREFIX, facts_difference

MODEL = f"{MODEL_FACTS_PREFIX}moe0, dense parameters that learn=4"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (f"{MODEL}, max_norm=1.0", f"{MODEL}, max_norm=2.0", "got max_norm=1.0 on rank 0, and max_norm=2.0 on rank 3"),
        (f"{MODEL}, norm_type=2.0", f"{MODEL}, norm_type=1.0", "norm_type=1.0 on rank 3; pass the same on all ranks"),
        (MODEL, MODEL.replace("4", "5"), "got a model with dense parameters that learn=4 on rank 0, and with dense"),
        (
            "a=1, expert_map=x",
            "a=1, expert_map=y",
            "different expert maps, at least rank 0 and rank 3; call load_state",
        ),
        ("a=1, loaded=7", "a=1", r"state dicts since the last call: rank 0 loaded=7, rank 3 none \(a checksum"),
        ("a=1", "a=1, loaded=7", r"state dicts since the last call: rank 0 none, rank 3 loaded=7 \(a checksum"),
        ("exchange=moe0", "exchange=moe1", "ranks run backward of different calls, at least rank 0 and rank 3; run"),
        ("a=1, dtype=half", "a=1, dtype=float", "has dtype=half on rank 0, and dtype=float on rank 3; build the layer"),
    ],
    ids=str,
)
def test_each_difference_has_its_message(first, second, message):
    with pytest.raises(ValueError, match=f"^moe0.*{message}"):
        raise ValueError(facts_difference("moe0", [first, second], (0, 3)))
