"""Test loading checkpoints of five families, as transformers writes them, into layers on ranks.

The parent process writes them with `save_pretrained`, together with the model's own weights in canonical form. The
ranks need no transformers. `tests/distributed/test_transformers.py` uses the same tiny models.
"""

import contextlib
import dataclasses
import io
import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from ep_moe import EPContext, ExpertMap, MoELayer, ParallelConfig, RankLayout
from ep_moe.checkpoint import reader as reader
from ep_moe.checkpoint import source as source_module
from ep_moe.checkpoint.reader import load_layers
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.groups import RankGroups
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import FAMILIES, LAYERS, check_layer, make_layers, written


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


# --- weights -----------------------------------------------------------------------------------------------------

# ParallelConfig's sizes and the expert map; None is linear
LAYOUTS = {
    1: [({}, None)],
    2: [({"dp": 2}, ExpertMap.redundant(8, 2, 3)), ({"tp": 2, "ep": 1, "etp": 2}, None)],
    4: [
        ({"dp": 4}, None),
        ({"dp": 4}, ExpertMap.from_ranks([[7, 1, 0], [], [2, -1, 7, 3], [4, 5, 6]], 8)),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, ExpertMap.round_robin(8, 2)),
        ({"dp": 2, "tp": 2, "ep": 1, "etp": 4}, None),
    ],
}

KINDS = [f"{family} {way}" for family in FAMILIES for way in ("shards", "single", "fused")]
# no published checkpoint has transformers' own names for Mixtral's experts
KINDS.remove("mixtral fused")
KINDS += ["llama4_text wrapped", "deepseek_v3 fp8", "gpt_oss mxfp4"]


@distributed(1, 2, 4)
def test_layers_hold_the_models_weights(checkpoints, world_size):
    for at, (sizes, expert_map) in enumerate(LAYOUTS[world_size]):
        with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
            # on four ranks each checkpoint gets two layouts: one with whole experts, one with experts cut by etp
            for kind in KINDS[at % 2 :: 2] if world_size == 4 else KINDS:
                checkpoint, expected = checkpoints[kind], checkpoints[kind].expected
                layers = make_layers(checkpoint, context, expected, expert_map)
                load_layers(layers, checkpoint.folder, checkpoint.family, progress=False)
                for number, layer in layers.items():
                    check_layer(layer, expected[number], f"{kind} {sizes} {expert_map} layer {number}")


@distributed(2)
def test_progress_counts_experts_on_the_first_rank(checkpoints):
    checkpoint = checkpoints["qwen3_moe single"]
    with EPContext.from_groups(device=rank_device()) as context:
        layers = make_layers(checkpoint, context, checkpoint.expected, None)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            load_layers(layers, checkpoint.folder, checkpoint.family)
        slots = sum(len(layer.expert_weights.local_experts) for layer in layers.values())
        wanted = rf"loading: {slots} of {slots} experts, \d+\.\d s\n" if context.layout.place == 0 else ""
        assert re.fullmatch(wanted, said.getvalue()), said.getvalue()


@distributed(2)
def test_any_layer_of_a_checkpoint_in_another_dtype(checkpoints):
    """A single layer loads in another dtype: one layer of two, in bfloat16, without its shared expert."""
    checkpoint = checkpoints["deepseek_v3 shards"]
    expected = checkpoint.expected[2]
    config = dataclasses.replace(checkpoint.config, shared_intermediate_size=0)
    with EPContext.from_groups(device=rank_device()) as context:
        layer = MoELayer(config, context, dtype=torch.bfloat16)
        before = layer.expert_weights.updates
        load_layers({2: layer}, checkpoint.folder, checkpoint.family, progress=False)
        assert layer.expert_weights.updates > before, "EPLB moves nothing that was loaded meanwhile"
        for slot, expert in enumerate(layer.expert_weights.local_experts):
            assert torch.equal(layer.expert_weights.w13[slot].cpu(), expected["experts"]["w13"][expert].bfloat16())
        # the correction bias stays in float32, because its last bits decide between experts
        assert torch.equal(layer.router.e_score_correction_bias.cpu(), expected["router"]["e_score_correction_bias"])


