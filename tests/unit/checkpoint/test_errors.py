"""What is wrong with a checkpoint is one sentence, on all ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.checkpoint.reader import load_layers, replacing
from ep_moe.checkpoint.source import INDEX, SINGLE, CheckpointSource
from ep_moe.errors import CheckpointError, ConfigError
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import LAYERS, check_layer, make_layers, write_tensors, written


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


def damage(root, checkpoints):
    """name -> (folder, family, what the error must say); each a copy of a good checkpoint with one thing wrong."""
    good = checkpoints["qwen3_moe shards"]
    tensors = load_file(Path(checkpoints["qwen3_moe single"].folder) / SINGLE)
    experts = "model.layers.2.mlp.experts"
    cases = {}

    def changed(name, change, pattern, *, base=tensors, family="qwen3_moe"):
        copy = dict(base)
        change(copy)
        write_tensors(root / name, copy, shards=3)
        cases[name] = (str(root / name), family, pattern)

    def spoiled(name, change, pattern):
        shutil.copytree(good.folder, root / name)
        change(root / name)
        cases[name] = (str(root / name), "qwen3_moe", pattern)

    changed(
        "missing expert",
        lambda t: t.pop(f"{experts}.5.up_proj.weight"),
        rf"{experts}\.5\.up_proj\.weight is missing; expected shape \[48, 32\]",
    )
    changed(
        "misshapen expert",
        lambda t: t.update({f"{experts}.7.down_proj.weight": torch.zeros(32, 20)}),
        rf"{experts}\.7\.down_proj\.weight must have shape \[32, 48\], got \[32, 20\]",
    )
    changed(
        "missing router",
        lambda t: t.pop("model.layers.0.mlp.gate.weight"),
        r"model\.layers\.0\.mlp\.gate\.weight is missing; expected shape \[8, 32\]",
    )
    changed(
        "too many experts",
        lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.zeros(9, 32)}),
        r"model\.layers\.0\.mlp\.gate\.weight must have shape \[8, 32\], got \[9, 32\]",
    )
    changed(
        "no such layer",
        lambda t: [t.pop(name) for name in list(t) if "layers.2" in name],
        r"model\.layers\.2\.mlp has no experts, experts\.0\.gate_proj\.weight or experts\.gate_up_proj or .* missing",
    )
    deepseek = load_file(Path(checkpoints["deepseek_v3 single"].folder) / SINGLE)
    for what, name, shape in (
        ("missing correction bias", "gate.e_score_correction_bias", r"\[8\]"),
        ("missing shared expert", "shared_experts.down_proj.weight", r"\[32, 96\]"),
    ):
        changed(
            what,
            lambda t, name=name: t.pop(f"model.layers.1.mlp.{name}"),
            rf"model\.layers\.1\.mlp\.{name} is missing; expected shape {shape}",
            base=deepseek,
            family="deepseek_v3",
        )
    shard = "model-00002-of-0000"
    spoiled("missing shard", lambda f: next(f.glob(f"{shard}*")).unlink(), rf"{shard}.*is missing, though {INDEX}")
    spoiled(
        "truncated shard",
        lambda f: (path := next(f.glob(f"{shard}*"))).write_bytes(path.read_bytes()[:-100]),
        rf"{shard}.*is not a readable safetensors file",
    )
    spoiled(
        "empty shard",
        lambda f: next(f.glob(f"{shard}*")).write_bytes(b""),
        rf"{shard}.*is not a readable safetensors file",
    )
    spoiled(
        "pointer of Git LFS",
        lambda f: next(f.glob(f"{shard}*")).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a"),
        rf"{shard}.*is a pointer of Git LFS; run git lfs pull",
    )
    indices = (
        b'{"weight_map": ', b"{}", b"[]", b'{"weight_map": 3}', b'{"weight_map": ["a"]}', b"\xff\xfe", b"",
        b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": ""}}', b'{"weight_map": {"a": null}}', b"[" * 100_000,
    )  # fmt: skip
    for number, text in enumerate(indices):
        pattern = f"{INDEX} is not a safetensors index"
        spoiled(f"broken index {number}", lambda f, text=text: (f / INDEX).write_bytes(text), pattern)

    def swap(folder):
        index = json.loads((folder / INDEX).read_text())
        files = sorted(set(index["weight_map"].values()))
        name = f"{experts}.3.up_proj.weight"
        index["weight_map"][name] = next(file for file in files if file != index["weight_map"][name])
        (folder / INDEX).write_text(json.dumps(index))

    spoiled(
        "index names another file", swap, rf"{experts}\.3\.up_proj\.weight is not in .*model-0000.*, though {INDEX}"
    )
    spoiled("no checkpoint", lambda f: [path.unlink() for path in f.iterdir()], f"holds neither {INDEX} nor {SINGLE}")

    def pickled(folder):
        for path in folder.iterdir():
            path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")

    spoiled("pickled", pickled, rf"holds neither {INDEX} nor {SINGLE}; save pytorch_model.bin as safetensors")
    cases["no folder"] = (str(root / "nothing here"), "qwen3_moe", "there is no folder .*nothing here; give the folder")
    cases["wrong family"] = (
        good.folder,
        "mixtral",
        r"has no experts, experts\.0\.w1\.weight or experts\.gate_up_proj",
    )
    cases["wrong fused family"] = (checkpoints["llama4_text shards"].folder, "gpt_oss", "has no experts, experts")

    quantised = {}
    for path in Path(checkpoints["deepseek_v3 fp8"].folder).glob("*.safetensors"):
        quantised |= load_file(path)
    name = "model.layers.1.mlp.experts.6.gate_proj.weight"
    for what, change, found in (
        ("missing factors", lambda t: t.pop(f"{name}_scale_inv"), "nothing"),
        ("misshapen factors", lambda t: t.update({f"{name}_scale_inv": torch.ones(144, 1)}), r"\[144, 1\]"),
    ):
        pattern = rf"{name} is float8 of shape \[144, 160\].*{name}_scale_inv of shape \[2, 2\].*got {found}"
        changed(what, change, pattern, base=quantised, family="deepseek_v3")
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
    """The whole checkpoint damaged, then rank 1's copy alone. No collective is entered; the context stays usable."""
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
                    # the folder that is damaged is the one that is named
                    assert said[last][1] in said[0][0]
                for n, layer in layers.items():
                    assert torch.equal(layer.expert_weights.w13, before[n]), f"{name}: half loaded"
        good = checkpoints["qwen3_moe shards"]
        layers = make_layers(good, context, LAYERS["qwen3_moe"])
        load_layers(layers, good.folder, "qwen3_moe", progress=False)
        check_layer(layers[2], good.expected[2], "after the errors")


