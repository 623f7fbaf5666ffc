"""`ep-moe fit`: estimates whether a model fits on GPUs that are not here, and how long its MoE layers would take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_moe.bench.expected_time import FEW_TOKENS, ITSELF, Expected, held_back
from ep_moe.bench.fit import LayoutEstimate, answer, best, crossover
from ep_moe.bench.fit_question import Question
from ep_moe.bench.floors import SECOND_LEVEL_US, Crossover
from ep_moe.checks import check_count
from ep_moe.cli.output import check_revision
from ep_moe.config import ONE_SCALE, MoEConfig, ParallelConfig, Wire, load_model_config
from ep_moe.errors import ConfigError
from ep_moe.quant.schemes import scheme_of
from ep_moe.runtime.gpus import gpu_named
from ep_moe.selection.explain import AUTO
from ep_moe.types import dtype_name

_DTYPES = {dtype_name(known): known for known in (torch.bfloat16, torch.float16)}
_GIB = 2**30
_NIC_SOURCE = "--nic-gb-s; 50 is the nominal rate of a 400 Gbit/s card, not measured"
_NOT_COUNTED = (
    "CUDA context, NCCL's buffers, the allocator's gaps, rows between kernels, activations outside MoE layers"
)
_CRITERIA = "fits the memory, then least floor in turn, then fewest bytes, then smallest tp; as many tokens of the job"


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of `ep-moe fit`, named as on the command line."""

    model: str
    gpus: int
    gpu: str = "h200"
    per_host: int = 8
    tokens: int = 128
    quantization: str = "none"
    dtype: str = "bfloat16"
    wire: str = "plain"
    dp: int | None = None
    tp: int = 1
    ep: int | None = None
    etp: int = 1
    redundant: int = 0
    all2all: str = AUTO
    experts: str = AUTO
    nic_gb_s: float = 50.0
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a model.

    Args:
        name: The name as given.
        config: The configuration of its MoE layers.
        layers: The number of its MoE layers.
        rest: The number of parameters outside of them. None if the configuration only describes MoE layers.
        kv_numbers: The number of values of one token in the KV cache, over all layers.
    """

    name: str
    config: MoEConfig
    layers: int
    rest: int | None = None
    kv_numbers: int | None = None


def read_model(name: str, revision: str | None = None) -> Model:
    """Read a model's sizes, without its weights.

    Args:
        name: A bundled configuration, a .toml file, a folder with config.json, or a model of the Hub.
        revision: The revision of a model of the Hub.

    Returns:
        The sizes.

    Raises:
        ConfigError: There is no such model, or its layers differ.
        CheckpointError: A folder or the Hub has no readable configuration.
    """
    check_revision(name, revision)
    if not Path(name).is_dir() and ("/" not in name or name.endswith(".toml")):
        found = load_model_config(name)
        return Model(name=name, config=found.moe, layers=found.moe_layers)
    from ep_moe.checkpoint.hub import model_folder
    from ep_moe.integrations.families import blocks_of, checked_config, family_of
    from ep_moe.integrations.load import on_meta

    folder = model_folder(name, weights=False, revision=revision)
    text, config = checked_config(folder)
    model = on_meta(folder, text, torch.bfloat16)
    blocks = blocks_of(model, family_of(text)[1])
    inside = sum(p.numel() for _, block in blocks for p in block.parameters())
    rest = sum(p.numel() for p in model.parameters()) - inside
    return Model(name=name, config=config, layers=len(blocks), rest=rest, kv_numbers=_kv_numbers(text))


def _kv_numbers(text: Any) -> int:
    """Return the number of cached values of one token in transformers, which expands latent attention (MLA)."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        a_layer = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    else:
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        a_layer = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head
    return int(text.num_hidden_layers * a_layer)


