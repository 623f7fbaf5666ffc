"""Test quantized checkpoints of models on transformers' experts interface, against the same values without codes."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ep_moe import EPContext
from ep_moe.checkpoint.source import SINGLE
from ep_moe.errors import CheckpointError
from ep_moe.integrations.transformers import load_pretrained, moe_layers
from tests.fixtures.checkpoint_files import quantise_fp8, quiet, same_bytes, save, stored, write_config, write_tensors
from tests.fixtures.dequantize import mxfp4_loop
from tests.fixtures.interface_models import FORMATS, interface_model

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# multiples of the block size 128
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
INNER = {"olmoe": "intermediate_size", "granitemoe": "intermediate_size", "nemotron_h": "moe_intermediate_size"}


def written(tmp_path, kind, form, quantise, how):
    """Write the folders "quantised" and "plain" of a model, with the tensors that `quantise` returns."""
    quiet()
    save(interface_model(kind, **SIZES, **{INNER[kind]: 128}), tmp_path / "source", save_original_format=FORMATS[form])
    packed, plain = {}, {}
    for name, tensor in load_file(tmp_path / "source" / SINGLE).items():
        codes, numbers = quantise(name, tensor)
        packed |= codes
        plain[name] = numbers
    write_tensors(tmp_path / "quantised", packed, shards=2)
    write_tensors(tmp_path / "plain", plain, shards=1)
    write_config(tmp_path / "quantised", tmp_path / "source", quantization_config=how)
    write_config(tmp_path / "plain", tmp_path / "source")
    return packed


def fp8_blocks(name, tensor):
    """Quantize as DeepSeek-V3 does, expert by expert if a tensor holds all of them."""
    if tensor.dim() != 3 or ("experts" not in name and "linear" not in name):
        packed, plain = quantise_fp8({name: tensor})
        return packed, plain[name]
    each = [quantise_fp8({f".layers.{name}": matrix}) for matrix in tensor]
    ends = {"": name, "_scale_inv": f"{name}_scale_inv"}
    packed = {full: torch.stack([codes[f".layers.{name}{end}"] for codes, _ in each]) for end, full in ends.items()}
    return packed, torch.stack([plain[f".layers.{name}"] for _, plain in each])


def fp8_matrices(name, tensor):
    """Quantize with one scale per expert matrix."""
    if "experts" not in name:
        return {name: tensor}, tensor
    scale = tensor.abs().amax() / 448
    codes = (tensor / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scale}, codes.float() * scale


def mxfp4(name, tensor):
    """Return random codes, packed as compressed-tensors does."""
    if "experts" not in name:
        return {name: tensor}, tensor
    generator = torch.Generator().manual_seed(len(name))
    rows, columns = tensor.shape
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 126, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return {f"{name}_packed": blocks.flatten(1), f"{name}_scale": scales}, mxfp4_loop(blocks, scales)


def loaded(folder, **options):
    context = EPContext.local(torch.device("cpu"))
    return load_pretrained(folder, context, dtype=torch.float32, progress=False, **options)


@torch.no_grad()
def logits(model):
    return model(torch.arange(3, 23)[None], use_cache=False).logits


MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
MATRICES = {"quant_method": "compressed-tensors", "format": "float-quantized"}
# last: the scheme that keeps the codes, and the name of the down matrix of expert 5 in layer 1
CASES = [
    ("olmoe", "per_expert", fp8_blocks, BLOCKS, ("fp8_block", "mlp.experts.5.down_proj.weight")),
    ("olmoe", "fused", fp8_blocks, BLOCKS, ("fp8_block", "mlp.experts.down_proj")),
    ("granitemoe", "per_expert", fp8_blocks, BLOCKS, ("fp8_block", "block_sparse_moe.output_linear.weight")),
    ("nemotron_h", "per_expert", fp8_blocks, BLOCKS, None),
    ("nemotron_h", "fused", fp8_blocks, BLOCKS, None),
    ("olmoe", "per_expert", fp8_matrices, MATRICES, None),
    ("olmoe", "per_expert", mxfp4, MXFP4, ("mxfp4", "mlp.experts.5.down_proj.weight_packed")),
]


@pytest.mark.parametrize(("kind", "form", "quantise", "how", "kept"), CASES)
def test_numbers_are_those_of_the_codes(kind, form, quantise, how, kept, tmp_path):
    """Values are those of the codes. A layer in the same scheme keeps the file's bytes."""
    packed = written(tmp_path, kind, form, quantise, how)
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    torch.testing.assert_close(logits(loaded(tmp_path / "quantised")), expected, rtol=1e-5, atol=1e-5)
    if kept is not None:
        scheme, name = kept
        model = loaded(tmp_path / "quantised", quantization=scheme, experts="reference")
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        codes = packed[f"model.layers.1.{name}"]
        assert same_bytes(stored(moe_layers(model)[1], 5)["w2"], codes if codes.dim() == 2 else codes[5])


def test_another_quantisation_is_refused_by_its_name(tmp_path):
    def hqq(name, tensor):
        return (
            {name.replace("weight", "W_q"): torch.ones(2, 2).int()} if "experts" in name else {name: tensor}
        ), tensor

    written(tmp_path, "olmoe", "per_expert", hqq, {"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"is quantized by HQQ, which is not read: .*W_q is there"):
        loaded(tmp_path / "quantised")


def test_codes_without_factors_are_refused(tmp_path):
    def half(name, tensor):
        codes, numbers = fp8_blocks(name, tensor)
        codes.pop("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", None)
        return codes, numbers

    written(tmp_path, "olmoe", "per_expert", half, BLOCKS)
    with pytest.raises(CheckpointError, match=r"experts.3.up_proj.weight is float8 .* can be read, got nothing"):
        loaded(tmp_path / "quantised")


def test_a_matrix_in_other_codes_than_those_beside_it_is_refused(tmp_path):
    """A matrix in another format than its neighbours is refused if a layer keeps the neighbours' bytes.

    Its values would be rounded a second time.
    """

    def mixed(name, tensor):
        other = name == "model.layers.1.mlp.experts.3.up_proj.weight"
        return (fp8_matrices if other else fp8_blocks)(name, tensor)

    written(tmp_path, "olmoe", "per_expert", mixed, BLOCKS)
    with pytest.raises(CheckpointError, match=r"experts.3.up_proj.weight .* would round these numbers anew"):
        loaded(tmp_path / "quantised", quantization="fp8_block", experts="reference")