# --- bytes -------------------------------------------------------------------------------------------------------


def header(folder):
    """Return name -> (shape, bytes) of all tensors in a folder.

    The headers of the files are parsed by the format's definition.
    """
    tensors = {}
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        tensors |= {
            n: (entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0]) for n, entry in table.items()
        }
    return tensors


class Watched:
    """A safetensors file, or a slice of one, that logs each read as (tensor, index, bytes)."""

    def __init__(self, inner, reads, name=None):
        self._inner, self._reads, self._name = inner, reads, name

    def __getattr__(self, attribute):
        if attribute not in ("keys", "get_shape", "get_dtype"):
            raise AssertionError(f"a read that is not counted: {attribute}")
        return getattr(self._inner, attribute)

    def get_slice(self, name):
        return Watched(self._inner.get_slice(name), self._reads, name)

    def __getitem__(self, index):
        part = self._inner[index]
        self._reads.append((self._name, index, part.numel() * part.element_size()))
        return part


def watched_load(checkpoint, layers):
    """Run `load_layers` with every read logged. Return its source and the reads."""
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "safe_open", lambda *args, **kwargs: Watched(safe_open(*args, **kwargs), reads))
        source = load_layers(layers, checkpoint.folder, checkpoint.family, progress=False)
    return source, reads


def visits(reads, tensors, device):
    """Return how often each element of each tensor was read, over all ranks."""
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, (shape, _) in tensors.items()}
    for name, index, _ in reads:
        counts[name][index] += 1
    flat = torch.cat([count.flatten() for count in counts.values()]).to(device)
    dist.all_reduce(flat)
    sizes = [math.prod(shape) for shape, _ in tensors.values()]
    return dict(zip(tensors, flat.cpu().split(sizes), strict=True))


def in_block(name, layers):
    """Return what a tensor is to these layers' MoE blocks: "expert", "rest", or None outside of them."""
    names = name.removeprefix("language_model.").split(".")
    block = names[3:4] and names[3] in ("mlp", "block_sparse_moe", "feed_forward")
    if not block or int(names[2]) not in layers:
        return None
    return "expert" if names[4] == "experts" else "rest"


def number_of(name):
    """Return the expert's number in a tensor's name, or None for a tensor of all experts."""
    part = name.split("experts.")[1].split(".")[0]
    return int(part) if part.isdigit() else None


