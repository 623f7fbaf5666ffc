"""Test that each fault of a checkpoint is one sentence, on all ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint.reader import load_errors_on_all_ranks, load_layers, refuse_calls_while_writing
from ep_moe.checkpoint.source import INDEX, SINGLE, CheckpointSource
from ep_moe.errors import CheckpointError, ConfigError, OutOfMemory
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import LAYERS, check_layer, make_layers, tensors_of, write_tensors, written


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


EXPERTS = "model.layers.2.mlp.experts"
QUANTISED = "model.layers.1.mlp.experts.6.gate_proj.weight"
FACTORS = rf"{QUANTISED} is float8 of shape \[144, 160\].*{QUANTISED}_scale_inv of shape \[2, 2\].*got"
SHARD = "model-00002-of-0000"


def without(part):
    """Return a change that removes tensors whose names contain `part`."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def reshaped(name, *shape):
    return lambda tensors: tensors | {name: torch.ones(shape)}


# fault -> (checkpoint, change of its tensors, pattern of the error)
CHANGED_TENSORS = {
    "missing expert": (
        "qwen3_moe single",
        without(f"{EXPERTS}.5.up_proj.weight"),
        rf"{EXPERTS}\.5\.up_proj\.weight is missing; expected shape \[48, 32\]",
    ),
    "misshapen expert": (
        "qwen3_moe single",
        reshaped(f"{EXPERTS}.7.down_proj.weight", 32, 20),
        rf"{EXPERTS}\.7\.down_proj\.weight must have shape \[32, 48\], got \[32, 20\]",
    ),
    "missing router": (
        "qwen3_moe single",
        without("model.layers.0.mlp.gate.weight"),
        r"model\.layers\.0\.mlp\.gate\.weight is missing; expected shape \[8, 32\]",
    ),
    "too many experts": (
        "qwen3_moe single",
        reshaped("model.layers.0.mlp.gate.weight", 9, 32),
        r"model\.layers\.0\.mlp\.gate\.weight must have shape \[8, 32\], got \[9, 32\]",
    ),
    "no such layer": (
        "qwen3_moe single",
        without("layers.2"),
        r"model\.layers\.2\.mlp has no experts, experts\.0\.gate_proj\.weight or experts\.gate_up_proj or .* missing",
    ),
    "missing correction bias": (
        "deepseek_v3 single",
        without("model.layers.1.mlp.gate.e_score_correction_bias"),
        r"model\.layers\.1\.mlp\.gate.e_score_correction_bias is missing; expected shape \[8\]",
    ),
    "missing shared expert": (
        "deepseek_v3 single",
        without("model.layers.1.mlp.shared_experts.down_proj.weight"),
        r"model\.layers\.1\.mlp\.shared_experts.down_proj.weight is missing; expected shape \[32, 96\]",
    ),
    "missing factors": ("deepseek_v3 fp8", without(f"{QUANTISED}_scale_inv"), f"{FACTORS} nothing"),
    "misshapen factors": ("deepseek_v3 fp8", reshaped(f"{QUANTISED}_scale_inv", 144, 1), rf"{FACTORS} \[144, 1\]"),
}


def shard_of(folder):
    return next(folder.glob(f"{SHARD}*"))


def cut_shard(folder):
    path = shard_of(folder)
    path.write_bytes(path.read_bytes()[:-100])


def name_another_file(folder):
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = f"{EXPERTS}.3.up_proj.weight"
    index["weight_map"][name] = next(file for file in files if file != index["weight_map"][name])
    (folder / INDEX).write_text(json.dumps(index))


def remove_files(folder):
    for path in folder.iterdir():
        path.unlink()


