"""Test formats of codes in checkpoints of models in which only the experts are replaced, against their values.

The test makes codes and values entry by entry, from the formats' definitions and without the package.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ep_moe import EPContext
from ep_moe.checkpoint.source import SINGLE, CheckpointSource
from ep_moe.checkpoint.stored_awq_gptq import GptqMatrix
from ep_moe.errors import CheckpointError
from ep_moe.integrations.transformers import load_pretrained, moe_layers
from ep_moe.quant.schemes import SCHEMES
from tests.fixtures.checkpoint_files import quiet, save, saved_twice
from tests.fixtures.interface_models import FORMATS, interface_model
from tests.fixtures.packed_codes import awq, channel, gptq, int4, nvfp4

BOUND = 1e-5  # relative to the largest logit: weights are bitwise equal, but float32 sums are not
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}


def written(folder, kind, form, make, how, **options):
    """Write the folders "quantised" and "plain" for a test. Return the tensors of the former."""
    once, stored = _written(kind, form, make, json.dumps(how), **options)
    shutil.copytree(once.name, folder, dirs_exist_ok=True)
    return dict(stored)


@functools.cache
def _written(kind, form, make, how, **options):
    """Return a folder that lasts until the process ends, and its tensors, expert by expert."""
    quiet()
    once, how = tempfile.TemporaryDirectory(), json.loads(how)
    folder = Path(once.name)
    save(interface_model(kind, **SIZES), folder / "source", save_original_format=FORMATS[form])
    generator, stored, plain = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in load_file(folder / "source" / SINGLE).items():
        stored[name] = plain[name] = tensor
        if "experts" not in name and "linear" not in name:
            continue
        del stored[name]
        made = [make(*one.shape, generator, **options) for one in (tensor if tensor.dim() == 3 else [tensor])]
        plain[name] = numbers = torch.stack([one for _, one in made]).view(tensor.shape)
        assert numbers.std() > 0
        for end in made[0][0]:
            parts = [parts[end] for parts, _ in made]
            whole = parts[0] if tensor.dim() == 2 else torch.stack(parts)
            stem, own = name.removesuffix("weight"), name.endswith("weight")
            stored[f"{stem}{end if own else end.removeprefix('weight')}"] = whole.contiguous()
    plain = {name: tensor.contiguous() for name, tensor in plain.items()}
    saved_twice(folder, stored, plain, how)
    return once, stored


def loaded(folder, quantization="none"):
    context = EPContext.local(torch.device("cpu"))
    return load_pretrained(folder, context, quantization=quantization, dtype=torch.float32, progress=False)


@torch.no_grad()
def logits(model):
    return model(torch.arange(3, 23)[None], use_cache=False).logits


def compressed(kind, **weights):
    group = {"weights": weights, "targets": ["Linear"]} if weights else {}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group} if weights else {},
    }


def of_awq(group, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | more


def of_gptq(group, **more):
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False} | more


def packed(group):
    return compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)


V2 = {"checkpoint_format": "gptq_v2"}
CASES = {
    "channel": (channel, {}, compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "nvfp4": (nvfp4, {"packed": True}, compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)),
    "nvfp4-modelopt": (nvfp4, {"packed": False}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "int4-32": (int4, {"group": 32}, packed(32)),
    "int4-128": (int4, {"group": 128}, packed(128)),
    "awq-32": (awq, {"group": 32}, of_awq(32)),
    "awq-128": (awq, {"group": 128}, of_awq(128)),
    "gptq-32": (gptq, {"group": 32}, of_gptq(32)),
    "gptq-128": (gptq, {"group": 128}, of_gptq(128, checkpoint_format="gptq")),
    "gptq-v2": (gptq, {"group": 128, "less": 0}, of_gptq(128, **V2)),
    "gptq-zeros": (gptq, {"group": 32, "symmetric": False}, of_gptq(32, sym=False)),
    "gptq-zeros-v2": (gptq, {"group": 32, "symmetric": False, "less": 0}, of_gptq(32, sym=False, **V2)),
    "gptq-reordered": (gptq, {"group": 32, "reordered": True}, of_gptq(32, desc_act=True)),
}
# in the latter two a tensor holds all experts
FAMILIES = [("olmoe", "per_expert"), ("granitemoe", "per_expert"), ("olmoe", "fused")]


@pytest.mark.parametrize(
    ("kind", "form", "case"),
    [
        (*family, case)
        for family in FAMILIES
        for case, (make, *_) in CASES.items()
        # AWQ and GPTQ name codes after modules, which fused experts are not
        if make not in (awq, gptq) or family != ("olmoe", "fused")
    ],
)
def test_numbers_are_those_of_the_codes(kind, form, case, tmp_path):
    make, options, how = CASES[case]
    written(tmp_path, kind, form, make, how, **options)
    plain, model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), loaded(tmp_path / "quantised")
    expected = logits(plain)
    assert expected.std() > 0.1
    experts = [module for module in plain.modules() if hasattr(module, "gate_up_proj")]
    for layer, theirs in zip(moe_layers(model), experts, strict=True):
        for expert, slots in layer.expert_weights.slots_of_expert.items():
            whole = layer.expert_weights.gather_slot(slots[0])
            assert torch.equal(whole["w13"], theirs.gate_up_proj[expert])
            assert torch.equal(whole["w2"], theirs.down_proj[expert])
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=BOUND * float(expected.abs().max()))


@pytest.mark.parametrize(("kind", "form"), FAMILIES)
def test_a_scale_for_each_channel_is_kept_with_its_codes(kind, form, tmp_path, recwarn):
    make, options, how = CASES["channel"]
    written(tmp_path, kind, form, make, how, **options)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    model, scheme = loaded(tmp_path / "quantised", quantization="fp8_channel"), SCHEMES["fp8_channel"]
    assert not [each for each in recwarn if "second time" in str(each.message)]
    experts = [module for module in plain.modules() if hasattr(module, "gate_up_proj")]
    for layer, theirs in zip(moe_layers(model), experts, strict=True):
        assert layer.expert_weights.scheme is scheme
        for expert, slots in layer.expert_weights.slots_of_expert.items():
            whole = layer.expert_weights.gather_slot(slots[0])
            assert torch.equal(scheme.dequantize(whole, "w13"), theirs.gate_up_proj[expert])
            assert torch.equal(scheme.dequantize(whole, "w2"), theirs.down_proj[expert])
    expected = logits(plain)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=BOUND * float(expected.abs().max()))


KEPT = {"int4-128": "int4", "int4-32": "mxint4", "gptq-128": "int4", "gptq-v2": "int4_fp8", "gptq-32": "mxint4"}


def experts_of(folder, model, scheme):
    """Yield the w13 and w2 of each expert as pairs: dequantized from the layer, and the plain values."""
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain")
    theirs = [module for module in plain.modules() if hasattr(module, "gate_up_proj")]
    for layer, other in zip(moe_layers(model), theirs, strict=True):
        assert layer.expert_weights.scheme is scheme
        for expert, slots in layer.expert_weights.slots_of_expert.items():
            whole = layer.expert_weights.gather_slot(slots[0])
            yield scheme.dequantize(whole, "w13"), other.gate_up_proj[expert]
            yield scheme.dequantize(whole, "w2"), other.down_proj[expert]


@pytest.mark.parametrize(("kind", "form"), FAMILIES[:2])
@pytest.mark.parametrize("case", KEPT)
def test_codes_of_int4_are_kept(kind, form, case, tmp_path, recwarn):
    """A layer of an INT4 scheme keeps the codes of the checkpoint.

    Scales in float16 are rounded to bfloat16 (8 significant bits), and a warning says so. No rounding and no warning
    occur
    if all scales fit into bfloat16.
    """
    make, options, how = CASES[case]
    stored = written(tmp_path, kind, form, make, how, **options)
    of_words = make is gptq
    model, scheme = loaded(tmp_path / "quantised", quantization=KEPT[case]), SCHEMES[KEPT[case]]
    said = [str(each.message) for each in recwarn]
    assert not [text for text in said if "second time" in text]
    assert sum("scales of INT4 groups are rounded to bfloat16" in text for text in said) == of_words
    for found, numbers in experts_of(tmp_path, model, scheme):
        torch.testing.assert_close(found, numbers, rtol=2**-8 if of_words else 0, atol=0)
        assert torch.equal(found == 0, numbers == 0)
    if of_words:
        for name in stored:
            if name.endswith(".scales"):
                stored[name] = stored[name].bfloat16().half()
        save_file(stored, tmp_path / "quantised" / SINGLE, {"format": "pt"})
        recwarn.clear()
        again = loaded(tmp_path / "quantised", quantization=KEPT[case])
        assert not list(recwarn)
        for (exact, _), (before, _) in zip(
            experts_of(tmp_path, again, scheme), experts_of(tmp_path, model, scheme), strict=True
        ):
            assert torch.equal(exact, before)


@pytest.mark.parametrize(
    ("case", "scheme"),
    [("gptq-zeros", "mxint4"), ("gptq-reordered", "mxint4"), ("awq-128", "int4"), ("gptq-32", "int4")],
)
def test_other_codes_of_words_are_rounded_again_and_said(case, scheme, tmp_path):
    make, options, how = CASES[case]
    written(tmp_path, "olmoe", "per_expert", make, how, **options)
    with pytest.warns(UserWarning, match="second time"):
        model = loaded(tmp_path / "quantised", quantization=scheme)
    for found, numbers in experts_of(tmp_path, model, SCHEMES[scheme]):
        step = numbers.abs().max() / 7
        assert 0 < (found - numbers).abs().max() <= step, "half a step of the largest group, and its scale's rounding"


def test_an_order_that_config_json_denies(tmp_path):
    make, _, how = CASES["gptq-32"]
    written(tmp_path, "olmoe", "per_expert", make, how, group=32, reordered=True)
    with pytest.raises(CheckpointError, match=r"g_idx puts columns in another order, and config\.json does not state"):
        loaded(tmp_path / "quantised", quantization="mxint4")


@pytest.mark.parametrize("case", ["channel", "nvfp4", "int4-32", "awq-32", "gptq-32"])
def test_one_wrong_factor_is_seen(case, tmp_path):
    make, options, how = CASES[case]
    stored = written(tmp_path, "olmoe", "per_expert", make, how, **options)
    name = next(name for name in stored if "0.down_proj" in name and name.endswith(("scale", "scales")))
    stored[name] = (stored[name].float() * 2).to(stored[name].dtype)
    save_file(stored, tmp_path / "quantised" / SINGLE, {"format": "pt"})
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    apart = (logits(loaded(tmp_path / "quantised")) - expected).abs().max()
    assert apart > 100 * BOUND * expected.abs().max()


@pytest.mark.parametrize("case", ["awq-32", "gptq-zeros", "gptq-32"])
def test_zero_points_count(case, tmp_path):
    make, options, how = CASES[case]
    stored = written(tmp_path, "olmoe", "per_expert", make, how, **options)
    name = next(name for name in stored if name.endswith("0.down_proj.qzeros"))
    # one of eight zero points; otherwise all those above 3
    stored[name] = stored[name] ^ 1 if case == "gptq-32" else stored[name] & 0x33333333
    save_file(stored, tmp_path / "quantised" / SINGLE, {"format": "pt"})
    if case == "gptq-32":
        with pytest.raises(CheckpointError, match=r"0\.down_proj\.qzeros has zero points 7 to 8, .* states sym: true"):
            loaded(tmp_path / "quantised")
        return
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    apart = (logits(loaded(tmp_path / "quantised")) - expected).abs().max()
    assert apart > 100 * BOUND * expected.abs().max()


def without(name):
    return lambda stored, config: [stored.pop(each) for each in list(stored) if each.endswith(f"0.up_proj.{name}")]


def stating(**changes):
    return lambda stored, config: config["quantization_config"].update(changes)


def groups_beyond(stored, config):
    for name in stored:
        if name.endswith("g_idx"):
            stored[name] = stored[name] + 1


@pytest.mark.parametrize(
    ("case", "change", "sentence"),
    [
        ("awq-32", stating(version="gemv"), r"qweight is AWQ in the packing 'gemv', which is not read; dequantize"),
        (
            "awq-32",
            stating(zero_point=False),
            r"qweight is AWQ without zero points \(zero_point: false\), which is not",
        ),
        ("awq-32", stating(bits=8), r"qweight is AWQ with 8 bits, and 4 bits alone are read"),
        ("awq-32", stating(group_size=64), r"factor for each 32 columns, and config\.json states group_size 64"),
        ("awq-32", stating(quant_method="gptq", version=""), r"(qzeros|scales) must have shape"),
        ("awq-32", without("qzeros"), r"0\.up_proj\.qzeros is missing; .*qweight is INT4 in groups of 32 \(AWQ\)"),
        ("awq-32", without("scales"), r"0\.up_proj\.scales is missing"),
        ("awq-32", without("qweight"), r"0\.up_proj.* is missing"),
        (
            "gptq-128",
            stating(checkpoint_format="marlin"),
            r"qweight is GPTQ in the packing 'marlin', which is not read",
        ),
        ("gptq-128", stating(checkpoint_format="gptq_v2"), r"zero points 7 to 7, and config\.json states sym: true"),
        ("gptq-128", stating(quant_method="auto-round"), r"is quantized by AutoRound, which is not read"),
        ("gptq-128", stating(quant_method=None), r"AWQ or GPTQ, and config\.json does not state which"),
        ("gptq-128", stating(quant_method="awq", checkpoint_format="", sym=None), r"(qzeros|scales) must have shape"),
        ("gptq-reordered", without("g_idx"), r"0\.up_proj\.g_idx is missing, and config\.json states desc_act: true"),
        ("gptq-reordered", groups_beyond, r"g_idx must be groups of columns in \[0, \d\), got 1 to \d"),
    ],
)
def test_what_would_be_misread_is_refused(case, change, sentence, tmp_path):
    make, options, how = CASES[case]
    stored = written(tmp_path, "olmoe", "per_expert", make, how, **options)
    file = tmp_path / "quantised" / "config.json"
    config = json.loads(file.read_text())
    change(stored, config)
    file.write_text(json.dumps(config))
    save_file(stored, tmp_path / "quantised" / SINGLE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=sentence):
        loaded(tmp_path / "quantised")


def test_a_forgotten_offset_of_zero_points_would_be_seen(tmp_path, monkeypatch):
    make, options, how = CASES["gptq-zeros"]
    written(tmp_path, "olmoe", "per_expert", make, how, **options)
    monkeypatch.setattr(GptqMatrix, "_offset", lambda self, stored: stored)
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    apart = (logits(loaded(tmp_path / "quantised")) - expected).abs().max()
    assert apart > 100 * BOUND * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_a_part_is_that_of_the_whole(case, tmp_path):
    """Any part of a matrix equals that part of the whole, as ranks with etp read it.

    Parts need not start at whole words and groups.
    """
    make, options, how = CASES[case]
    written(tmp_path, "olmoe", "per_expert", make, how, **options)
    matrix = CheckpointSource(tmp_path / "quantised").matrix("model.layers.0.mlp.experts.2.up_proj.weight")
    whole = matrix.read_values()
    for rows, columns in ((slice(0, 64), slice(None)), (slice(3, 21), slice(6, 78)), (slice(None), slice(128, 256))):
        assert torch.equal(matrix.read_values(rows, columns), whole[rows, columns])
