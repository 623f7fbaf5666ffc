"""What documents say about the code is true: the generated page, links, files, names and options."""

import functools
import pkgutil
import re
import runpy
from pathlib import Path
from typing import get_args

import pytest
import typer

from ep_moe.cli.app import app
from ep_moe.registry import Kind

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # the changelog names former files too


TESTS = {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as Python-Markdown makes them, and its `<a id>`."""
    text, found = without_code(page), set[str]()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        anchor, number = re.sub(r"[-\s]+", "-", words), 0
        while (name := f"{anchor}_{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found | set(re.findall(r'<a id="([^"]+)"', text))


def test_backends_page_is_what_the_classes_state():
    page = runpy.run_path(str(ROOT / "tools" / "backends.py"))["document"]()
    assert (ROOT / "docs" / "reference" / "backends.md").read_text() == page, (
        "python tools/backends.py > docs/reference/backends.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Links lead to existing files, and to existing headings."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", without_code(page)):
        if not target.startswith(("http", "mailto")):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Paths with a folder, in backticks, exist from the root or within the package; so do test files named alone."""
    for name in re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|toml|sbatch|sh))`", page.read_text()):
        assert any((base / name).exists() for base in (ROOT, ROOT / "ep_moe", page.parent)), name
    for name in re.findall(r"(?<![\w/])test_\w+\.py\b", page.read_text()) if page in PRESENT else ():
        assert name in TESTS or f'title="{name}"' in page.read_text(), name


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_lines_of_prose_have_at_most_120_characters(page):
    """Lines of prose have at most 120 characters, except tables, code, lines with links, and API pages."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in prose.splitlines() if "api" not in page.parts else ():
        assert len(line) <= 120 or line.startswith("|") or "](" in line, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_diagrams_have_no_semicolon(page):
    """Mermaid diagrams have no semicolon, which would end a statement and break the drawing."""
    for block in re.findall(r"^```mermaid\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        assert ";" not in block, block


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_names_of_the_package_exist(page):
    """Paths `ep_moe/...`, dotted names of the package, and modules after -m exist."""
    text = page.read_text()
    for path in re.findall(r"`(ep_moe/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    groups = {f"ep_moe.{kind}" for kind in get_args(Kind)}  # names of entry point groups
    for name in {*re.findall(r"`(ep_moe(?:\.\w+)+)", text), *re.findall(r"-m (ep_moe(?:\.\w+)*)", text)} - groups:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_options_of_commands_exist(page):
    """Options after `ep-moe NAME` or `-m ep_moe NAME` exist. Benchmarks, which have their own, are left out."""
    commands = typer.main.get_command(app).commands
    text = page.read_text().replace("\\\n", " ")
    for name, arguments in re.findall(r"(?:ep-moe|-m ep_moe) (\w[\w-]*)([^`\n#]*)", text):
        options = set(re.findall(r"(?<!\S)(--[a-z-]+)", arguments))
        if options and name != "bench":
            known = {option for parameter in commands[name].params for option in parameter.opts}
            assert options <= known, (name, options - known)
