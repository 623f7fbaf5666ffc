"""Version, supported versions and templates agree in all places."""

import re
import tomllib
from pathlib import Path

import pytest

import ep_moe
from ep_moe.runtime.versions import IN_PART, ON_CPU, ON_GPUS

ROOT = Path(__file__).parents[2]
MINOR = ep_moe.__version__.rpartition(".")[0]


def read(name):
    return (ROOT / name).read_text()


def test_the_version_is_one():
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", read("CHANGELOG.md"), re.M)
    assert newest[1] == ep_moe.__version__
    assert re.search(r"^version: (.*)$", read("CITATION.cff"), re.M)[1] == ep_moe.__version__
    assert re.search(r"^\| ([\d.]+) \| yes \|$", read("SECURITY.md"), re.M)[1] == MINOR
    assert "version" in tomllib.loads(read("pyproject.toml"))["project"]["dynamic"], "in ep_moe/_version.py alone"


def test_new_entries_have_a_place():
    assert read("CHANGELOG.md").index("## [Unreleased]\n") < read("CHANGELOG.md").index(f"## [{ep_moe.__version__}]")


def test_the_table_of_versions_is_what_doctor_says():
    rows = dict(re.findall(r"^\| ([\w-]+) \|(.*)\|$", read("docs/reference/versions.md"), re.M))
    for package in {*ON_GPUS, *ON_CPU, *IN_PART}:
        cells = [cell.strip() for cell in rows[package].split("|")]
        known = [", ".join(lists.get(package, ())) for lists in (ON_GPUS, ON_CPU, IN_PART)]
        assert cells[1:] == known, package


def test_the_table_requires_what_the_project_does():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    asked = [
        *project["dependencies"],
        *[one for extra in ("hf", "gpu") for one in project["optional-dependencies"][extra]],
    ]
    least = dict(one.split(">=") for one in asked if ">=" in one) | {"Python": project["requires-python"][2:]}
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([^|]*) \|", read("docs/reference/versions.md"), re.M))
    for package in ("Python", "torch", "transformers", "flashinfer-python"):
        lowest, _, below = least[package].partition(",<")
        assert rows[package].startswith(f"{lowest} or newer{f', below {below}' * bool(below)}"), package


@pytest.mark.parametrize("name", ["bug_report.yml", "feature_request.yml"])
def test_issue_templates(name):
    """Issue templates have the keys that GitHub requires, distinct ids, and known types."""
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{name}"))
    assert {"name", "description", "body"} <= set(form)
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    for item in form["body"]:
        assert item["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert "value" in item["attributes"] if item["type"] == "markdown" else item["attributes"]["label"]
        if item["type"] == "dropdown":
            assert len(set(item["attributes"]["options"])) > 1


def test_citation_has_what_the_format_wants():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(found)
    assert found["license"] == tomllib.loads(read("pyproject.toml"))["project"]["license"]


def test_the_tests_of_the_compatibility_check_exist():
    text = read("tools/compatibility.py")
    named = re.findall(r'"(tests/[\w/]+\.py)"', text)
    assert len(named) == 10
    assert all((ROOT / name).is_file() for name in named)
    least = re.search(r"torch>=([\d.]+)", read("pyproject.toml"))[1]
    assert f'RELEASES = ("{least}.0",' in text
