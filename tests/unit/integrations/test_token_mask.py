"""The mask of a model's call: whose it is, and that nothing of it outlives the call."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ep_moe.integrations.model_hooks import TokenMasks, tokens_of

IDS = torch.zeros(2, 3, dtype=torch.int64)
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


class Inner(nn.Module):
    """What blocks would find."""

    def __init__(self, masks):
        super().__init__()
        self.masks, self.seen = masks, []

    def forward(self, input_ids, attention_mask=None, fails=False):
        self.seen.append(self.masks.of_rows(input_ids.numel()))
        if fails:
            raise KeyError


class Model(nn.Module):
    def __init__(self, masks):
        super().__init__()
        self.model = Inner(masks)

    def forward(self, labels=None, **given):
        self.model(**given)


@pytest.fixture
def masks():
    return TokenMasks()


@pytest.fixture
def model(masks):
    model = Model(masks)
    masks.attach(model, model.model, None)
    with torch.no_grad():
        yield model


def test_a_call_has_its_own_mask_alone(model, masks):
    model(input_ids=IDS, attention_mask=MASK)
    (found,) = model.model.seen
    assert found.tokens.tolist() == MASK.bool().flatten().tolist()
    assert masks.of_rows(6) is None
    with pytest.raises(KeyError):
        model(input_ids=IDS, attention_mask=MASK, fails=True)
    assert masks.of_rows(6) is None, "nor does one that failed leave it"
    for stale in (found, None):
        masks.current = stale  # as after an interrupt, for which torch calls no hooks
        model(input_ids=IDS)
        assert model.model.seen[-1] is None


def test_labels_are_of_the_call_that_has_them(model):
    """Where a loss is computed padding is too. The inner model has no labels."""
    model(input_ids=IDS, attention_mask=MASK, labels=IDS)
    model.model(input_ids=IDS, attention_mask=MASK)
    model(input_ids=IDS, attention_mask=MASK)
    assert [bool(mask.sent) for mask in model.model.seen] == [True, False, False]


def test_idle_steps_nest_and_end(model, masks):
    def tokens() -> int:
        model(input_ids=IDS, attention_mask=MASK)
        return int(model.model.seen[-1].tokens.sum())

    with masks.idle():
        with masks.idle():
            assert tokens() == 0
        assert tokens() == 0
        with pytest.raises(KeyError), masks.idle():
            raise KeyError
        assert tokens() == 0
    assert tokens() == 5


def test_a_full_static_cache_reads_no_place_behind_the_mask():
    """On a GPU that would end the process; the model says what is wrong with its call."""
    cache = SimpleNamespace(get_seq_length=lambda: torch.tensor(3))
    assert tokens_of(MASK, torch.Size([2, 1]), cache).shape == (2, 1)
