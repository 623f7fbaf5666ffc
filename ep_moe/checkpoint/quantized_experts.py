"""Read experts of a checkpoint into a quantized layer: codes of the layer's scheme are kept, others are quantized.

This is decided for each matrix of each expert. Codes of another scheme are dequantized and quantized again only if no
matrix of the block has the layer's scheme, so that the caller chose to change the scheme. A mixture is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_moe.checkpoint.formats import ExpertFormat, Inner, Projection, Projections, Source, named
from ep_moe.checkpoint.halves import concatenate, join_halves
from ep_moe.checkpoint.stored import ALL, StoredMatrix, check_finite
from ep_moe.config import MoEConfig
from ep_moe.quant.schemes import Scheme
from ep_moe.weights.parts import etp_shard

_OTHER = "choose another quantization"
_REMEDY = {"fp8_static": "calibrate with more data, or choose fp8_dynamic"}


def not_calibrated(scheme: Scheme) -> str:
    other = "fp8_dynamic" if scheme.name == "fp8_static" else "mxfp8"
    return (
        f"quantization {scheme.name} needs calibrated input scales, which are not there; "
        f"write them with update_expert, or choose {other}"
    )


def wrong_scheme(found: ExpertFormat, source: Source, block: str, config: MoEConfig, scheme: Scheme) -> str | None:
    """Return why a block cannot be read into a layer of a scheme, or None. Reads headers only."""
    if scheme.plain:
        return None
    experts = [found.projections(source, block, config, expert) for expert in range(config.num_experts)]
    each = [one for projections in experts for one in projections]
    if scheme.activations.calibrated and not any(one.matrix.has_input_scale() for one in each):
        return not_calibrated(scheme)
    if not any(one.matches_scheme(scheme.name) for one in each):
        return not_calibrated(scheme) if scheme.activations.calibrated else None
    wrong = next((wrong for one in experts if (wrong := _wrong_mixture(one, block, scheme)) is not None), None)
    if wrong is None and scheme.activations.calibrated:
        wrong = next((wrong for one in each if (wrong := _wrong_input(one, scheme)) is not None), None)
    return wrong


def matrix_to_requantize(
    found: ExpertFormat, source: Source, block: str, config: MoEConfig, scheme: Scheme
) -> StoredMatrix | None:
    """Return a matrix of a block that must be dequantized and quantized again for a scheme, or None."""
    if scheme.plain:
        return None
    for expert in range(config.num_experts):
        for one in found.projections(source, block, config, expert):
            if one.matrix.quantized and not one.matches_scheme(scheme.name):
                return one.matrix
    return None


def _wrong_mixture(projections: Projections, block: str, scheme: Scheme) -> str | None:
    """Return why an expert cannot be read in a block that has codes of the scheme, or None.

    Its matrices must have the scheme or, if the scheme needs no calibration, be unquantized. If one scale belongs to
    gate and up, they must be stored in the same way.
    """
    for one in projections:
        if one.matches_scheme(scheme.name):
            continue
        if one.matrix.quantized or scheme.activations.calibrated:
            return (
                f"{one.matrix.differs(scheme.name)}; quantization {scheme.name} keeps the bytes of other matrices of "
                f"{block}, and would round these numbers {'anew' if one.matrix.quantized else 'uncalibrated'}: {_OTHER}"
            )
    gate, up, _ = projections
    if gate.matches_scheme(scheme.name) != up.matches_scheme(scheme.name) and not _rows_apart(scheme):
        codes, plain = (gate, up) if gate.matches_scheme(scheme.name) else (up, gate)
        return (
            f"{codes.matrix.tensors.location(codes.matrix.name)} is {codes.matrix.description}, and "
            f"{plain.matrix.name} is {plain.matrix.description}; quantization {scheme.name} has one "
            f"scale for both: {_OTHER}"
        )
    return None


def _wrong_input(one: Projection, scheme: Scheme) -> str | None:
    remedy = _REMEDY.get(scheme.name, "calibrate with more data, or choose another quantization")
    if not one.matrix.has_input_scale():
        wrong: str | None = f"{one.matrix.input_scale_name} is missing; expected shape []"
    else:
        wrong = one.matrix.wrong_input_scale()
    return None if wrong is None else f"{wrong}; quantization {scheme.name} needs it: {remedy}"


def _rows_apart(scheme: Scheme) -> bool:
    """Return whether the scheme has no scale of a whole matrix, so that gate and up are independent."""
    parts = scheme.weights.parts(scheme.weights.unit[0], scheme.weights.unit[1], torch.bfloat16)
    return all(spec.shape for spec in parts.values())


def read_quantized(
    found: ExpertFormat,
    source: Source,
    block: str,
    config: MoEConfig,
    expert: int,
    scheme: Scheme,
    *,
    dtype: torch.dtype,
    device: torch.device,
    etp: tuple[int, int] = (1, 0),
) -> dict[str, Tensor]:
    """Read this etp rank's shard of one expert's canonical tensors in a scheme. Raises CheckpointError.

    Args:
        found: The format of the block's experts.
        source: The checkpoint.
        block: The prefix of the block.
        config: The layer's configuration.
        expert: The logical expert.
        scheme: The layer's scheme.
        dtype: The dtype of activations.
        device: The device that quantizes.
        etp: Size of the etp group, and rank in it.
    """
    size, rank = etp
    share = config.intermediate_size // size
    inner = (rank * share, (rank + 1) * share)
    projections = found.projections(source, block, config, expert)
    gate, up, down = (one.matches_scheme(scheme.name) for one in projections)
    if gate and up and down:
        return found.read_stored(source, block, config, expert, inner, scheme.name)

    def quantised(name: str, numbers: Tensor) -> dict[str, Tensor]:
        """Quantize a whole matrix and return this rank's shard: a scale of the matrix is equal on all etp ranks."""
        numbers = check_finite(f"{block}, expert {expert}, {name}", numbers.to(device))
        parts = named(name, scheme.weights.quantize(numbers, dtype))
        return {part: etp_shard(config, part, tensor, size, rank) for part, tensor in parts.items()}

    if not (gate or up or down):
        whole = found.read(source, block, config, expert, (0, config.intermediate_size))
        rest = {name: etp_shard(config, name, whole[name], size, rank) for name in whole.keys() - {"w13", "w2"}}
        return quantised("w13", whole["w13"]) | quantised("w2", whole["w2"]) | rest
    rows = slice(*inner)
    if gate and up:
        w13 = named("w13", join_halves(projections.gate.codes(rows), projections.up.codes(rows)))
    elif gate or up:
        w13 = _one_half(projections, inner, scheme, dtype, device)
    else:
        w13 = quantised("w13", torch.cat([projections.gate.read_values(), projections.up.read_values()]))
    codes = projections.down.codes(ALL, rows) if down else None
    w2 = quantised("w2", projections.down.read_values()) if codes is None else named("w2", codes)
    return w13 | w2 | found.biases(source, block, config, expert, inner)


def _one_half(
    projections: Projections, inner: Inner, scheme: Scheme, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return w13 if only one of gate and up has the scheme's codes. The other half is quantized on its own."""
    halves = []
    for one in (projections.gate, projections.up):
        if one.matches_scheme(scheme.name):
            halves.append({part: tensor.to(device) for part, tensor in one.codes(slice(*inner)).items()})
        else:
            numbers = check_finite(one.matrix.tensors.location(one.matrix.name), one.read_values(slice(*inner)))
            halves.append(scheme.weights.quantize(numbers.to(device), dtype))
    return named("w13", {part: concatenate(*(half[part] for half in halves)) for part in halves[0]})
