"""The check of a family of models: changed numbers that say nothing of it are passed over."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe.testing.model_family import _FamilyCheck


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
