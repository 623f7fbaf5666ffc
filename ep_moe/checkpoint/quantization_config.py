"""Read what a checkpoint's JSON files state about its quantization, and detect quantizations that are not supported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_BITSANDBYTES = "bitsandbytes (4 bits)"
# last component of a tensor's name -> the quantization that writes it, the most specific first
_UNSUPPORTED = {
    "qweight": "AWQ or GPTQ",
    "qzeros": "AWQ or GPTQ",
    "absmax": _BITSANDBYTES,
    "quant_map": _BITSANDBYTES,
    "SCB": "bitsandbytes (LLM.int8)",
    "weight_format": "bitsandbytes (LLM.int8)",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "_data": "quanto",
    "_weight_qdata": "torchao",
    "weight:_data": "torchao",
    "weight_scales": "EETQ",
    "centroids": "VPTQ",
    "dense_weights": "SpQR",
    "weight_quantizer": "Quark",
    "scales": "MLX",
}
_WORDS = ("qweight", "qzeros", "scales")
_CALLED = {
    "auto-round": "AutoRound", "awq": "AWQ", "gptq": "GPTQ", "fp_quant": "FP-Quant", "higgs": "HIGGS", "sinq": "SINQ",
    "metal": "Metal", "gguf": "GGUF",
}  # fmt: skip
_CODES = re.compile(r"(\.q?weight)?(_packed)?$")
_EXPONENTS = re.compile(r"ue8m0|mxfp[48]")
_REORDERS = (True, "group", "dynamic")  # values of compressed-tensors' actorder that store columns out of order
_WHILE_IT_RUNS = ("input", "output")  # locations of rotations that are applied to activations, not to weights


@dataclass(frozen=True)
class DeclaredQuantization:
    """The quantization that a folder declares, from its config.json and hf_quant_config.json.

    method: the name of the quantization, "" if none is stated
    blocks: sizes (rows, columns) of the blocks that share a scale
    bits: bits of packed integers
    groups: number of columns that share a scale in packed integers, 0 for a whole row
    asymmetric: all packed integers have zero points
    symmetric: AWQ and GPTQ: all zero points are the middle of the range; None if not stated
    packing: AWQ and GPTQ: the packing format, "" if not stated
    reordered: the columns of a group are not adjacent
    modules: (pattern of module names, fields that differ for them); the first match applies; packed integers only
    exponents: a scale stored as a byte is a power of two (E8M0)
    float8: the format of 8-bit codes, "" if not stated
    rotated: the field that states rotations of activations, which the weights require; "" for none
    layers: number of hidden layers, None if not stated
    multimodal: the text model is a part of a multimodal model
    """

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    bits: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    asymmetric: bool = False
    symmetric: bool | None = None
    packing: str = ""
    reordered: bool = False
    modules: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    exponents: bool = False
    float8: str = ""
    rotated: str = ""
    layers: int | None = None
    multimodal: bool = False

    def of(self, tensor: str) -> DeclaredQuantization:
        """Return the declaration for one module. tensor: the name of its codes in the file"""
        module = _CODES.sub("", tensor)
        return next((replace(self, **fields) for pattern, fields in self.modules if _fits(pattern, module)), self)

    @property
    def said(self) -> str:
        return f"; config.json states the quantization {self.method!r}" if self.method else ""

    def called(self, words: str) -> str:
        """Return the quantization's name for messages: that of config.json if known, else `words`."""
        return next((called for method, called in _CALLED.items() if method in self.method), words)


def read_declared_quantization(folder: Path) -> DeclaredQuantization:
    """Read the declared quantization of a checkpoint folder.

    Missing or invalid JSON files count as empty: layers do not need them.

    Args:
        folder: The folder of the checkpoint.
    """
    config, exported = _object(folder / "config.json"), _object(folder / "hf_quant_config.json")
    texts = [config]
    for key in ("thinker_config", "text_config"):
        texts += [inner for one in texts if isinstance(inner := one.get(key), dict)]
    keys = ("quantization_config", "compression_config", "quantization")
    found = [one[key] for one in (*texts, exported) for key in keys if isinstance(one.get(key), dict)]
    fields = {key: value for one in found for key, value in one.items()}
    names = [str(fields[key]) for key in ("quant_method", "quant_algo", "format") if fields.get(key)]
    layers = next((number for one in reversed(texts) if (number := one.get("num_hidden_layers")) is not None), None)
    targets = [pair for one in found for pair in _weight_groups(one)]
    groups = [group for _, group in targets]
    sizes = [one.get("weight_block_size") for one in found] + [group.get("block_structure") for group in groups]
    stated = [*names, str(fields.get("scale_fmt", "")), *(str(group.get("format", "")) for group in groups)]
    packed = [group for group in groups if _is_packed(group)]
    words = _words(fields) if {"awq", "gptq"} & set(names) else {}
    packed += [words] if isinstance(words.get("group_size"), int) else []
    bits = [*(group.get("num_bits") for group in groups), words.get("bits")]
    return DeclaredQuantization(
        method=" ".join(dict.fromkeys(names)),
        blocks=tuple(dict.fromkeys(pair for size in sizes if (pair := _pair(size)) is not None)),
        bits=_bits(*bits),
        groups=frozenset(max(0, _whole(group.get("group_size"))) for group in packed),
        asymmetric=bool(packed) and not words and all(group.get("symmetric") is False for group in packed),
        symmetric=words.get("symmetric"),
        packing=words.get("packing", ""),
        reordered=bool(words.get("reordered")),
        modules=(*(_dynamic(fields) if words else ()), *_targeted(targets)),
        exponents=any(_EXPONENTS.search(one.lower()) for one in stated),
        float8=str(fields.get("fmt") or "").lower(),
        rotated=next((field for one in found if (field := _rotated(one))), ""),
        layers=layers if isinstance(layers, int) else None,
        multimodal=len(texts) > 1,
    )


