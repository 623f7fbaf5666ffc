"""Hooks of `mkdocs build`: pages of files outside docs/, and a place in the navigation for pages that it leaves out.

- Each Python file of examples/ becomes the page `examples/NAME.md`. CONTRIBUTING.md and CHANGELOG.md become pages too.
- A link to such a file leads to its page. A link to another file outside docs/ becomes plain text, because the site has
  no such file.
- A page that `nav` does not name is added to the end of the section of its folder.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SECTIONS = {
    "Tutorials": "docs/tutorials",
    "How-to": "docs/how-to",
    "Reference": "docs/reference",
    "Explanation": "docs/explanation",
}
FENCES = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")


def examples() -> dict[str, str]:
    """Map each file, relative to the root, to its page, relative to docs/."""
    return {
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).with_suffix(".md").as_posix()
        for path in sorted((ROOT / "examples").rglob("*.py"))
        if path.name != "__init__.py" and "build" not in path.parts
    }


def generated() -> dict[str, str]:
    return examples() | DOCUMENTS


def shown(path: str) -> str:
    """Return the page of a file."""
    text = (ROOT / path).read_text()
    if path in DOCUMENTS:
        return text
    return f"# `{path}`\n\n```python\n{text.rstrip()}\n```\n"


def with_links(text: str, folder: str, page: str) -> str:
    """Rewrite the links of a file in `folder` (from the root) for `page` (from docs/)."""

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("docs/"):
            inside = path.removeprefix("docs/")
        elif path in generated():
            inside = generated()[path]
        elif path == "examples/plugin":
            inside = "how-to/backend.md"
        else:
            return label
        if page == inside:
            return f"[{label}](#{anchor})" if anchor else label
        relative = posixpath.relpath(inside, posixpath.dirname(page) or ".")
        return f"[{label}]({relative}{'#' + anchor if anchor else ''})"

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in FENCES.split(text))


def on_config(config: Any) -> Any:
    """Add pages that `nav` leaves out to the section of their folder."""
    named = set(re.findall(r"[\w./-]+\.md", str(config["nav"])))
    for section in config["nav"]:
        ((title, entries),) = section.items()
        if title in SECTIONS:
            pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / SECTIONS[title]).rglob("*.md")]
            entries += sorted(page for page in pages if page not in named)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    for path, page in generated().items():
        files.append(File.generated(config, page, content=with_links(shown(path), posixpath.dirname(path), page)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri in generated().values():
        return markdown
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return with_links(markdown, folder, page.file.src_uri)
