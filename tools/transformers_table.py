"""Write docs/reference/transformers_models.md: every MoE model type of the installed transformers, tiny, on gloo
ranks.

python -m tools.transformers_table > docs/reference/transformers_models.md
python -m tools.transformers_table --part today     # what CI runs: a part of the model types, against the page

Each model is built with random weights and run by itself, then with `expert_parallel`, in float32 on the CPU. Its
logits must equal those of the model itself up to TOLERANCE of the largest. For comparison, transformers' own expert
parallelism (`DistributedConfig(ep_size=...)`) runs on the same model. Model types given as arguments run alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers

from ep_moe import EPContext
from ep_moe.errors import EPMoEError
from ep_moe.integrations.families import FAMILIES
from ep_moe.integrations.transformers import expert_parallel
from ep_moe.parallel.local_launch import run_local_ranks
from tests.fixtures.transformers_models import TEXT_ALONE, moe_model_types, outcome, tiny_ids, tiny_transformers_model

TOLERANCE = 1e-5
RANKS = (1, 2, 4)
THEIRS = 2  # the number of ranks for transformers' own expert parallelism
RIGHT, NONE = "right", "none"
PAGE = Path(__file__).parents[1] / "docs/reference/transformers_models.md"
PARTS = 12  # parts of the model types; CI runs one each day
_DEADLINE_S = 1500.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Every MoE model type of transformers, run tiny on gloo ranks.")
    parser.add_argument("kinds", nargs="*", help="model types that are run alone")
    parser.add_argument("--part", help=f"today, or 0 to {PARTS - 1}: compare every {PARTS}th type with the page")
    asked = parser.parse_args()
    if asked.part is not None:
        today = datetime.datetime.now(tz=datetime.UTC).toordinal()
        sys.exit(check_part((today if asked.part == "today" else int(asked.part)) % PARTS))
    kinds = asked.kinds or moe_model_types()
    built = {kind: found for kind, found in verdicts("built", 1, kinds).items() if found != NONE}
    models = [kind for kind, found in built.items() if found == RIGHT]
    ours = {ranks: verdicts("ours", ranks, models) for ranks in RANKS}
    theirs = verdicts("theirs", THEIRS, models)
    print(page(built, ours, theirs), end="")


def check_part(part: int) -> int:
    """Run a part of the model types on 1 and 2 ranks. Return 1 if a verdict differs from the page's."""
    cells = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    expected = {row[0].strip("| `"): row[1] for row in cells}
    kinds = [kind for kind in moe_model_types()[part::PARTS] if expected.get(kind, RIGHT) != "not run"]
    built = verdicts("built", 1, [kind for kind in kinds if kind not in expected])
    kinds = [kind for kind in kinds if built.get(kind, RIGHT) == RIGHT]
    print(f"part {part} of {PARTS} (--part {part} repeats it): {', '.join(kinds)}")
    wrong = []
    for ranks in RANKS[:2]:
        for kind, verdict in verdicts("ours", ranks, kinds).items():
            allowed = {expected[kind]} if kind in expected else {RIGHT, "refused"}  # types of a newer transformers
            if verdict.partition(": ")[0] not in allowed:
                wrong.append(f"{kind} on {ranks}: {verdict}, expected {' or '.join(sorted(allowed))}")
    print("\n".join(wrong) or "all as on the page")
    return int(bool(wrong))


def verdicts(what: str, ranks: int, kinds: list[str]) -> dict[str, str]:
    """Return verdicts by model type. A run that ends early continues after the model that ended it."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.jsonl"
        while left := [kind for kind in kinds if kind not in found]:
            arguments = {"what": what, "kinds": left, "file": str(file)}
            try:
                run_local_ranks(f"{__spec__.name}:run", ranks, arguments, deadline_s=_DEADLINE_S)
            except Exception as error:
                last = str(error).strip().splitlines()[-1]
                found |= dict(_read(file))
                stopped = next((kind for kind in left if kind not in found), None)
                if stopped is not None:
                    found[stopped] = f"fails: {last}"
                continue
            found |= dict(_read(file))
            for kind in left:
                found.setdefault(kind, "fails: no answer")
        return {kind: found[kind] for kind in kinds}


def _read(file: Path) -> list[tuple[str, str]]:
    lines = file.read_text().splitlines() if file.is_file() else []
    return [(one["kind"], one["verdict"]) for one in map(json.loads, lines)]


def run(what: str, kinds: list[str], file: str) -> None:
    """Run each model in turn on a rank. Rank 0 writes the verdicts."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    compute = {"built": _built, "ours": _ours, "theirs": _theirs}[what]
    for kind in kinds:
        verdict = compute(kind)
        print(f"{what} on {dist.get_world_size()}: {kind} {verdict}", file=sys.stderr, flush=True)
        if dist.get_rank() == 0:
            with Path(file).open("a") as out:
                out.write(json.dumps({"kind": kind, "verdict": verdict}) + "\n")


