"""Which of several recorded calls serves another one."""

from types import SimpleNamespace

from ep_moe.execution.graphs import Sizes


def recorded(most, least=0):
    return SimpleNamespace(most=most, least=least)


def test_the_smallest_graph_that_has_room_serves():
    """In whatever order they were recorded; the newer one of two of one size."""
    sizes, older, newer = Sizes(), {}, {}
    for most in (16, 4, 64):
        older[most] = recorded(most)
        sizes.add(older[most])
    for most in (4, 16):
        newer[most] = recorded(most)
        sizes.add(newer[most])
    found = [sizes.serving(tokens) for tokens in (0, 4, 5, 16, 17, 64, 65)]
    assert found == [newer[4], newer[4], newer[16], newer[16], older[64], older[64], None]
    assert (sizes.sizes, sizes.calls) == ([4, 16, 64], [newer[4], newer[16], older[64]])


def test_a_graph_that_takes_no_fewer_tokens_serves_no_smaller_call():
    sizes = Sizes()
    sizes.add(recorded(8, least=3))
    assert [sizes.serving(tokens) is not None for tokens in (0, 2, 3, 8, 9)] == [False, False, True, True, False]
