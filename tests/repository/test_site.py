"""The built site. Skipped without mkdocs."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def page_of(site, path):
    name = path.relative_to(DOCS).with_suffix("")
    return (site / (name.parent if name.name == "index" else name) / "index.html").read_text()


def test_pages_have_their_diagrams(site):
    for path in DOCS.rglob("*.md"):
        diagrams = re.findall(r"^```mermaid\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
        built = re.findall(r'<pre class="mermaid"><code>(.*?)</code>', page_of(site, path), re.DOTALL)
        assert [html.unescape(one).strip() for one in built] == [one.strip() for one in diagrams], path


def test_lists_and_tables_are_ones(site):
    """Lists and tables are rendered as such.

    Python-Markdown needs an empty line before a list, and four columns before an item's content.
    """
    for path in DOCS.rglob("*.md"):
        built = re.sub(r"<(pre|code)\b.*?</\1>", "", page_of(site, path), flags=re.DOTALL)
        left = re.findall(r"<p>[^<]*\n(?:- |\d{1,2}\. |\|)[^\n]*", built)
        assert not left, (path, left)


def test_api_pages_have_their_entries(site):
    for path in (DOCS / "reference" / "api").glob("*.md"):
        built = page_of(site, path)
        for name in re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE):
            assert f'id="{name}"' in built, name


def test_examples_are_pages(site):
    for path in (ROOT / "examples").glob("*.py"):
        assert (site / "examples" / path.stem / "index.html").exists(), path