@distributed(2)
def test_ranks_may_read_copies_of_their_own(checkpoints):
    """Node-local copies lie under different paths."""
    ways = ["mixtral shards", "mixtral single"]
    checkpoint = checkpoints[ways[dist.get_rank()]]
    with EPContext.from_groups(device=rank_device()) as context:
        layers = make_layers(checkpoint, context, [1])
        load_layers(layers, checkpoint.folder, "mixtral", progress=False)
        check_layer(layers[1], checkpoint.expected[1], ways)


@pytest.mark.parametrize("part", ["experts.3.up_proj", "shared_experts.down_proj"])
def test_numbers_that_the_layers_dtype_cannot_hold_are_refused(checkpoints, tmp_path, part):
    """They would be infinite, of shared experts too."""
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


def test_source_reads_parts(checkpoints):
    """The source alone: shapes, parts, and their bytes."""
    checkpoint = checkpoints["deepseek_v3 fp8"]
    source = CheckpointSource(checkpoint.folder)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert source.has(name)
    assert not source.has("model.layers.1.mlp.experts.8.up_proj.weight")
    assert source.shape(name) == (144, 160)
    assert source.bytes_read == 0
    plain = load_file(Path(checkpoint.plain) / SINGLE)[name]
    assert torch.equal(source.read(name, slice(100, 130), slice(127, 129)), plain[100:130, 127:129])
    assert source.bytes_read == 30 * 2 + 4 * 4  # fp8 and four float32 factors
    assert torch.equal(source.read(name), plain)
    with pytest.raises(CheckpointError, match="nowhere is missing in"):
        source.read("nowhere")


def test_a_loading_that_wrote_nothing_counts_as_an_update_too():
    """Of ranks that fail at different experts some have written theirs: EPLB begins again on all or on none."""
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2), context)
        before = layer.expert_weights.updates
        with pytest.raises(KeyError), replacing([layer], "a folder"):
            raise KeyError
        assert layer.expert_weights.updates == before + 1