def pickle_alone(folder):
    remove_files(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


# fault -> (change of the files of "qwen3_moe shards", pattern of the error)
CHANGED_FILES = {
    "missing shard": (lambda folder: shard_of(folder).unlink(), rf"{SHARD}.*is missing, though {INDEX}"),
    "truncated shard": (cut_shard, rf"{SHARD}.*is not a readable safetensors file"),
    "empty shard": (
        lambda folder: shard_of(folder).write_bytes(b""),
        rf"{SHARD}.*is not a readable safetensors file",
    ),
    "pointer of Git LFS": (
        lambda folder: shard_of(folder).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a"),
        rf"{SHARD}.*is a pointer of Git LFS; run git lfs pull",
    ),
    "index names another file": (
        name_another_file,
        rf"{EXPERTS}\.3\.up_proj\.weight is not in .*model-0000.*, though {INDEX}",
    ),
    "no checkpoint": (remove_files, f"holds neither {INDEX} nor {SINGLE}"),
    "pickled": (pickle_alone, rf"holds neither {INDEX} nor {SINGLE}; save pytorch_model.bin as safetensors"),
}
BROKEN_INDICES = (
    b'{"weight_map": ', b"{}", b"[]", b'{"weight_map": 3}', b'{"weight_map": ["a"]}', b"\xff\xfe", b"",
    b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": ""}}', b'{"weight_map": {"a": null}}', b"[" * 100_000,
)  # fmt: skip
CHANGED_FILES |= {
    f"broken index {number}": (
        lambda folder, text=text: (folder / INDEX).write_bytes(text),
        f"{INDEX} is not a safetensors index",
    )
    for number, text in enumerate(BROKEN_INDICES)
}


def damage(root, checkpoints):
    """Return name -> (folder, family, pattern of the error).

    Each folder is a copy of a good checkpoint with one fault.
    """
    good = checkpoints["qwen3_moe shards"]
    cases = {
        "no folder": (str(root / "nothing here"), "qwen3_moe", "there is no folder .*nothing here; give the folder"),
        "wrong family": (good.folder, "mixtral", r"has no experts, experts\.0\.w1\.weight or experts\.gate_up_proj"),
        "wrong fused family": (checkpoints["llama4_text shards"].folder, "gpt_oss", "has no experts, experts"),
    }
    for name, (source, change, pattern) in CHANGED_TENSORS.items():
        checkpoint = checkpoints[source]
        write_tensors(root / name, change(tensors_of(checkpoint.folder)), shards=3)
        cases[name] = (str(root / name), checkpoint.family, pattern)
    for name, (change, pattern) in CHANGED_FILES.items():
        shutil.copytree(good.folder, root / name)
        change(root / name)
        cases[name] = (str(root / name), good.family, pattern)
    return cases


@pytest.fixture(scope="session")
def damaged(checkpoints, tmp_path_factory):
    return damage(tmp_path_factory.mktemp("damaged"), checkpoints)


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "barrier",
    "reduce_scatter", "reduce_scatter_tensor", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


def refuse(*args, **kwargs):
    raise AssertionError("a collective was entered")


@distributed(1, 2)
def test_damage_is_one_error_on_all_ranks(checkpoints, damaged, world_size):
    """A damaged checkpoint raises one error on all ranks, whether all copies are damaged or only the last rank's.

    No collective is entered, and the context stays usable.
    """
    last = world_size - 1
    with EPContext.from_groups(device=rank_device()) as context:
        for name, (folder, family, pattern) in damaged.items():
            checkpoint = checkpoints["deepseek_v3 fp8" if "factors" in name else f"{family} shards"]
            for where in {"everywhere", "one rank"} if world_size > 1 else {"everywhere"}:
                layers = make_layers(checkpoint, context, LAYERS[family])
                before = {n: layer.expert_weights.w13.clone() for n, layer in layers.items()}
                hit = where == "everywhere" or dist.get_rank() == last
                with pytest.MonkeyPatch.context() as patch:
                    for collective in COLLECTIVES:
                        patch.setattr(dist, collective, refuse)
                    with pytest.raises(CheckpointError, match=pattern) as caught:
                        load_layers(layers, folder if hit else checkpoint.folder, family, progress=False)
                said = [None] * world_size
                dist.all_gather_object(said, (str(caught.value), folder))
                assert len({message for message, _ in said}) == 1, f"{name}, {where}: {said}"
                if where == "one rank":
                    assert f"rank {last}:" in said[0][0]
                    # the error names the damaged folder
                    assert said[last][1] in said[0][0]
                for n, layer in layers.items():
                    assert torch.equal(layer.expert_weights.w13, before[n]), f"{name}: half loaded"
        good = checkpoints["qwen3_moe shards"]
        layers = make_layers(good, context, LAYERS["qwen3_moe"])
        load_layers(layers, good.folder, "qwen3_moe", progress=False)
        check_layer(layers[2], good.expected[2], "after the errors")


@distributed(2)
def test_ranks_may_read_copies_of_their_own(checkpoints):
    """Ranks may read separate copies of a checkpoint, because node-local copies have different paths."""
    ways = ["mixtral shards", "mixtral single"]
    checkpoint = checkpoints[ways[dist.get_rank()]]
    with EPContext.from_groups(device=rank_device()) as context:
        layers = make_layers(checkpoint, context, [1])
        load_layers(layers, checkpoint.folder, "mixtral", progress=False)
        check_layer(layers[1], checkpoint.expected[1], ways)


@pytest.mark.parametrize("part", ["experts.3.up_proj", "shared_experts.down_proj"])
def test_numbers_that_the_layers_dtype_cannot_hold_are_refused(checkpoints, tmp_path, part):
    """Numbers that the layer's dtype cannot hold are refused, in shared experts too. They would become infinite."""
    checkpoint, name = checkpoints["deepseek_v3 single"], f"model.layers.1.mlp.{part}.weight"
    tensors = load_file(Path(checkpoint.folder) / SINGLE)
    tensors[name][0, 0] = 70000.0
    write_tensors(tmp_path, tensors, shards=1)
    layers = make_layers(checkpoint, EPContext.local(torch.device("cpu")), [1], dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"numbers up to 7e\+04, and torch.float16 ends at 6.55e\+04"):
        load_layers(layers, tmp_path, "deepseek_v3", progress=False)


def test_unknown_family_is_named(checkpoints):
    layers = make_layers(checkpoints["mixtral single"], EPContext.local(torch.device("cpu")), [0])
    with pytest.raises(ConfigError, match=r"family must be one of .*mixtral.*, got 'mixtrel'"):
        load_layers(layers, checkpoints["mixtral single"].folder, "mixtrel")


def test_a_device_without_room_is_no_damage_of_the_folder():
    with EPContext.local(torch.device("cpu")) as context:
        message = r"a/folder: the device has no room for the weights: 7 GiB.*more ranks, or quantization"
        with pytest.raises(OutOfMemory, match=message), load_errors_on_all_ranks("a/folder", context.consensus):
            raise torch.OutOfMemoryError("7 GiB are wanted")


@pytest.mark.parametrize(
    ("said", "error"),
    [("x is bad", "a/folder: x is bad"), ("a/folder/x.json is bad", "a/folder/x.json is bad")],
)
def test_an_error_names_the_folder_once(said, error):
    with EPContext.local(torch.device("cpu")) as context:
        with pytest.raises(CheckpointError) as found, load_errors_on_all_ranks("a/folder", context.consensus):
            raise CheckpointError(said)
        assert str(found.value) == error


def test_source_reads_parts(checkpoints):
    """`CheckpointSource` returns shapes and parts, and counts the bytes that it read."""
    checkpoint = checkpoints["deepseek_v3 fp8"]
    source = CheckpointSource(checkpoint.folder)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert source.has(name)
    assert not source.has("model.layers.1.mlp.experts.8.up_proj.weight")
    assert source.shape(name) == (144, 160)
    assert source.bytes_read == 0
    plain = load_file(Path(checkpoint.plain) / SINGLE)[name]
    assert torch.equal(source.read(name, slice(100, 130), slice(127, 129)), plain[100:130, 127:129])
    assert source.bytes_read == 30 * 2 + 4 * 4  # fp8 codes and four float32 scales
    assert torch.equal(source.read(name), plain)
    with pytest.raises(CheckpointError, match="nowhere is missing in"):
        source.read("nowhere")


def test_a_loading_that_wrote_nothing_counts_as_an_update_too():
    """A failed load counts as an update of the weights even if it wrote nothing.

    Ranks that fail at different experts have written different ones. EPLB must start again on all ranks or on none.
    """
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2), context)
        before = layer.expert_weights.updates
        with pytest.raises(KeyError), refuse_calls_while_writing([layer], "a folder"):
            raise KeyError
        assert layer.expert_weights.updates == before + 1
