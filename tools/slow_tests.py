"""Choose the tests that plain `pytest` leaves to `pytest -m slow`: `tests/slow_tests.txt`.

    python -m tools.slow_tests measure FOLDER     runs all tests once over marked code: half an hour on 2 cores
    python -m tools.slow_tests choose FOLDER      writes the list

A run of all tests keeps:

- every test of at most `ALWAYS` seconds,
- the shortest case of each test function of at most `FUNCTION` seconds,
- then, greedily by blocks per second, tests that reach a block of `ep_moe` that the tests above do not reach.

A block is a body of a function, a branch or a loop. It is worth at most `BLOCK` seconds.
"""

from __future__ import annotations

import argparse
import ast
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow_tests.txt"
ALWAYS, FUNCTION, BLOCK = 0.3, 2.5, 2.0


class _Marked(ast.NodeTransformer):
    """Insert a call of `reach` at the beginning of each block."""

    def __init__(self) -> None:
        self.blocks = 0

    def _begin(self, body: list[ast.stmt], *, docstring: bool = False) -> list[ast.stmt]:
        mark = ast.parse(f"_reach({self.blocks})").body[0]
        self.blocks += 1
        first = body[0]
        behind = docstring and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return [*body[:behind], mark, *body[behind:]]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return node  # Triton reads its source
        self.generic_visit(node)
        node.body = self._begin(node.body, docstring=True)
        return node

    def _visit_body(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body = self._begin(node.body)
        return node

    visit_For = visit_While = visit_ExceptHandler = visit_match_case = _visit_body  # noqa: N815

    def visit_If(self, node: ast.If) -> Any:
        self._visit_body(node)
        if node.orelse:
            node.orelse = self._begin(node.orelse)
        return node


def mark(package: Path) -> int:
    """Insert marks into a package's code. Return their number."""
    marked = _Marked()
    for file in sorted(package.rglob("*.py")):
        before, tree = marked.blocks, ast.parse(file.read_text())
        tree = marked.visit(tree)
        if marked.blocks > before:
            is_header = [
                (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                or (isinstance(line, ast.ImportFrom) and line.module == "__future__")
                for line in tree.body
            ]
            header = is_header.index(False)
            tree.body.insert(header, ast.parse("from tools.reached import reach as _reach").body[0])
            file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return marked.blocks


def measure(folder: Path, files: list[str]) -> None:
    """Run tests over a marked copy of the files in git's index."""
    copy = folder / "copy"
    copy.mkdir(parents=True)
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={copy}/"], cwd=ROOT, check=True)
    print(f"{mark(copy / 'ep_moe')} blocks")
    records = folder / "records"
    records.mkdir()
    environment = os.environ | {"PYTHONPATH": str(copy), "EP_MOE_REACHED": str(records)}
    options = ["-q", "-p", "tools.reached", "-n", "2", "--dist", "worksteal", *(files or ["tests"])]
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=copy, env=environment, check=False)


def measured(records: Path) -> tuple[dict[str, float], dict[str, set[int]]]:
    """Return the seconds of each test, and the blocks that it reached."""
    seconds, reached = dict[str, float](), defaultdict[str, set[int]](set)
    for file in records.glob("seconds.*"):
        for line in file.read_text().splitlines():
            taken, _, test = line.partition(" ")
            seconds[test] = float(taken)
    for file in records.glob("reached.*"):
        with file.open("rb") as opened:
            while opened.peek(1):
                test, blocks = pickle.load(opened)
                reached[test] |= set(blocks)
    return seconds, reached


def choose(seconds: Mapping[str, float], reached: Mapping[str, set[int]]) -> set[str]:
    """Return the tests that a run of all tests leaves out."""
    cases = defaultdict[str, list[str]](list)
    for test in seconds:
        cases[test.partition("[")[0]].append(test)
    shortest = {min(tests, key=seconds.__getitem__) for tests in cases.values()}
    slow = {test for test in seconds if seconds[test] > (FUNCTION if test in shortest else ALWAYS)}
    missing = set[int]().union(*(reached[test] for test in slow))
    missing -= set[int]().union(*(reached[test] for test in seconds.keys() - slow))
    while missing:
        best = max(slow, key=lambda test: len(reached[test] & missing) / seconds[test])
        if seconds[best] > BLOCK * len(reached[best] & missing):
            break
        slow.discard(best)
        missing -= reached[best]
    return slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["measure", "choose"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="tests to measure; all by default")
    asked = parser.parse_args()
    if asked.step == "measure":
        measure(asked.folder.resolve(), asked.files)
        return
    seconds, reached = measured(asked.folder / "records")
    slow = choose(seconds, reached)
    LIST.write_text("".join(f"{test}\n" for test in sorted(slow)))
    taken = sum(seconds[test] for test in slow)
    print(f"{len(slow)} of {len(seconds)} tests, {taken:.0f} of {sum(seconds.values()):.0f} s")


if __name__ == "__main__":
    main()
