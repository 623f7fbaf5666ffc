"""Test the contract of fused kernels: shapes and checks of a run, and the faults reported for each layer."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, EPContext
from ep_moe.testing import fused_contract as contract
from ep_moe.testing.fused_contract import layers_that_share


def test_faults_of_both_layers_that_share_buffers_are_reported():
    def layer(name):
        faults: list[str] = []
        return SimpleNamespace(
            faults=faults,
            device=torch.device("cpu"),
            call=lambda *_: None,
            check=lambda _, where: faults.append(f"{name}, {where}"),
        )

    first, second = layer("first"), layer("second")
    layers_that_share(first, second)
    assert first.faults == [f"{name}, turn {turn}" for name in ("first", "second") for turn in range(3)]


@pytest.fixture
def alone(monkeypatch):
    """Run in one process instead of ranks. Return the requested contexts."""
    asked = []

    def from_groups(sizes, *, device, deadline_s):
        asked.append((sizes.dp, sizes.ep, deadline_s))
        return EPContext.local(device)

    monkeypatch.setattr(contract, "EPContext", SimpleNamespace(from_groups=from_groups))
    monkeypatch.setattr(contract.dist, "get_world_size", lambda: 4)
    return asked


def test_wrong_capabilities_end_the_check(alone):
    def wrong():
        raise ConfigError("FusedCapabilities.travels must be a bool")

    kind = SimpleNamespace(name="mine", capabilities=SimpleNamespace(check=wrong))
    with pytest.raises(ConfigError, match=r"^FusedCapabilities\.travels must be a bool$"):
        contract.check_fused(kind)


def kind_of(**can):
    return SimpleNamespace(name="mine", capabilities=SimpleNamespace(check=lambda: None, **can))


@pytest.mark.parametrize("travels", [True, False])
def test_every_scheme_is_checked_with_each_k_and_with_each_bound(travels, alone, monkeypatch):
    """Each scheme is checked with each top-k under the first token limit, and with the last top-k under the others.

    The check that ends a context comes last, and only for kernels that exchange rows.
    """
    asked, ends = [], []

    def maker(kind, scheme, top_k, bound, context):
        asked.append((scheme, top_k, bound))
        return None if top_k == 2 else "serves"

    monkeypatch.setattr(contract, "maker", maker)
    monkeypatch.setattr(contract, "_check_shape", lambda make, ranks: None)
    monkeypatch.setattr(contract, "one_token_too_many", lambda kind, *of: ends.append(of))
    kind = kind_of(travels=travels, schemes={"none", "fp8_block"})
    count = contract.check_fused(kind, top_ks=(1, 2, 3), max_tokens=(24, 8, 200), deadline_s=9.0)
    shapes = [(1, 24), (2, 24), (3, 24), (3, 8), (3, 200)]
    assert asked == [(scheme, *shape) for scheme in ("fp8_block", "none") for shape in shapes]
    assert count == 8, "those that the kernel serves"
    assert alone == [(4, None if travels else 1, 9.0)]
    assert ends == ([(3, 24, torch.device("cpu"))] if travels else [])


def test_a_kernel_that_serves_no_shape_is_not_said_to_be_sound(alone, monkeypatch):
    monkeypatch.setattr(contract, "maker", lambda *_: None)
    with pytest.raises(AssertionError, match="mine: its capabilities name nothing that it serves"):
        contract.check_fused(kind_of(travels=False, schemes={"none"}))


@pytest.mark.parametrize("any_map", [True, False])
@pytest.mark.parametrize("routes", [True, False])
def test_checks_of_a_shape_are_run_and_buffers_are_given_back(routes, any_map, monkeypatch):
    ran, pools = [], []

    def make(shared, expert_map=None, seed=0):
        pools.append(shared) if shared not in pools else None
        shared.kept.setdefault("buffer", SimpleNamespace(destroy=lambda: None))
        can = SimpleNamespace(routes=routes, any_map=any_map)
        return SimpleNamespace(kernel=SimpleNamespace(capabilities=can), map=expert_map, seed=seed, shared=shared)

    def run(check, case):
        held = len(pools[0].kept)
        known = check.keywords if isinstance(check, partial) else {}
        ran.append((getattr(check, "func", check), known.get("name"), getattr(known.get("other"), "seed", None), held))

    monkeypatch.setattr(contract, "_run", run)
    contract._check_shape(make, 2)
    checks = contract.ANY_KERNEL if routes else contract.CHECKS
    expected = [(check, None, None, 1) for check in checks]
    if any_map:
        expected += [(contract.under_any_map, name, None, 1) for name in ("replicas", "mixed", "holes")]
    expected += [(contract.layers_that_share, None, 1, 1), (contract.uneven_and_empty_ranks, None, None, 0)]
    assert ran == expected
    assert len(pools) == 2
    assert not any(shared.kept for shared in pools)
