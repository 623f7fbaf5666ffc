"""Test the check of a model family: which fields it changes, what it compares, and that it restores the model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe import EPContext
from ep_moe.testing import model_family
from ep_moe.testing.model_family import _changes, _FamilyCheck


class Config(SimpleNamespace):
    def get_text_config(self):
        return self


@pytest.mark.parametrize(("logits", "compared"), [(1.0, False), (torch.inf, False), (3.0, True)])
def test_changes_that_change_nothing_or_leave_no_number_are_not_compared(logits, compared):
    check, seen = object.__new__(_FamilyCheck), []
    check.config, check.tolerance = Config(top_k=1), 1e-3
    check.model, check.expected = nn.Linear(2, 2), torch.ones(3)
    check._built = lambda config: nn.Linear(2, 2)
    check._logits = lambda model: torch.full((3,), logits)
    check._replaced = lambda model: model
    check._compare = lambda what, *_: seen.append(what)
    check._check_changed("top_k", 2)
    assert seen == (["top_k=2"] if compared else [])


def test_each_flag_and_number_is_changed_and_stays_one_that_may_be():
    """Each flag and number is changed to another valid value. No count becomes 0, because that is a different model."""
    fields = {"rate": 0.5, "flag": True, "off": False, "one": 1, "three": 3, "name": "x", "none": None, "list": [1]}
    assert list(_changes(SimpleNamespace(to_dict=lambda: fields))) == [
        ("flag", False), ("off", True), ("one", 2), ("rate", pytest.approx(0.85)), ("three", 4), ("three", 2),
    ]  # fmt: skip


def test_a_factor_of_nothing_becomes_one():
    ((_, value),) = _changes(SimpleNamespace(to_dict=lambda: {"factor": 0.0}))
    assert value > 0


@pytest.fixture
def check():
    """Return the check of a model whose logits are its tensors."""
    made = object.__new__(_FamilyCheck)
    made.tolerance, made.found = 1e-3, {}
    made.model = nn.Module()
    for name, tensor in (("seen", [1.0, 2.0]), ("alike", [3.0, 3.0]), ("unseen", [5.0, 6.0]), ("kept", [7.0, 8.0])):
        made.model.register_buffer(name, torch.tensor(tensor))
    made.model.register_buffer("ids", torch.arange(3))
    made._logits = lambda model: torch.cat([model.seen, model.alike])
    made.expected = made._logits(made.model).clone()
    return made


def test_a_tensor_that_changes_no_logits_is_named_and_all_are_put_back(check):
    """A tensor that does not affect the logits is named, and all tensors are restored.

    Tensors that a replaced model keeps are not checked. A tensor of equal numbers is negated.
    """
    before = {name: tensor.clone() for name, tensor in check.model.state_dict().items()}
    replaced = nn.Module()
    replaced.register_buffer("kept", torch.ones(2))
    with pytest.raises(AssertionError, match=r"^other numbers in unseen do not change the logits of Module"):
        check._check_seen(replaced)
    for name, tensor in check.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_change_that_is_hardly_seen_is_not_seen(check):
    """A change must affect the logits by far more than the tolerance.

    Otherwise an entry that forgets the tensor would pass.
    """
    check.model.seen.copy_(torch.tensor([1.0, 1.1]))
    check.expected = check._logits(check.model).clone()
    with pytest.raises(AssertionError, match="other numbers in seen, unseen, kept do not"):
        check._check_seen(nn.Module())


@pytest.mark.parametrize(("apart", "right"), [(0.0005, True), (0.002, False)])
def test_logits_may_differ_by_a_part_of_the_largest(apart, right, check):
    """Logits may differ by a fraction of the largest one, in either direction."""
    for sign in (1, -1):
        check._logits = lambda model, by=sign * apart: torch.tensor([1.0, 4.0 + 4 * by])
        if right:
            check._compare("memory", nn.Identity(), torch.tensor([1.0, 4.0]))
            assert check.found == {"memory": pytest.approx(apart, rel=0.01)}
        else:
            with pytest.raises(AssertionError, match=r"memory: logits of Identity .* by 2\.0e-03 of the largest"):
                check._compare("memory", nn.Identity(), torch.tensor([1.0, 4.0]))
            assert not check.found


@pytest.mark.parametrize("given", [False, True])
def test_a_check_without_a_context_runs_on_this_cpu(given, monkeypatch):
    monkeypatch.setattr(_FamilyCheck, "_built", lambda self, config: nn.Identity())
    monkeypatch.setattr(_FamilyCheck, "_logits", lambda self, model: None)
    config = Config(vocab_size=4)
    with EPContext.local(torch.device("cpu")) as context:
        made = _FamilyCheck(config, context if given else None, 1e-5, None, None).context
        assert (made is context) == given
        assert made.device.type == "cpu"


def test_numbers_that_a_caller_draws_next_do_not_depend_on_the_check(monkeypatch):
    def drawing(*_):
        torch.manual_seed(3)
        return SimpleNamespace(check=lambda: {"memory": float(torch.rand(1))})

    monkeypatch.setattr(model_family, "_FamilyCheck", drawing)
    state = torch.random.get_rng_state()
    assert "memory" in model_family.check_family(None)
    assert torch.equal(torch.random.get_rng_state(), state)