@distributed(1, 2, 4)
def test_each_rank_reads_its_own_experts_bytes(checkpoints, world_size):
    """Each rank reads only its own experts.

    Over all ranks, experts are read once. Each rank reads the router and the shared expert, and nothing else.
    """
    with EPContext.from_groups(device=rank_device()) as context:
        for kind in KINDS:
            checkpoint = checkpoints[kind]
            tensors = header(checkpoint.folder)
            layers = make_layers(checkpoint, context, LAYERS[checkpoint.family])
            source, reads = watched_load(checkpoint, layers)
            own = range(8 * dist.get_rank() // world_size, 8 * (dist.get_rank() + 1) // world_size)
            expected = 0
            for name, (_, size) in tensors.items():
                match in_block(name, layers):
                    case "expert":
                        number = number_of(name)
                        expected += size * len(own) // 8 if number is None else size * (number in own)
                    case "rest":
                        expected += size
            assert sum(size for _, _, size in reads) == expected, kind
            assert source.bytes_read == expected, kind
            times = {"expert": 1, "rest": world_size, None: 0}
            for name, seen in visits(reads, tensors, context.device).items():
                assert (seen == times[in_block(name, layers)]).all(), f"{kind}: {name}"


@distributed(2, 4)
def test_etp_halves_the_bytes(checkpoints, world_size):
    """With etp = 2, each of the two ranks reads half of a matrix. Both read the whole output bias."""
    sizes = ParallelConfig(dp=world_size // 2, tp=2, etp=2)
    with EPContext.from_groups(sizes, device=rank_device()) as context:
        for kind in KINDS:
            checkpoint = checkpoints[kind]
            tensors = header(checkpoint.folder)
            layers = make_layers(checkpoint, context, LAYERS[checkpoint.family])
            source, reads = watched_load(checkpoint, layers)
            counts = visits(reads, tensors, context.device)
            expected = 0
            for name, (_, size) in tensors.items():
                part, whole = in_block(name, layers), name.endswith("down_proj_bias")
                # scales and blocks of quantized matrices do not end at the etp boundaries
                quantised = name.endswith(("_scale_inv", "down_proj_blocks", "down_proj_scales"))
                if part == "expert":
                    expected += size // (world_size // 2) // (1 if whole else 2)
                    most = 2 if whole or quantised else 1
                    assert counts[name].min() == (2 if whole else 1), f"{kind}: {name}"
                    assert counts[name].max() <= most, f"{kind}: {name}"
                else:
                    expected += size * (part == "rest")
                    assert (counts[name] == (world_size if part == "rest" else 0)).all(), f"{kind}: {name}"
            read = sum(size for _, _, size in reads)
            assert source.bytes_read == read, kind
            if "fp8" in kind or "mxfp4" in kind:
                assert expected <= read < 1.35 * expected, kind
            else:
                assert read == expected, kind


@distributed(2)
def test_replicas_are_read_once(checkpoints):
    """A rank that holds several replicas of an expert reads it once.

    Over all ranks, an expert is read once per rank that holds it.
    """
    checkpoint = checkpoints["mixtral shards"]
    ranks = [[0, 1, 0, 2, 3, 0], [4, 5, 6, 7, 0]]
    with EPContext.from_groups(device=rank_device()) as context:
        expert_map = ExpertMap.from_ranks(ranks, 8, allow_duplicates=True)
        layers = make_layers(checkpoint, context, [0, 1], expert_map)
        _, reads = watched_load(checkpoint, layers)
        for name, seen in visits(reads, header(checkpoint.folder), context.device).items():
            if in_block(name, layers) == "expert":
                assert (seen == (2 if number_of(name) == 0 else 1)).all(), name
        for number, layer in layers.items():
            check_layer(layer, checkpoint.expected[number], number)


# --- the bar -----------------------------------------------------------------------------------------------------


class Bar:
    """A stand-in for `Progress`."""

    def __init__(self, total, *_, shown):
        self.total, self.shown, self.done = total, shown, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, count):
        self.done += count


@distributed(1, 2)
def test_only_rank_0_shows_a_bar(checkpoints, world_size):
    checkpoint = checkpoints["llama4_text shards"]
    with EPContext.from_groups(device=rank_device()) as context, pytest.MonkeyPatch.context() as patch:
        bars = []
        patch.setattr(reader, "Progress", lambda *given, **options: bars.append(Bar(*given, **options)) or bars[-1])
        ranks = {1: [[*range(8), 0, 0]], 2: [[0, 1, 0, 2, 3], [4, 5, 6, 7, -1, 6, 6]]}[world_size]
        layers = make_layers(checkpoint, context, [0, 2], ExpertMap.from_ranks(ranks, 8, allow_duplicates=True))
        for progress in (True, False):
            load_layers(layers, checkpoint.folder, checkpoint.family, progress=progress)
        shown, hidden = bars
        assert shown.shown is (dist.get_rank() == 0)
        assert hidden.shown is False
        # an expert in two slots is read once and counts twice
        slots = 2 * sum(expert >= 0 for expert in ranks[dist.get_rank()])
        assert (shown.total, shown.done) == (slots, slots)


def test_the_contexts_first_rank_shows_the_bar(checkpoints, monkeypatch):
    """The first rank of the context shows the bar, whatever its rank in the job."""
    bars, checkpoint = [], checkpoints["mixtral shards"]
    monkeypatch.setattr(reader, "Progress", lambda *given, **options: bars.append(Bar(*given, **options)) or bars[-1])
    layout, recorder, cpu = RankLayout(world=1, rank=3, ranks=(3,)), FlightRecorder(), torch.device("cpu")
    with EPContext(layout, cpu, None, RankGroups(layout, recorder, cpu), recorder) as context:
        load_layers(make_layers(checkpoint, context, [0]), checkpoint.folder, "mixtral")
    assert [bar.shown for bar in bars] == [True]