def unsupported_tensors(names: Iterable[str], declared: DeclaredQuantization) -> dict[str, str]:
    """Find tensors of quantizations that are not supported.

    A `qweight`, and `qzeros` and `scales` beside it, are not listed: `AwqMatrix` and `GptqMatrix` check those.

    Args:
        names: The names of all tensors.
        declared: The declared quantization.

    Returns:
        Tensor name -> name of the quantization, the most specific tensor first.
    """
    found: dict[str, str] = {}
    all_names = set(names)
    for name in all_names:
        *_, before, last = ("", *name.split("."))
        mark = before if before == "weight_quantizer" else last
        words = mark in _WORDS and f"{name.removesuffix(mark)}qweight" in all_names
        if mark in _UNSUPPORTED and not words:
            found[name] = mark
    surest = sorted(found.items(), key=lambda item: (list(_UNSUPPORTED).index(item[1]), item[0]))
    return {name: declared.called(_UNSUPPORTED[mark]) for name, mark in surest}


def unsupported_message(what: str, name: str, quantisation: str) -> str:
    return (
        f"{what} is quantized by {quantisation}, which is not read: {name} is there; dequantize the checkpoint to bf16 "
        f"first, or take one in fp8, MXFP4, NVFP4, AWQ, GPTQ or symmetric INT4 of compressed-tensors"
    )


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _weight_groups(found: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the targets and the entry `weights` of each group of compressed-tensors, with the group's format added."""
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            targets = group.get("targets")
            names = [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []
            yield names, group["weights"] | {"format": group.get("format") or ""}


def _is_packed(weights: dict[str, Any]) -> bool:
    return weights.get("type", "int") == "int" and "num_bits" in weights


def _targeted(groups: list[tuple[list[str], dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (pattern, fields) of compressed-tensors' groups: first of module names, then of classes such as Linear."""
    pairs = [(target, weights) for targets, weights in groups for target in targets if _is_packed(weights)]
    for target, weights in sorted(pairs, key=lambda pair: not _names_modules(pair[0])):
        pattern = target.removeprefix("re:") if target.startswith("re:") else f"{re.escape(target)}$"
        yield (
            pattern if _names_modules(target) else "",
            {
                "bits": _bits(weights["num_bits"]),
                "groups": frozenset([max(0, _whole(weights.get("group_size")))]),
                "asymmetric": weights.get("symmetric") is False,
                "reordered": weights.get("actorder") in _REORDERS,
            },
        )


def _names_modules(target: str) -> bool:
    return target.startswith("re:") or "." in target


def _dynamic(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (pattern, fields) of GPTQModel's `dynamic`. The prefix "-:" marks modules that are not quantized."""
    dynamic = fields.get("dynamic")
    for pattern, own in dynamic.items() if isinstance(dynamic, dict) else ():
        whole = _words(fields | own) if isinstance(own, dict) else _words(fields)
        size = whole.pop("group_size")
        changed = {"bits": _bits(whole.pop("bits")), "groups": frozenset([max(0, _whole(size))])}
        yield pattern.removeprefix("-:").removeprefix("+:"), whole | changed


def _fits(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False


def _rotated(found: dict[str, Any]) -> str:
    """Return the field that states rotations of activations (compressed-tensors, GPTQModel), "" for none.

    Rotations of weights only are already part of the stored weights.
    """
    if found.get("rotation"):
        return f"rotation: {found['rotation']!r}"
    transforms = found.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        applied = group.get("apply") if isinstance(group, dict) else None
        places = [one.get("location") for one in applied or () if isinstance(one, dict)]
        if any(place in _WHILE_IT_RUNS for place in places):
            return f"transform_config with location {' and '.join(map(repr, places))}"
    return ""


def _words(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of AWQ and GPTQ under common names. Their writers use several names for each."""
    packings = {str(fields[key]).lower() for key in ("checkpoint_format", "format", "version") if fields.get(key)}
    packings |= {"marlin"} if fields.get("is_marlin_format") else set()
    packings |= {"llm-awq"} if fields.get("backend") == "llm-awq" else set()
    zero_point = fields.get("zero_point")
    return {
        "bits": fields.get("bits", fields.get("w_bit")),
        "group_size": fields.get("group_size", fields.get("q_group_size")),
        "symmetric": fields.get("sym", None if zero_point is None else not zero_point),
        "packing": " and ".join(sorted(packings)),
        "reordered": bool(fields.get("desc_act")),
    }


def _bits(*found: Any) -> frozenset[int]:
    return frozenset(each for each in found if isinstance(each, int))


def _whole(size: Any) -> int:
    return size if type(size) is int else 0


def _pair(size: Any) -> tuple[int, int] | None:
    if not isinstance(size, list | tuple) or len(size) != 2:
        return None
    rows, columns = size
    return (rows, columns) if all(type(one) is int and one > 0 for one in size) else None
