"""Test the mask of a model's call: it belongs to that call, and nothing of it remains afterwards."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from ep_moe import EPContext
from ep_moe.integrations.model_hooks import TokenMasks, tokens_of
from ep_moe.integrations.transformers import expert_parallel
from tests.fixtures.checkpoint_files import tiny_config, tiny_model

IDS = torch.zeros(2, 3, dtype=torch.int64)
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


class Inner(nn.Module):
    """A stand-in for an inner model. It records the mask that its blocks would find."""

    def __init__(self, masks):
        super().__init__()
        self.masks, self.seen, self.meanwhile = masks, [], lambda: None

    def forward(self, input_ids, attention_mask=None, fails=False):
        self.meanwhile()
        self.seen.append(self.masks.of_rows(input_ids.numel()))
        if fails:
            raise KeyError if fails is True else fails


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
    model.model(IDS, MASK)
    assert model.model.seen.pop().tokens.tolist() == MASK.bool().flatten().tolist(), "by its place"
    with pytest.raises(KeyError):
        model(input_ids=IDS, attention_mask=MASK, fails=True)
    assert masks.of_rows(6) is None, "nor does one that failed leave it"
    with pytest.raises(KeyboardInterrupt):  # torch calls no hooks for it
        model(input_ids=IDS, attention_mask=MASK, fails=KeyboardInterrupt)
    model(input_ids=IDS)
    assert model.model.seen[-1] is None


def test_a_call_without_tokens_is_the_models_to_refuse(model, masks):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input_ids'"):
        model(attention_mask=MASK)
    assert masks.of_rows(6) is None


@pytest.mark.parametrize("other", ["open", "ended"])
@pytest.mark.parametrize("masked", [True, False])
def test_calls_of_two_threads_have_their_own_masks(model, masks, other, masked):
    """Calls of two threads have separate masks.

    The second call begins before the first one's block, and may have ended.
    """
    inside, leave = threading.Event(), threading.Event()

    def of_second():
        inside.set()
        leave.wait(10)

    def call(kwargs):
        with torch.no_grad(), masks.generating():
            model(input_ids=IDS, **kwargs)

    kwargs = [{"attention_mask": MASK.flip(1)}, {}] if masked else [{}, {"attention_mask": MASK, "labels": IDS}]
    second = threading.Thread(target=call, args=kwargs[1:])

    def of_first():
        model.model.meanwhile = of_second
        second.start()
        assert inside.wait(10)
        if other == "ended":
            leave.set()
            second.join()

    model.model.meanwhile = of_first
    call(kwargs[0])
    leave.set()
    second.join()
    first = model.model.seen[0 if other == "open" else 1]
    assert (first is not None) == masked
    assert [mask is None for mask in model.model.seen].count(True) == 1
    if masked:
        assert first.tokens.tolist() == MASK.flip(1).bool().flatten().tolist()
        assert first.sent, "the last position is padding, and generate goes on from it"


def test_padding_that_generate_does_not_go_on_from_is_not_sent(model, masks):
    with torch.no_grad(), masks.generating():
        for mask in (MASK, MASK.flip(1), MASK[:, :1]):
            model(input_ids=IDS[:, : mask.shape[1]], attention_mask=mask)
        with masks.generating():  # of an assistant model
            pass
        model(input_ids=IDS, attention_mask=MASK.flip(1))
    with pytest.raises(KeyError), masks.generating():
        raise KeyError
    model(input_ids=IDS, attention_mask=MASK.flip(1))
    assert [bool(mask.sent) for mask in model.model.seen] == [False, True, False, True, False]


@pytest.mark.parametrize(("last", "sent"), [(0, True), (1, False)])
def test_a_prompt_of_two_tokens_may_end_in_padding(last, sent, model, masks):
    with masks.generating():
        model(input_ids=IDS[:, :2], attention_mask=torch.tensor([[1, last], [1, 1]]))
    assert bool(model.model.seen[-1].sent) is sent


def test_a_compiled_block_sees_no_other_threads_mask(masks, model, monkeypatch):
    """A compiled block cannot tell threads apart.

    With several calls under way it takes no mask, and computes padding too.
    """
    model(input_ids=IDS, attention_mask=MASK)
    found = []

    def compiled():
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            found.append(masks.of_rows(6))

    def with_another():
        model.model.meanwhile = compiled
        thread = threading.Thread(target=model, kwargs={"input_ids": IDS})
        thread.start()
        thread.join()
        compiled()

    model.model.meanwhile = with_another
    model(input_ids=IDS, attention_mask=MASK)
    assert [mask is None for mask in found] == [True, False]


def test_labels_are_of_the_call_that_has_them(model):
    """Labels belong to the call that passes them. Where a loss is computed, padding is sent too.

    The inner model has no labels.
    """
    model(input_ids=IDS, attention_mask=MASK, labels=IDS)
    model.model(input_ids=IDS, attention_mask=MASK)
    model(input_ids=IDS, attention_mask=MASK)
    assert [bool(mask.sent) for mask in model.model.seen] == [True, False, False]


def test_cache_and_labels_may_be_passed_by_position():
    """Arguments by position are found like those by name. A cache tells where the call's rows are in the mask.

    A mask that is read from the wrong place takes the new tokens of a left-padded sequence for padding.
    """
    plain = tiny_model("qwen3_moe")
    model = expert_parallel(tiny_model("qwen3_moe"), EPContext.local(torch.device("cpu")))
    ids, mask = torch.arange(3, 9).view(2, 3), torch.cat([MASK, torch.ones(2, 1, dtype=torch.int64)], 1)
    outputs = []
    with torch.no_grad():
        for one in (plain, model):
            cache = one.model(ids, MASK, use_cache=True).past_key_values
            rows = one.model(ids[:, :1], mask, torch.tensor([[2], [3]]), cache).last_hidden_state
            loss = one(ids, MASK, None, None, None, ids).loss
            outputs.append(torch.cat([rows.flatten(), loss.view(1)]))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5 * float(outputs[0].abs().max()))


def test_a_forward_of_any_arguments_has_ids_and_mask_first(model, monkeypatch):
    """A wrapped forward may show no names."""
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    model.model(IDS, MASK)
    assert model.model.seen.pop().tokens.tolist() == MASK.bool().flatten().tolist()


@pytest.mark.parametrize("added", [False, True])
def test_a_row_that_attends_to_nothing_may_be_attended_to(added):
    """A row that attends to nothing in a 4-D mask is not padding if other rows attend to it.

    Strictly causal masks have such a row.
    """
    plain = tiny_model("qwen3_moe")
    model = expert_parallel(tiny_model("qwen3_moe"), EPContext.local(torch.device("cpu")))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(-1)
    mask[:, :, 3] = False
    if added:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected, found = (one(input_ids=ids, attention_mask=mask).logits for one in (plain, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["AutoModelForSequenceClassification", "AutoModel", "AutoModelForCausalLM"])
def test_rows_of_padding_that_are_given_back_are_those_of_the_model(kind):
    """Rows of padding that a model returns equal the original model's.

    A pooling head may use such a row if its id is not the padding id, and so may callers.
    """
    torch.manual_seed(0)
    plain = getattr(transformers, kind).from_config(tiny_config("qwen3_moe"), dtype=torch.float32).eval()
    model = expert_parallel(copy.deepcopy(plain), EPContext.local(torch.device("cpu")))
    ids, mask = torch.arange(1, 9).view(2, 4), torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    plain.config.pad_token_id = model.config.pad_token_id = 0
    shown = {"output_hidden_states": True} if kind == "AutoModelForCausalLM" else {}
    with torch.no_grad():
        expected, found = (one(input_ids=ids, attention_mask=mask, **shown)[0] for one in (plain, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


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
    """With a full static cache, the mask is not read beyond its end. On a GPU that would end the process.

    The model reports the error in its call.
    """
    cache = SimpleNamespace(get_seq_length=lambda: torch.tensor(3))
    assert tokens_of(MASK, torch.Size([2, 1]), cache).shape == (2, 1)


def test_a_mask_that_ends_before_the_rows_of_the_call_says_nothing_of_them():
    cache = SimpleNamespace(get_seq_length=lambda: 2)
    assert tokens_of(MASK, torch.Size([2, 1]), cache).tolist() == [[True], [True]]
    assert tokens_of(MASK, torch.Size([2, 2]), cache) is None


def test_a_cache_that_counts_no_tokens():
    """A cache that counts no tokens is accepted. Caches with only linear attention have no length in transformers."""

    def refuse():
        raise ValueError("the current Cache seem to only contain LinearAttention layers")

    for cache in (SimpleNamespace(get_seq_length=refuse), SimpleNamespace()):
        assert torch.equal(tokens_of(MASK, torch.Size([2, 3]), cache), MASK != 0)
        assert tokens_of(MASK, torch.Size([2, 1]), cache) is None


@pytest.mark.parametrize("other", [None, torch.zeros(2, 1, 3, 3, dtype=torch.bool)])
def test_masks_by_layer_type_say_the_same_in_any_order(other, model, masks):
    """Masks by layer type give the same result in any order.

    transformers makes the dict from a set, whose order depends on the process, and tp ranks must agree.
    """
    by_type = {"mamba": MASK, "attention": other}
    for names in (("mamba", "attention"), ("attention", "mamba")):
        model(input_ids=IDS, attention_mask={name: by_type[name] for name in names})
        found = model.model.seen[-1]
        assert found.tokens.tolist() == MASK.bool().flatten().tolist()
        assert found.sent is (other is not None)


def test_a_row_that_attends_to_a_place_in_any_head_is_a_token():
    """A row that attends to a position in any head is a token.

    Its own row of the mask decides, and not its column, because a cache has earlier positions before it.
    """
    mask = torch.zeros(1, 2, 2, 4, dtype=torch.bool)
    mask[0, 1, 1, 2] = True
    assert tokens_of(mask, torch.Size([2, 2]), None).tolist() == [[False, True]] * 2


def test_what_a_mask_says():
    two = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    causal = torch.ones(4, 4, dtype=torch.bool).tril() & two.bool()[:, None, None, :]
    added = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    rows = torch.Size([2, 4])
    for mask in (two, two.bool(), two * 3, causal, added, {"full_attention": causal, "sliding_attention": causal}):
        assert tokens_of(mask, rows, None).tolist() == two.bool().tolist()
    blocks = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    blocks[..., 2:, :2] = False  # packed sequences
    assert tokens_of(blocks, rows, None).tolist() == [[True] * 4] * 2
    for mask in (None, two[:, :3], two[:1], two[None], causal.long(), {}, "mask"):
        assert tokens_of(mask, rows, None) is None

    class Cache:
        def __init__(self, length):
            self.length = length

        def get_seq_length(self):
            return self.length

    last = torch.Size([2, 1])
    for past in (0, torch.tensor(0), 3, torch.tensor(3)):
        assert tokens_of(two, last, Cache(past)).tolist() == two[:, int(past) : int(past) + 1].bool().tolist()
    assert tokens_of(two, last, Cache(4)) is None
