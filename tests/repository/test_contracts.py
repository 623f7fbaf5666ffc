"""The import contract of backend files names every backend that the registry has."""

import tomllib
from pathlib import Path

from ep_moe import registry

ROOT = Path(__file__).parents[2]


def test_no_backend_file_is_left_unguarded():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    guarded = next(c["forbidden_modules"] for c in contracts if "backend file" in c["name"])
    own = {
        registry.targets(kind)[name].partition(":")[0]
        for kind in ("dispatchers", "experts", "fused")
        for name in registry.built_in(kind)
    }
    assert own == set(guarded)
