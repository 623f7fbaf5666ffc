"""Test that experts of transformers models are read one by one under transformers' names, and the rest with them."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, OlmoeForCausalLM, core_model_loading
from transformers import conversion_mapping as mapping
from transformers.core_model_loading import Concatenate, Interleave, Transpose, WeightConverter, WeightRenaming

from ep_moe.checkpoint import conversion, model_files
from ep_moe.checkpoint.conversion import in_file
from ep_moe.checkpoint.formats import Fused
from ep_moe.checkpoint.model_files import (
    ExpertFiles,
    _Lazy,
    check_dtype,
    keep_in_float32,
    load_dense_parameters,
    swapped,
)
from ep_moe.checkpoint.source import SINGLE, CheckpointSource, MemorySource
from ep_moe.errors import CheckpointError
from ep_moe.integrations.find_experts import find_experts, interface_layout
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.interface_models import FORMATS, MODELS, interface_checkpoints

EXPERTS = 8


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    quiet()
    return interface_checkpoints(tmp_path_factory.mktemp("interface"))


@pytest.fixture
def olmoe(checkpoints, tmp_path):
    """Return a function that writes changed tensors into a temporary checkpoint folder."""

    def write(change, form="per_expert"):
        tensors = load_file(checkpoints / "olmoe" / form / SINGLE)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / SINGLE, {"format": "pt"})
        (tmp_path / "config.json").write_text((checkpoints / "olmoe" / form / "config.json").read_text())
        return tmp_path

    return write


def on_meta(folder, dtype=torch.float32):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    keep_in_float32(model, dtype)
    return model


def files_of(folder, dtype=torch.float32):
    model = on_meta(folder, dtype)
    layouts = {name: found.layout for name, found in find_experts(model).items()}
    return ExpertFiles(model, CheckpointSource(folder, called=in_file), layouts)


def loaded(folder, dtype=torch.float32):
    files = files_of(folder, dtype)
    holders = {f"{m}.{one.name}".rpartition(".")[0] for m, layout in files.modules.items() for one in layout.tensors}
    load_dense_parameters(files.model, files, holders, device=torch.device("cpu"), dtype=dtype)
    return files


def all_tensors(model):
    return model.state_dict() | dict(model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_all_tensors_are_those_of_from_pretrained(checkpoints, kind, form, dtype):
    folder = checkpoints / kind / form
    reference = all_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    files = loaded(folder, dtype)
    seen = set()
    for module, layout in files.modules.items():
        assert layout.experts == EXPERTS
        whole = {name: reference[f"{module}.{name}"] for name in layout.names}
        for expert in range(EXPERTS):
            expected = layout.expert_slice(whole, expert)
            for name, tensor in files.read(module, expert).items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
                seen.add(f"{module}.{name}")
    rest = all_tensors(files.model)
    assert rest.keys() == reference.keys()
    for name in reference.keys() - seen:
        torch.testing.assert_close(rest[name], reference[name], rtol=0, atol=0)
    assert all(rest[name].is_meta for name in seen)  # no rank allocates all experts
    if (kind, dtype) == ("ernie4_5_moe", torch.bfloat16):
        assert any(tensor.dtype == torch.float32 for name, tensor in rest.items() if name.endswith("gate.weight"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_two_experts_of_eight_are_a_quarter_of_the_bytes(checkpoints, kind, form):
    files = files_of(checkpoints / kind / form)
    assert files.source.bytes_read == 0
    held = {f"{module}.{name}" for module, layout in files.modules.items() for name in layout.names}
    assert not held & files.rest.keys()
    for module, layout in files.modules.items():
        before = files.source.bytes_read
        for expert in (1, 6):
            files.read(module, expert)
        held = {name: files.model.get_parameter(f"{module}.{name}") for name in layout.names}
        assert files.source.bytes_read - before == 2 * sum(one.nbytes for one in layout.expert_slice(held, 0).values())


def test_saving_reverts_all_names(checkpoints):
    """The kept weight mapping is that of a model loaded by from_pretrained, so saving restores all names."""
    folder = checkpoints / "olmoe" / "per_expert"
    kept = loaded(folder).model._weight_conversions
    reference = AutoModelForCausalLM.from_pretrained(folder)._weight_conversions
    assert list(map(repr, kept)) == list(map(repr, reference))
    assert any(isinstance(one, WeightConverter) for one in kept)


# --- files that are not as they should be ------------------------------------------------------------------------

NAME = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


BROKEN = [
    (drop(NAME.format(3, "up")), "experts.3.up_proj.weight is missing in .*: 1 of 8 experts"),
    (drop(NAME.format(7, "down")), "experts.7.down_proj.weight is missing"),
    (drop(*(NAME.format(e, "gate") for e in range(8))), "has no .*gate_proj.* for model.layers.1.mlp.experts.gate_up"),
    (drop(*(NAME.format(e, "down") for e in range(8))), "layers.1.mlp.experts.down_proj is missing"),
    (put(NAME.format(8, "down"), lambda t: t[NAME.format(0, "down")] + 1), "has .*experts.8.down_proj.weight, and"),
    (put(NAME.format(5, "gate"), lambda t: torch.zeros(47, 32)), r"experts.5.gate_proj.weight must have shape"),
    (put(NAME.format(5, "gate"), lambda t: torch.zeros(48, 32).int()), "experts.5.gate_proj.weight must be .* int32"),
    (put(NAME.format(5, "gate"), lambda t: torch.zeros(48, 32).bool()), "weight must be .*, got bool; dequant"),
    (lambda t: t.update({NAME.format(e, "up"): torch.zeros(48, 31) for e in range(8)}),
     r"cannot be made of .*gate_proj.*layers.1.mlp.experts.0.up_proj.weight .*\[48, 31\]: .*; fetch it again"),
    (put(NAME.format(3, "up").removeprefix("model."), lambda t: torch.ones(48, 32)), "must differ only in the expert"),
    (put("model.layers.0.mlp.shared.weight", lambda t: torch.zeros(2)), "shared.weight, which OlmoeForCausalLM"),
    (put(NAME.format(0, "odd"), lambda t: torch.zeros(2)), "experts.0.odd_proj.weight, which .* no place for"),
    (put("model.layers.0.mlp.experts.0.gate_proj.qweight", lambda t: torch.zeros(2).int()), "qweight is there, and"),
    (put("model.layers.1.mlp.experts.down_proj", lambda t: torch.zeros(8, 32, 48)), "become .*remove|both .*remove"),
    (put("norm.weight", lambda t: torch.zeros(32)), "are both model.norm.weight; remove what is not meant"),
    (drop("model.layers.0.self_attn.q_proj.weight"), "layers.0.self_attn.q_proj.weight is missing in"),
    (drop("model.embed_tokens.weight"), "is missing in"),
    (put("model.norm.weight", lambda t: torch.zeros(31)), r"model.norm.weight must have shape \[32\], got \[31\]"),
    (put("model.norm.weight", lambda t: torch.zeros(32).int()), "model.norm.weight is torch.int32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_broken_files_are_refused_by_name(olmoe, change, message):
    with pytest.raises(CheckpointError, match=message):
        loaded(olmoe(change))


def test_what_the_models_class_ignores_is_no_reason_to_refuse(olmoe, monkeypatch):
    """Tensors that the model's class ignores are not refused, by their name in the file or by transformers' name."""
    folder = olmoe(put("model.layers.0.mlp.experts.0.extra.weight", lambda tensors: torch.zeros(2)))
    rename = conversion.rename_source_key

    def renamed(name, *rest):
        target, pattern = rename(name, *rest)
        return target.replace(".extra.", ".target."), pattern

    monkeypatch.setattr(conversion, "rename_source_key", renamed)
    with pytest.raises(CheckpointError, match=r"experts\.0\.extra\.weight, which .* no place for"):
        files_of(folder)
    for ignored in (r"experts\.0\.extra", r"experts\.0\.target"):
        monkeypatch.setattr(OlmoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [ignored])
        assert files_of(folder).left_out == []


def test_codes_beside_experts_are_called_by_their_quantisation(olmoe):
    """A file with codes besides all expert weights is refused, and the error names the quantization."""
    folder = olmoe(put("model.layers.0.mlp.experts.0.gate_proj.absmax", lambda tensors: torch.zeros(2)))
    with pytest.raises(CheckpointError, match=r"quantized by bitsandbytes.*absmax is there; dequantize"):
        files_of(folder)


def test_a_fused_tensor_under_two_names_is_refused(olmoe, monkeypatch):
    def change(tensors):
        for prefix in ("model.layers", "layers"):
            for layer in range(2):
                tensors[f"{prefix}.{layer}.mlp.experts.stored"] = torch.zeros(8, 32, 96)
        for layer in range(2):
            del tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"]

    with_operations(monkeypatch, [Transpose(1, 2)])
    words = r"layers.0.mlp.experts.stored .*and .*model.layers.0.mlp.experts.stored .*become .*gate_up_proj; remove"
    with pytest.raises(CheckpointError, match=words):
        files_of(olmoe(change, "fused"))


def test_a_name_that_a_renaming_leads_nowhere_is_kept(olmoe, monkeypatch):
    """A tensor keeps its name if the model has a parameter of that name, and none of the name after renaming."""
    mapping_of = conversion.get_model_conversion_mapping
    renaming = WeightRenaming("input_layernorm", "first_norm")
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda model: [renaming, *mapping_of(model)])
    files = files_of(olmoe(lambda tensors: None))
    assert files.left_out == []
    name = "model.layers.1.input_layernorm.weight"
    assert files.rest[name].names() == [name]


def test_experts_of_two_prefixes_are_in_no_known_format(olmoe, checkpoints):
    def change(tensors):
        for expert in range(8):
            name = NAME.format(expert, "up")
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    files = files_of(olmoe(change))
    assert [found is None for found in files.formats.values()] == [False, True]
    wanted = files_of(checkpoints / "olmoe" / "per_expert").read("model.layers.1.mlp.experts", 3)
    found = files.read("model.layers.1.mlp.experts", 3)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(("bias", "known"), [("down_proj_bias", True), ("down_bias", False)])
def test_fused_experts_with_biases_of_other_names_are_in_no_known_format(bias, known):
    names = {
        "w13": "mlp.gate_up_proj",
        "w2": "mlp.down_proj",
        "w13_bias": "mlp.gate_up_proj_bias",
        "w2_bias": f"mlp.{bias}",
    }
    layout = SimpleNamespace(tensors=[SimpleNamespace(transposed=True, interleaved=False)])
    wanted = Fused(gate_up="gate_up_proj", down="down_proj", transposed=True, bias=True)
    assert model_files._fused(layout, names) == (("mlp", wanted) if known else None)


def test_what_transformers_cannot_convert_is_refused(tmp_path):
    info = SimpleNamespace(conversion_errors={"model.norm.weight": "no room"}, mismatched_keys=[])
    words = f"model.norm.weight cannot be made of the tensors of {tmp_path}: no room"
    with pytest.raises(CheckpointError, match=words):
        model_files._check(SimpleNamespace(origin=tmp_path), info)


def test_a_tensor_for_transformers_has_the_header_of_a_slice():
    codes = {
        "w.weight_packed": torch.zeros(4, 16).byte(),
        "w.weight_scale": torch.ones(4, 1).to(torch.float8_e8m0fnu),
    }  # MXFP4
    source = MemorySource({"plain": torch.ones(2, 3).bfloat16(), **codes}, "here")
    headers = [(lazy.get_shape(), lazy.get_dtype()) for lazy in (_Lazy(source, name) for name in ("plain", "w.weight"))]
    assert headers == [([2, 3], "BF16"), ([4, 32], "F32")]


def test_fused_experts_of_another_number_are_refused(olmoe):
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(CheckpointError, match=r"down_proj has shape \[7, 32, 48\], and .* must have \[8, 32, 48\]"):
        files_of(olmoe(lambda tensors: tensors.update({name: tensors[name][:7]}), "fused"))


def test_experts_of_another_size_are_refused(olmoe, tmp_path):
    folder = olmoe(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight has shape \[48, 32\], which makes \[8, 96, 32\]"):
        files_of(folder)


def test_what_a_dtype_cannot_hold_is_refused(olmoe):
    def change(tensors):
        tensors[NAME.format(2, "up")][0, 0] = 70000.0

    files = files_of(olmoe(change), torch.float16)
    with pytest.raises(CheckpointError, match=r"numbers up to 7e\+04, and torch.float16 ends at"):
        files.read("model.layers.1.mlp.experts", 2)

    def change_rest(tensors):
        tensors["model.norm.weight"][0] = 70000.0

    with pytest.raises(CheckpointError, match=r"numbers up to 7e\+04, and torch.float16 ends at"):
        loaded(olmoe(change_rest), torch.float16)


def test_only_numbers_of_the_models_dtype_are_kept_in_float32():
    gate = torch.nn.Module()
    gate.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    gate.register_buffer("table", torch.ones(2, dtype=torch.int64))
    model = torch.nn.ModuleDict({"gate": gate, "other": torch.nn.Linear(2, 2, dtype=torch.bfloat16)})
    model._get_dtype_plan = lambda dtype: {"gate.*": torch.float32}
    keep_in_float32(model, torch.bfloat16)
    assert (gate.weight.dtype, gate.table.dtype) == (torch.float32, torch.int64)
    assert model["other"].weight.dtype == torch.bfloat16


def test_modules_that_were_swapped_come_back_after_an_error():
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)})
    before = dict(model.named_children())
    with pytest.raises(KeyError), swapped(model, {"one": torch.nn.Identity()}):
        raise KeyError(model["one"])
    assert dict(model.named_children()) == before


# --- operations of the mapping -----------------------------------------------------------------------------------


def with_operations(monkeypatch, operations, sources="mlp.experts.stored", targets="mlp.experts.gate_up_proj"):
    converter = WeightConverter(sources, targets, operations)
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda model: [converter])


@pytest.mark.parametrize(
    ("operations", "store"),
    [
        ([Transpose(1, 2)], lambda t: t.transpose(1, 2)),
        ([Transpose(1, 2, check_dims=True)], lambda t: t.transpose(1, 2)),
        ([Transpose(1, 2, check_dims=True)], lambda t: t),
        ([Interleave(dim=1)], lambda t: Interleave(1, inverse=True).convert({"x": t}, ["x"], ["x"])["x"]),
    ],
)  # fmt: skip
def test_operations_run_on_one_expert_as_on_all(olmoe, checkpoints, monkeypatch, operations, store):
    names = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]

    def change(tensors):
        for name in names:
            tensors[name.replace("gate_up_proj", "stored")] = store(tensors.pop(name))

    reference = load_file(checkpoints / "olmoe" / "fused" / SINGLE)
    with_operations(monkeypatch, operations)
    files = files_of(olmoe(change, "fused"))
    for name in names:
        for expert in (0, 5):
            found = files.read(name.removesuffix(".gate_up_proj"), expert)["gate_up_proj"]
            torch.testing.assert_close(found, reference[name][expert], rtol=0, atol=0)


@pytest.mark.parametrize(
    "operations",
    [[Transpose(0, 1)], [Transpose(1, 0)], [Interleave(dim=0)], [Concatenate(dim=0)], [mapping.PermuteForRope()]],
)
def test_operations_across_experts_are_refused_by_name(olmoe, monkeypatch, operations):
    def change(tensors):
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.experts."
            tensors[f"{name}stored"] = tensors.pop(f"{name}gate_up_proj")

    with_operations(monkeypatch, operations)
    with pytest.raises(CheckpointError, match=f"by {type(operations[0]).__name__}.*cannot read one expert"):
        files_of(olmoe(change, "fused"))


@pytest.mark.parametrize("change", [{"is_concatenated": False}, {"is_transposed": True}])
def test_experts_in_another_order_than_their_files_are_in_no_known_format(checkpoints, change):
    """Experts whose gate and up are ordered differently from their file match no known format.

    Known formats take gate and up from a file as they are.
    """
    model = on_meta(checkpoints / "olmoe" / "per_expert")
    names = list(find_experts(model))
    for name in names[1:]:
        for attribute, value in change.items():
            setattr(model.get_submodule(name), attribute, value)
    layouts = {name: interface_layout(model.get_submodule(name)) for name in names}
    found = ExpertFiles(model, CheckpointSource(checkpoints / "olmoe" / "per_expert", called=in_file), layouts).formats
    assert [found[name] is None for name in names] == [False, True]


def test_a_tensor_may_hold_several_parameters(olmoe, checkpoints, monkeypatch):
    """A file tensor with gate, up and down becomes two parameters."""
    reference = load_file(checkpoints / "olmoe" / "fused" / SINGLE)
    whole = {
        n: t[:, :64] if n.endswith("gate_up_proj") else t[:, :, :32] for n, t in reference.items() if "expert" in n
    }

    def change(tensors):
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.experts."
            del tensors[f"{name}gate_up_proj"], tensors[f"{name}down_proj"]
            tensors[f"{name}stored"] = torch.cat([whole[f"{name}gate_up_proj"], whole[f"{name}down_proj"]], dim=1)

    split = getattr(core_model_loading, "Split", None) or pytest.skip("transformers before 5.18 has no Split")
    with_operations(monkeypatch, [split(dim=1)], targets=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    folder = olmoe(change, "fused")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    files = files_of(folder)
    for module in files.modules:
        for name, tensor in files.read(module, 3).items():
            torch.testing.assert_close(tensor, whole[f"{module}.{name}"][3], rtol=0, atol=0)
    assert files.source.bytes_read == 2 * 96 * 32 * 4


def test_numbers_of_another_quantization_are_named():
    """An error about a quantized parameter outside the experts names the quantization."""
    others = {"lm_head.qzeros": "AutoRound"}
    source = SimpleNamespace(
        dtype=lambda name: "I32", unsupported_tensors=lambda prefix: others if prefix == "lm_head" else {},
        location=lambda name: name, declared=SimpleNamespace(said=""),
    )  # fmt: skip
    for name, words in (("lm_head.weight", "lm_head.weight is quantized by AutoRound"), ("norm.weight", "is I32; out")):
        with pytest.raises(CheckpointError, match=words):
            check_dtype(source, name, torch.ones(2), [name])