def run(options: FitOptions) -> dict[str, Any]:
    """Compute the answer of `ep-moe fit`.

    Args:
        options: The options of the command line.

    Returns:
        The fields of the JSON object. Times are in microseconds; None stands for unknown.

    Raises:
        EPMoEError: An option is wrong, or no backends can run.
    """
    gpu, scheme = gpu_named(options.gpu), scheme_of(options.quantization)
    if options.dtype not in _DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(_DTYPES)}, got {options.dtype!r}")
    model, dtype = read_model(options.model, options.revision), _DTYPES[options.dtype]
    asked = Question(
        config=model.config, layers=model.layers, gpu=gpu, gpus=options.gpus, per_host=options.per_host,
        tokens=options.tokens, scheme=scheme, dtype=dtype, redundant=options.redundant, nic=options.nic_gb_s * 1e9,
        wire=Wire(dispatch=options.wire, input_scale=1.0 if options.wire in ONE_SCALE else None),
        all2all=options.all2all, experts=options.experts,
        rest_bytes=None if model.rest is None else model.rest * dtype.itemsize,
    )  # fmt: skip
    found = answer(asked, _parallel(options))
    return {
        "asked": dataclasses.asdict(options),
        "gpu": {
            "name": gpu.name, "compute_capability": list(gpu.capability), "memory_bytes": gpu.memory_bytes,
            "rates": dataclasses.asdict(gpu.rates), "nic_bytes_per_s": asked.nic, "nic_source": _NIC_SOURCE,
        },
        "layout": _layout(found) | {"idle_ranks_of_an_ep_group": asked.idle_ranks(found.layout)},
        "backends": {"all2all": found.choice.all2all, "experts": found.choice.experts, "reason": found.choice.reason},
        "memory": _memory(asked, model, found),
        "layer_time": _time(found),
        "wire": _wire(asked, found),
        "crossover": _crossover(crossover(asked, found.layout)),
        "best": {
            "criteria": _CRITERIA,
            "layouts": [
                _layout(one)
                | {"all2all": one.choice.all2all, "experts": one.choice.experts, "bytes": one.memory.total}
                | {"floor_us": None if one.time is None else one.time.floor_us}
                for one in best(asked)
            ],
        },
    }  # fmt: skip


def _parallel(options: FitOptions) -> ParallelConfig:
    for name in ("dp", "tp", "ep", "etp"):
        if getattr(options, name) is not None:
            check_count(f"--{name}", getattr(options, name), at_least=1)
    dp = options.gpus // options.tp if options.dp is None else options.dp
    if dp * options.tp != options.gpus:
        asked = f"--tp {options.tp}" if options.dp is None else f"--dp {dp} and --tp {options.tp}"
        raise ConfigError(
            f"dp * tp must be all --gpus, got {asked} for {options.gpus} GPUs; give a --tp that divides --gpus, and "
            f"leave --dp out"
        )
    return ParallelConfig(dp=dp, tp=options.tp, ep=options.ep, etp=options.etp)


def _layout(found: LayoutEstimate) -> dict[str, int]:
    layout = found.layout
    return {name: getattr(layout, name) for name in ("dp", "tp", "ep", "etp", "replicas")} | {
        "hosts_of_an_ep_group": layout.ep_node_count
    }


