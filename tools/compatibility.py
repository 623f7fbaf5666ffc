"""Run a part of the tests with several releases of torch on the CPU, each in a virtual environment of its own.

    python tools/compatibility.py                       the oldest supported torch, releases in between, the newest
    python tools/compatibility.py --torch 2.11.0        one release
    python tools/compatibility.py --folder ~/venvs      keep the environments there and reuse them

Prints a table in the form of docs/reference/versions.md. Exits with 1 if a test fails or a release cannot be installed.
A release without a CPU build installs its GPU libraries too: several GB each.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWEST = "newest"
RELEASES = ("2.11.0", "2.12.0", "2.13.0", NEWEST)
TESTS = (
    "tests/unit/test_layer_single.py",
    "tests/unit/router/test_router.py",
    "tests/unit/execution/test_autocast.py",
    "tests/unit/experts/test_experts.py",
    "tests/unit/parallel/test_layout.py",
    "tests/distributed/test_compile.py",
    "tests/distributed/test_layer.py",
    "tests/distributed/test_transformers.py",
    "tests/unit/integrations/test_families.py",
    "tests/unit/integrations/test_transformers.py",
)
_NEEDED = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100")
_SHOWN = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Outcome:
    """The outcome for one release.

    Attributes:
        asked: The release that was asked for.
        found: Versions by package.
        result: pytest's last line, or the reason why there is none.
    """

    asked: str
    found: dict[str, str]
    result: str
    passed: bool
    seconds: float

    def row(self) -> str:
        cells = [self.asked, *(self.found.get(name, "-") for name in _SHOWN), self.result, f"{self.seconds:.0f} s"]
        return f"| {' | '.join(cells)} |"


def check(release: str, folder: Path, tests: list[str]) -> Outcome:
    """Install a release and run the tests with it."""
    start, python = time.monotonic(), folder / release / "bin" / "python"
    wanted = "torch" if release == NEWEST else f"torch=={release}"

    def outcome(result: str, passed: bool = False) -> Outcome:
        return Outcome(release, _versions(python), result, passed, time.monotonic() - start)

    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", folder / release], check=True)
    install = [python, "-m", "pip", "install", "-q", "--upgrade-strategy", "eager", wanted, f"{ROOT}[hf]", *_NEEDED]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        return outcome(f"not installed: {(installed.stderr.strip().splitlines() or ['?'])[-1]}")
    # the tests import this checkout's package, although another copy was installed with its requirements
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout[-6000:] if done.returncode else "")
    counts = re.findall(
        r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.rpartition("\n=")[2] or done.stdout[-200:]
    )
    ran = any("passed" in count for count in counts)
    return outcome(", ".join(counts) or f"pytest ended with {done.returncode}", done.returncode == 0 and ran)


def _versions(python: Path) -> dict[str, str]:
    ask = "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", ask, *_SHOWN], capture_output=True, text=True, check=False)
    return dict(zip(_SHOWN, done.stdout.split(), strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=RELEASES, metavar="RELEASE", help=f"or {NEWEST}")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files of tests")
    parser.add_argument("--folder", type=Path, help="where environments are kept; default: nowhere")
    asked = parser.parse_args()
    wrong = [release for release in asked.torch if release != NEWEST and not re.fullmatch(r"\d+\.\d+(\.\d+)?", release)]
    if wrong:
        parser.error(f"--torch must be releases such as 2.11.0, or {NEWEST}, got {', '.join(wrong)}")
    missing = [test for test in asked.tests if not (ROOT / test.partition("::")[0]).exists()]
    if missing:
        parser.error(f"--tests {', '.join(missing)} do not exist in {ROOT}")
    with nullcontext(asked.folder) if asked.folder else tempfile.TemporaryDirectory() as folder:
        print(f"| asked | {' | '.join(_SHOWN)} | tests | time |\n|{'---|' * (len(_SHOWN) + 3)}")
        outcomes = []
        for release in asked.torch:
            outcomes.append(check(release, Path(folder).absolute(), asked.tests))
            print(outcomes[-1].row(), flush=True)
    sys.exit(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    main()
