"""Test `ep-moe doctor`'s lines about versions and GPUs, and the cluster report as text, JSON and exit code."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ep_moe.cli import doctor
from ep_moe.cli.app import app
from ep_moe.cli.cluster import ClusterReport
from ep_moe.cli.cluster_facts import RankFacts
from ep_moe.parallel.nodes import NodeLayout


def nodes_of(hosts):
    return NodeLayout.from_hosts(range(len(hosts)), [(str(host), f"host{host}") for host in hosts])


def report_of(hosts, **fields):
    nodes = nodes_of(hosts)
    facts = [
        RankFacts(rank, rank % 2, ("", ""), {"torch": "2.11"}, shown={"free": f"{rank} GiB"}) for rank in nodes.ranks
    ]
    rates = dict.fromkeys(combinations(nodes.ranks, 2), 9.0)
    return ClusterReport(**{"odd": [], "facts": facts, "nodes": nodes, "backend": "gloo", "rates": rates} | fields)


@pytest.mark.parametrize(("ranks", "matrix"), [(1, False), (2, True), (16, True), (17, False)])
def test_rates_of_up_to_16_ranks_are_a_matrix(ranks, matrix):
    titles = [title for title, *_ in doctor.tables(report_of([0] * ranks))]
    assert ("GB/s each way over gloo" in titles) is matrix


@pytest.mark.parametrize(("hosts", "matrix"), [(1, False), (2, True), (16, True), (17, False)])
def test_rates_of_up_to_16_hosts_are_a_matrix(hosts, matrix):
    titles = [title for title, *_ in doctor.tables(report_of(range(hosts)))]
    assert ("GB/s each way between hosts, all ranks at once" in titles) is matrix


def test_a_row_of_each_rank_has_its_facts_of_the_moment():
    report = report_of([0, 0, 1, 1])
    report.facts[3] = replace(report.facts[3], shown={})
    _, columns, rows = doctor.tables(report)[1]
    assert columns == ["", "host", "local", "free", "within hosts", "between hosts"]
    assert rows[1] == ["rank 1", "host0", "1", "1 GiB", "9", "9"]
    assert rows[3] == ["rank 3", "host1", "1", "", "9", "9"]


def test_a_rank_has_the_median_of_its_links():
    nodes = nodes_of([0] * 4)
    rates = {(0, 1): 1.0, (0, 2): 5.0, (0, 3): 9.0, (1, 2): 2.0, (1, 3): 2.0, (2, 3): 2.0}
    rows = doctor.tables(report_of([0] * 4, rates=rates, nodes=nodes))[1][2]
    assert rows[0][-2:] == ["5", "-"], "and none has a link to another host"


def test_a_value_that_all_ranks_have_is_said_of_all():
    (_, _, rows), *_ = doctor.tables(report_of([0, 0, 1]))
    assert rows == [["torch", "2.11", "all 3 ranks"]]


def test_a_cluster_whose_ranks_never_came_has_no_tables():
    report = ClusterReport(["rank 1 did not come"])
    assert doctor.tables(report) == []
    assert doctor.lines(report) == ["odd: rank 1 did not come"]


@pytest.mark.parametrize(
    ("hosts", "line"), [([0], "1 rank on 1 host"), ([0, 0], "2 ranks on 1 host"), ([0, 1], "2 ranks on 2 hosts")]
)
def test_a_sound_cluster_is_said_to_be(hosts, line):
    assert doctor.lines(report_of(hosts)) == [f"sound: {line}"]


def invoked(monkeypatch, report, *words, rank="0"):
    """Run the command on the rank that shows the report. Return its result and the deadlines that it used."""
    asked = []

    def run(deadline_s, show):
        asked.append(deadline_s)
        show(report)
        return report

    monkeypatch.setattr(doctor, "run_cluster", run)
    result = CliRunner().invoke(app, ["doctor", "--cluster", *words], env={"RANK": rank}, catch_exceptions=False)
    return result, asked


@pytest.mark.parametrize(("odd", "code"), [([], 0), (["rank 1"], 1)])
def test_the_exit_code_says_whether_a_cluster_is_sound(odd, code, monkeypatch):
    result, asked = invoked(monkeypatch, report_of([0, 0], odd=odd), "--deadline", "7")
    assert (result.exit_code, asked) == (code, [7.0])
    assert result.stdout.splitlines()[-1] == ("odd: rank 1" if odd else "sound: 2 ranks on 1 host")


def test_any_rank_may_show_the_report(monkeypatch):
    """Any rank may show the report, because rank 0 may never have come."""
    assert "sound: 2 ranks on 1 host" in invoked(monkeypatch, report_of([0, 0]), rank="1")[0].stdout


def test_a_report_as_json_has_its_facts_and_rates(monkeypatch):
    found = json.loads(invoked(monkeypatch, report_of([0, 0], odd=["rank 1"]), "--json")[0].stdout)
    assert (found["odd"], found["backend"]) == (["rank 1"], "gloo")
    assert found["rates"] == [{"ranks": [0, 1], "gb_per_s": 9.0}]
    assert [fact["rank"] for fact in found["facts"]] == [0, 1]


# --- one machine ----------------------------------------------------------------------------------------------------


def test_every_gpu_is_a_line(monkeypatch):
    monkeypatch.setattr(doctor, "gpus", lambda: ["0: H200", "1: H200"])
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert [line for line in lines if "GPU " in line and "H200" in line] == ["GPU 0: H200", "GPU 1: H200"]
    assert "no GPU" not in lines


def test_what_is_not_installed_is_said_to_be(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "triton" else "1.0")
    found = doctor.versions()
    assert (found["triton"], found["numpy"]) == ("not installed", "1.0")


@pytest.mark.parametrize(
    ("version", "known", "warned"), [("3.6", True, False), ("9.9", False, True), (None, False, False)]
)
def test_a_triton_whose_launcher_is_not_known_is_slower(version, known, warned, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    monkeypatch.setattr(doctor, "how_run", lambda package, version: "run")
    monkeypatch.setattr(doctor, "launcher_known", lambda version: known)
    found = doctor.runs()
    assert ("its launcher is not known" in found["triton"]) is warned
    assert {"torch", "transformers"} <= found.keys()


@pytest.mark.parametrize(
    ("maps", "where"),
    [
        ("7f00 r-xp 0 /lib/b/libnccl.so.2\n7f01 r-xp 0 /lib/a/libnccl.so.2\n7f02 r-xp 0 /lib/b/libnccl.so.2\n",
         "/lib/a/libnccl.so.2, /lib/b/libnccl.so.2"),
        ("7f00 r-xp 0 /lib/libtorch.so\n", "linked into torch"),
    ],
    ids=["files", "in torch"],
)  # fmt: skip
def test_the_nccl_that_is_loaded_has_its_file(maps, where, monkeypatch):
    """The loaded NCCL library is shown with its file. Each file is named once, and two files show a conflict."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: maps)
    assert doctor._nccl() == f"2.28.3 ({where})"


def test_fused_kernels_are_among_the_backends():
    assert {kind for kind, *_ in doctor.backends()} == {"dispatchers", "experts", "fused"}