def _built(kind: str) -> str:
    """Return whether transformers runs the tiny model; `none` if it has no experts."""
    try:
        model = tiny_transformers_model(kind)
        experts = any("expert" in name or "router" in name for name, _ in model.named_parameters())
        return (RIGHT if outcome(model, tiny_ids()).isfinite().all() else "not finite") if experts else NONE
    except Exception as error:
        return f"not built: {_short(error)}"


def _ours(kind: str) -> str:
    model, ids = tiny_transformers_model(kind), tiny_ids()
    expected = outcome(model, ids)
    with EPContext.from_groups(device=torch.device("cpu")) as context:
        try:
            expert_parallel(model, context)
        except EPMoEError as error:
            return f"refused: {_short(error)}"
        return _compared(lambda: outcome(model, ids), expected)


def _theirs(kind: str) -> str:
    from transformers.distributed import DistributedConfig

    model, ids, ranks = tiny_transformers_model(kind), tiny_ids(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(type(model), "should_save_on_this_rank", return_value=True):  # ranks have own folders
            model.save_pretrained(folder)
        expected = outcome(type(model).from_pretrained(folder).eval(), ids)  # unsaved ones: new
        try:
            config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
            parallel = type(model).from_pretrained(folder, distributed_config=config).eval()
        except Exception as error:
            return f"refused: {_short(error)}"
        cut = [one for name, one in parallel.named_parameters() if "experts" in name and hasattr(one, "device_mesh")]
        if not any("ep" in (one.device_mesh.mesh_dim_names or ()) for one in cut):
            return "refused: no experts are spread over ranks"
        try:
            return _compared(lambda: outcome(parallel, ids), expected)
        except Exception as error:
            return f"fails: {_short(error)}"


def _compared(compute: Callable[[], torch.Tensor], expected: torch.Tensor) -> str:
    found = compute()
    apart = float((found - expected).abs().max() / expected.abs().max())
    return RIGHT if apart <= TOLERANCE else f"wrong: {apart:.0e}"


def _short(error: Exception) -> str:
    """Return the error's first clause, without rank or module."""
    text = " ".join(str(error).split()).replace("|", "/")
    text = text.split("; ")[0]
    return text if len(text) <= 140 else f"{text[:137]}..."


def page(built: dict[str, str], ours: dict[int, dict[str, str]], theirs: dict[str, str]) -> str:
    """Return the document."""
    rows = []
    for kind, why in built.items():
        if why != RIGHT:
            rows.append([f"`{kind}`", *["not run"] * (len(RANKS) + 2), why.removeprefix("not built: ")])
            continue
        found = [ours[ranks][kind] for ranks in RANKS]
        reasons = {one.partition(": ")[2] for one in found} - {""}
        reasons |= {"the text model: transformers cannot run the whole"} if kind in TEXT_ALONE else set()
        way = "block" if kind.removesuffix("_text") in {name.removesuffix("_text") for name in FAMILIES} else "experts"
        own = theirs[kind].partition(": ")[0]
        rows.append([f"`{kind}`", *(one.partition(": ")[0] for one in found), way, own, " ".join(sorted(reasons))])
    head = ["model type", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS), "replaced", "their own", "reason"]
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join([*_intro(built, ours, theirs), *lines, ""])


def _intro(built: dict[str, str], ours: dict[int, dict[str, str]], theirs: dict[str, str]) -> list[str]:
    def count(found: dict[str, str]) -> str:
        counts = Counter(verdict.partition(": ")[0] for verdict in found.values())
        return ", ".join(f"{number} {verdict}" for verdict, number in counts.items())

    return [
        "# MoE models of transformers",
        "",
        f"Every MoE model type of transformers {transformers.__version__}, built tiny with random weights, in float32",
        "on gloo ranks of one CPU host. This page is the output of `python -m tools.transformers_table`.",
        f"CI runs a {PARTS}th of the types, another each day, on 1 and 2 ranks (`--part today`), and compares the",
        "verdicts with this page.",
        "",
        f"- **right**: logits differ from those of the model itself by at most {TOLERANCE:g} of the largest.",
        "- **refused**: `expert_parallel` raises an error that gives the reason. No model is changed.",
        "- **replaced**: the whole MoE block of a known family, or the experts alone.",
        '- **their own**: transformers\' `DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all")`',
        "  on 2 ranks, on the same model saved and read again. **wrong** here: logits differ by more;",
        "  **fails**: the call raises. The causes were not looked into.",
        "- **not run**: transformers does not build or run the model at this size with the settings of this tool.",
        "",
        *(f"- {ranks} rank{'s' * (ranks > 1)}: {count(found)}" for ranks, found in ours.items()),
        f"- their own: {count(theirs)}",
        f"- not run: {sum(why != RIGHT for why in built.values())}",
        "",
    ]


if __name__ == "__main__":
    main()
