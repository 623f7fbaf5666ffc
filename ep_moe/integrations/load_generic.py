"""Loading of models whose experts alone are replaced: experts of this rank, the rest as transformers loads it."""

from __future__ import annotations

import warnings
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ep_moe.checkpoint.conversion import in_file
from ep_moe.checkpoint.kept import wrong_scheme
from ep_moe.checkpoint.model_files import ExpertFiles, load_skeleton
from ep_moe.checkpoint.reader import quantised_again, read_experts
from ep_moe.checkpoint.source import CheckpointSource
from ep_moe.checkpoint.unread import listed
from ep_moe.errors import CheckpointError
from ep_moe.integrations.find_experts import find_experts
from ep_moe.integrations.generic import ExpertParallelExperts


def model_files(model: Any, folder: Path) -> ExpertFiles:
    """The files of a model that is on the meta device, whole. Raises CheckpointError."""
    layouts = {name: found.layout for name, found in find_experts(model).items()}
    return ExpertFiles(model, CheckpointSource(folder, called=in_file), layouts)


def load_model(
    model: Any,
    files: ExpertFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool,
    fresh: Set[str] = frozenset(),
) -> set[str]:
    """Load a model whose experts were replaced, both on the meta device.

    Args:
        model: its experts modules are `ExpertParallelExperts`, which hold this rank's experts.
        files: of the model as it was before.
        device: where all of it goes.
        dtype: of the model.
        progress: show a bar on rank 0.
        fresh: names that the files may not have.

    Returns:
        Those of `fresh` that the files have not.

    Raises:
        CheckpointError: on this rank; call it under `reader.loading`.
    """
    replaced = {name: one for name, one in model.named_modules() if isinstance(one, ExpertParallelExperts)}
    assert replaced.keys() == files.modules.keys(), "experts of the files and of the model differ"
    _check(replaced, files)
    for one in replaced.values():
        one.moe.to_empty(device=device)
    apart = [f"{name}.moe" for name in replaced]
    missing = load_skeleton(model, files, apart, device=device, dtype=dtype, fresh=fresh)
    first = next(iter(replaced.values())).moe.context.layout.place == 0
    total = sum(len(one.local_experts) for one in replaced.values())
    with tqdm(total=total, unit="expert", desc="experts", disable=None if progress and first else True) as bar:
        for name, one in replaced.items():
            _fill(one, name, files, bar)
    return missing


def _check(replaced: dict[str, ExpertParallelExperts], files: ExpertFiles) -> None:
    """What the layers ask for, from headers alone; one warning of what is left out or rounded again."""
    plan = [(replaced[name].moe, *known) for name, known in files.formats.items() if known is not None]
    for layer, block, form in plan:
        wrong = form.wrong(files.source, block, layer.config)
        wrong = wrong or wrong_scheme(form, files.source, block, layer.config, layer.expert_weights.scheme)
        if wrong is not None:
            raise CheckpointError(wrong)
    said = quantised_again(files.source, plan)
    if files.left_out:
        said.append(f"{listed(files.left_out)} is not loaded: {type(files.model).__name__} has no such weights")
    if said:
        warnings.warn(f"{files.source.folder}: {'; '.join(said)}", stacklevel=2)


@torch.no_grad()
def _fill(one: ExpertParallelExperts, name: str, files: ExpertFiles, bar: Any) -> None:
    known = files.formats[name]
    if known is not None:
        read_experts(one.moe, files.source, *known, bar)
        return
    for expert in one.local_experts:
        one.write_expert(expert, files.read(name, expert))
        bar.update(1)
