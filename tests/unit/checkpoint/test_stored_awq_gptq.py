"""Test parts of AWQ and GPTQ matrices, stored in words of eight numbers: each part equals that of the whole matrix."""

import json

import pytest
import torch

from ep_moe import CheckpointError
from ep_moe.checkpoint.quantization_config import DeclaredQuantization, read_declared_quantization
from ep_moe.checkpoint.stored import ALL
from ep_moe.checkpoint.stored_awq_gptq import AwqMatrix, GptqMatrix

ROWS, COLUMNS, GROUP, EXPERTS = 32, 48, 16, 3
KINDS = {torch.int32: "I32", torch.float32: "F32"}


class InMemory:
    declared = DeclaredQuantization(packing="gptq_v2")  # has every zero point

    def __init__(self, **tensors):
        self.tensors = tensors

    def holds(self, name):
        return name in self.tensors

    def header(self, name):
        return KINDS[self.tensors[name].dtype], tuple(self.tensors[name].shape)

    def raw(self, name, *index):
        return self.tensors[name][index]

    def location(self, name):
        return name


def matrix(kind):
    """Return a matrix of several experts, with words and scales of every value."""
    generator = torch.Generator().manual_seed(0)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, (EXPERTS, *shape), dtype=torch.int64, generator=generator).int()

    codes = words(COLUMNS, ROWS // 8) if kind is AwqMatrix else words(COLUMNS // 8, ROWS)
    scales = 2.0 ** torch.randint(-6, 0, (EXPERTS, COLUMNS // GROUP, ROWS), generator=generator)
    return kind(InMemory(qweight=codes, qzeros=words(COLUMNS // GROUP, ROWS // 8), scales=scales), "weight")


@pytest.mark.parametrize("expert", [None, 0, 2])
@pytest.mark.parametrize("kind", [AwqMatrix, GptqMatrix])
def test_a_part_is_that_of_the_whole(kind, expert):
    stored = matrix(kind)
    assert stored.shape == (EXPERTS, ROWS, COLUMNS)
    whole = stored.read_values()
    assert len(whole.unique()) > 50
    parts = [ALL, slice(0, 8), slice(8, 24), slice(5, 13), slice(17, 18), slice(24, 32)]
    for rows in parts:
        for columns in [*parts, slice(32, 48), slice(33, 47)]:
            wanted = whole[..., rows, columns] if expert is None else whole[expert, rows, columns]
            assert torch.equal(stored.read_values(rows, columns, expert), wanted), (rows, columns)


def test_codes_of_all_experts_are_those_of_each():
    stored = matrix(GptqMatrix)
    stored.tensors.declared = DeclaredQuantization(method="gptq", bits=frozenset({4}), groups=frozenset({GROUP}))
    stored.tensors.tensors["qzeros"].fill_(0x77777777)  # the middle of the range
    whole, each = stored.codes(ALL, ALL), [stored.codes(ALL, ALL, expert) for expert in range(EXPERTS)]
    assert whole[""].shape == (EXPERTS, ROWS, COLUMNS // 2)
    assert all(torch.equal(codes, torch.stack([one[part] for one in each])) for part, codes in whole.items())
    assert len({one[""].numpy().tobytes() for one in each}) == EXPERTS


@pytest.mark.parametrize("how", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}])
def test_a_factor_for_a_whole_row_is_stated_as_minus_one(how, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how | {"group_size": -1}}))
    assert read_declared_quantization(tmp_path).groups == {0}


@pytest.mark.parametrize(("kind", "method"), [(AwqMatrix, "awq"), (GptqMatrix, "gptq")])
@pytest.mark.parametrize(("bits", "wrong"), [({4}, None), ({4, 8}, "with 4, 8 bits"), ({8}, "with 8 bits")])
def test_other_bits_beside_four_are_refused(bits, wrong, kind, method):
    stored = matrix(kind)
    stored.tensors.declared = DeclaredQuantization(method=method, bits=frozenset(bits), groups=frozenset({GROUP}))
    problem = stored._wrong_stated()
    assert problem is None if wrong is None else wrong in problem


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "groups", "fits"),
    [
        (AwqMatrix, 16, 48, 3, True),
        (AwqMatrix, 16, 50, 3, False),
        (GptqMatrix, 16, 48, 3, True),
        (GptqMatrix, 16, 56, 3, False),
        (GptqMatrix, 20, 48, 3, False),
    ],
)
def test_groups_and_words_are_whole(kind, rows, columns, groups, fits):
    """A matrix whose size is not a multiple of its groups and words is refused.

    Its last columns would need a missing group, and its last rows would have no zero point.
    """
    codes = (columns, rows // 8) if kind is AwqMatrix else (columns // 8, rows)
    shapes = {"qweight": codes, "qzeros": (groups, rows // 8)}
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    wrong = kind(InMemory(**tensors, scales=torch.ones(groups, rows)), "weight")._wrong_tensors()
    assert (wrong is None) == fits
    assert fits or wrong.startswith(f"scales must have shape [{groups}, {rows}] beside qweight")


@pytest.mark.parametrize("kind", [AwqMatrix, GptqMatrix])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transposed": True}, "of a matrix that the model holds transposed; dequantize"),
        ({"qzeros": None}, "qzeros is missing; qweight is INT4"),
        ({"qweight": torch.float32}, "qweight must be int32, got F32"),
        ({"qzeros": torch.float32}, "qzeros must be int32, got F32"),
    ],
    ids=str,
)
def test_tensors_that_cannot_be_read_are_named(kind, change, words):
    stored = matrix(kind)
    stored.transposed = change.get("transposed", False)
    tensors = stored.tensors.tensors
    for name in tensors.keys() & change.keys():
        before = tensors.pop(name)
        if change[name] is not None:
            tensors[name] = before.to(change[name])
    assert words in stored._wrong_tensors()


@pytest.mark.parametrize("kind", [AwqMatrix, GptqMatrix])
def test_codes_under_a_scale_of_0_are_refused(kind):
    stored = matrix(kind)
    stored.tensors.tensors["scales"][1, 2, 3] = 0.0
    stored.read_values(slice(4, 8), ALL, 1)
    with pytest.raises(CheckpointError, match=r"scales has factors of 0 for \d+ numbers of qweight"):
        stored.read_values(slice(0, 8), ALL, 1)
