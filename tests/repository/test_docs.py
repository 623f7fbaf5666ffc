"""What documents say of the code is so: the generated page, and links."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_backends_page_is_what_the_classes_state():
    page = runpy.run_path(str(ROOT / "tools" / "backends.py"))["document"]()
    assert (ROOT / "docs" / "reference" / "backends.md").read_text() == page, (
        "python tools/backends.py > docs/reference/backends.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Paths with a folder, in backticks: from the root or within the package."""
    for name in re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|toml|sbatch|sh))`", page.read_text()):
        assert any((base / name).exists() for base in (ROOT, ROOT / "ep_moe", page.parent)), name