def _memory(asked: Question, model: Model, found: LayoutEstimate) -> dict[str, Any]:
    kv = None if model.kv_numbers is None else model.kv_numbers * asked.dtype.itemsize
    left = asked.gpu.memory_bytes - found.memory.total
    unknown = [name for name, size in found.memory.layer.items() if size is None]
    return {
        "layer_bytes": found.memory.layer,
        "moe_layers": model.layers,
        "rest_of_model_bytes": asked.rest_bytes,
        "total_bytes": found.memory.total,
        "left_bytes": left,
        "fits": found.fits(asked),
        "kv_bytes_per_token": kv,
        "kv_tokens_in_what_is_left": None if not kv else max(0, left // kv),
        "not_counted": ", ".join([*(f"{name} (only the library tells, on a GPU)" for name in unknown), _NOT_COUNTED]),
    }


def _time(found: LayoutEstimate) -> dict[str, Any]:
    time = found.time
    if time is None:
        return {"floor_us": None, "expected_us": None, "source": "no model of this transport or quantization"}
    floor = time.floor
    names = ("weights", "products", "out", "back")
    return {
        "floor_us": time.floor_us,
        "floor_parts_us": {name: getattr(floor, name) for name in names} | {"tp_and_etp": time.groups},
        "bound": {"w": "weights read", "p": "matrix products", "n": "the wire"}[floor.bound],
        "expected_us": None if time.expected is None else time.expected.us,
        "launches_us": None if time.expected is None else time.expected.launches_us,
        "ratio": None if time.expected is None else time.expected.us / time.floor_us,
        "source": "floor only, not measured" if time.expected is None else time.expected.source,
        "accuracy": None if time.expected is None else _accuracy(time.expected),
    }


def _accuracy(expected: Expected) -> dict[str, Any]:
    """Return the accuracy of predictions from this basis, on measured lines that were held back."""
    if expected.basis == ITSELF:
        return {"predicted_from": None}
    held = held_back(expected.basis)
    return {
        "predicted_from": expected.basis,
        "held_back_lines": len(held.errors),
        "within_20_percent": held.within(0.2),
        "median_error": held.median,
        "worst_error": held.worst(held.errors),
        f"worst_error_to_{FEW_TOKENS}_tokens": held.worst(held.few),
    }


def _wire(asked: Question, found: LayoutEstimate) -> dict[str, Any]:
    time = found.time
    links = {} if time is None else {"nvlink": time.nvlink_bytes, "nic": time.nic_bytes}
    return {
        "tokens_sent_by_a_rank": asked.dispatched(found.layout),
        **{f"{link}_bytes_per_token": links.get(link) for link in ("nvlink", "nic")},
        **{f"{link}_bytes_per_call": links[link] * asked.tokens if links else None for link in ("nvlink", "nic")},
    }


def _crossover(found: Crossover | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return dataclasses.asdict(found) | {"second_level_costs_us": SECOND_LEVEL_US, "source": "floor only, not measured"}


# --- as text -------------------------------------------------------------------------------------------------------


def print_answer(answered: dict[str, Any], say: Callable[[str], None]) -> None:
    """Print the answer of `run` as text.

    Args:
        answered: The result of `run`.
        say: Prints one line.
    """
    asked, gpu, layout, chosen = (answered[name] for name in ("asked", "gpu", "layout", "backends"))
    sizes = ", ".join(f"{name} {layout[name]}" for name in ("dp", "tp", "ep", "etp"))
    say(f"{asked['model']} on {asked['gpus']} x {gpu['name']}, {asked['per_host']} a host: {sizes}")
    say(f"  experts in {asked['quantization']}, {asked['tokens']} tokens of each GPU in a call")
    if layout["idle_ranks_of_an_ep_group"]:
        idle = layout["idle_ranks_of_an_ep_group"]
        more = asked["redundant"] + idle
        say(f"  {idle} of {layout['ep']} ranks hold no expert; --redundant {more} gives each of them a replica")
    say(f"backends  {chosen['all2all']} with {chosen['experts']}: {chosen['reason']}")
    _print_memory(answered["memory"], gpu, say)
    _print_time(answered, say)
    say(f"\nbest layouts ({answered['best']['criteria']}; floors, not measured)")
    for one in answered["best"]["layouts"]:
        sizes = ", ".join(f"{name} {one[name]}" for name in ("dp", "tp", "ep", "etp"))
        say(f"  {sizes}: {one['floor_us']:.1f} us, {_gib(one['bytes'])}, {one['all2all']} with {one['experts']}")
    if not answered["best"]["layouts"]:
        say("  none fits")


def _print_memory(memory: dict[str, Any], gpu: dict[str, Any], say: Callable[[str], None]) -> None:
    say("\nmemory of the fullest rank, from shapes")
    shared = ("workspace", "transport")
    for name, size in memory["layer_bytes"].items():
        if size is None:
            say(f"  {name:24} {'not known':>12}  and not in the total")
        else:
            times = "once" if name in shared else f"x {memory['moe_layers']} MoE layers"
            say(f"  {name:24} {_gib(size):>12}  {times}")
    if memory["rest_of_model_bytes"] is None:
        say("  rest of the model        left out: this configuration has MoE layers alone; give a folder or a Hub name")
    else:
        say(
            f"  {'rest of the model':24} {_gib(memory['rest_of_model_bytes']):>12}  attention, embeddings, dense "
            f"layers: whole on each rank, estimated without quantization"
        )
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    say(f"  {'total':24} {_gib(memory['total_bytes']):>12}  of {_gib(gpu['memory_bytes'])} (datasheet): {verdict}")
    if memory["kv_bytes_per_token"]:
        say(
            f"  {'KV cache':24} {memory['kv_bytes_per_token'] / 2**10:.1f} KiB a token, estimated as transformers "
            f"keeps it: room for {memory['kv_tokens_in_what_is_left']} tokens"
        )
    say(f"  not counted: {memory['not_counted']}")


def _print_time(answered: dict[str, Any], say: Callable[[str], None]) -> None:
    time, wire, gpu = answered["layer_time"], answered["wire"], answered["gpu"]
    say("\none routed MoE layer, without router and shared experts")
    if time["floor_us"] is None:
        say(f"  {time['source']}")
        return
    parts = ", ".join(f"{name} {us:.1f}" for name, us in time["floor_parts_us"].items())
    say(f"  floor     {time['floor_us']:.1f} us in turn ({parts}; bound by {time['bound']})")
    say(f"            rates: {gpu['rates']['source']}; between hosts {gpu['nic_bytes_per_s'] / 1e9:g} GB/s")
    say(f"            ({gpu['nic_source']})")
    if time["expected_us"] is None:
        say(f"  expected  {time['source']}")
    else:
        _print_expected(time, say)
    say(
        f"  bytes     {wire['nvlink_bytes_per_call'] / 2**10:.0f} KiB over NVLink and "
        f"{wire['nic_bytes_per_call'] / 2**10:.0f} KiB over its network card reach a rank in a call, both ways"
    )
    cross = answered["crossover"]
    if cross is None:
        say("  network   not used: the EP group is on one host")
        return
    pays = cross["two_level_pays"] + (" tokens per rank on" if cross["two_level_pays"].startswith("from") else "")
    say(
        f"  network   a token takes {cross['flat_us'] * 1e3:.1f} ns if sent to each rank, "
        f"{cross['two_level_us'] * 1e3:.1f} ns in two levels (to each host, then to its ranks)"
    )
    say(
        f"            two levels are faster: {pays}, if they cost {cross['second_level_costs_us']:g} us more "
        f"({cross['source']})"
    )


def _print_expected(time: dict[str, Any], say: Callable[[str], None]) -> None:
    accuracy = time["accuracy"]
    if accuracy["predicted_from"] is None:
        say(f"  expected  {time['expected_us']:.1f} us, measured: this layer (floor x {time['ratio']:.2f})")
        say(f"            {time['source']}")
        return
    launches = f"of which {time['launches_us']:.0f} us for launches, whatever the size"
    say(f"  expected  {time['expected_us']:.1f} us (floor x {time['ratio']:.2f}), {launches}")
    say(f"            {time['source']}")
    if not accuracy["held_back_lines"]:
        say(f"            from {accuracy['predicted_from']}: no measured lines tell how far off that is")
        return
    say(
        f"            from {accuracy['predicted_from']}: within 20 % on {accuracy['within_20_percent']} of "
        f"{accuracy['held_back_lines']} measured lines that were held back, half of them within"
    )
    few = accuracy[f"worst_error_to_{FEW_TOKENS}_tokens"]
    say(
        f"            {accuracy['median_error']:.0%}, the worst {accuracy['worst_error']:+.0%}"
        + ("" if few is None else f", and {few:+.0%} up to {FEW_TOKENS} tokens")
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**10:.1f} KiB"
