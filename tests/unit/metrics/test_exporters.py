"""Test the exporters of a snapshot with the libraries' own parsers: Prometheus, TensorBoard, OpenTelemetry, Grafana."""

import importlib.util
import json
import re
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from ep_moe import BackendUnavailable, ConfigError, EPContext, MoEConfig, MoELayer, metrics
from ep_moe.eplb.cost import Price
from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.stats import BalancerStats
from ep_moe.metrics import LayerMetrics, Snapshot
from ep_moe.metrics.families import families
from ep_moe.placement.placement import LayerStats

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "launch" / "grafana_dashboard.json"
CONFIG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
LAYER = LayerMetrics(
    name='b"\\', all2all="torch_a2a", experts="reference", calls=7, replayed=3, tokens=11, expert_load=(20, 2, 0, 0),
    rank_load=(16, 6), sent_bytes=640, stage_ms={"experts": 2500.0}, deadline_margin_s=298.5,
)  # fmt: skip
BALANCER = BalancerStats(
    state=State.MOVING, steps=40, rebalances=2, commits=3, rollbacks=1, skipped=0, restarts=0, received_bytes=4096,
    staging_bytes=128, layers=(LayerStats("a", (3, 1), (3.0, 1.0)), LayerStats("c", (2, 2), (2.0, 2.0))),
    price="", error="", predicted=Price(4.0, 3.0, 20.0, 3000),
)  # fmt: skip
FOUND = Snapshot(rank=5, etp_rank=0, whole=False, deadline_s=300.0, layers=(LAYER,), balancers=(BALANCER,))

prometheus = pytest.mark.skipif(importlib.util.find_spec("prometheus_client") is None, reason="needs prometheus-client")


def parsed(text):
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found, name, **labels):
    return found[(name, *sorted({"rank": "5", **labels}.items()))]


@prometheus
def test_a_balancer_without_a_window_has_no_balancedness():
    before = replace(FOUND, balancers=(replace(BALANCER, layers=()),))
    assert "ep_moe_eplb_balancedness{" not in metrics.prometheus_text(before)
    assert "ep_moe_eplb_balancedness{" in metrics.prometheus_text(FOUND)


@prometheus
def test_prometheus_text():
    text = metrics.prometheus_text(FOUND)
    found = parsed(text)
    layer = {"layer": 'b"\\'}
    assert value(found, "ep_moe_layer_calls_total", **layer) == 7
    assert value(found, "ep_moe_layer_graph_replays_total", **layer) == 3
    assert value(found, "ep_moe_layer_tokens_total", **layer) == 11
    assert value(found, "ep_moe_layer_rank_routes_total", ep_rank="1", **layer) == 6
    assert value(found, "ep_moe_layer_balancedness", **layer) == 11 / 16
    assert value(found, "ep_moe_layer_sent_bytes_estimate_total", **layer) == 640
    assert value(found, "ep_moe_layer_stage_seconds_total", stage="experts", **layer) == 2.5
    assert value(found, "ep_moe_layer_deadline_margin_seconds", **layer) == 298.5
    assert value(found, "ep_moe_deadline_seconds") == 300
    states = {
        state.name.lower(): value(found, "ep_moe_eplb_state", balancer="0", state=state.name.lower()) for state in State
    }
    assert states == {state.name.lower(): float(state is State.MOVING) for state in State}
    assert value(found, "ep_moe_eplb_commits_total", balancer="0") == 3
    assert value(found, "ep_moe_eplb_balancedness", balancer="0") == 0.8  # (2 + 2) / (3 + 2)
    assert value(found, "ep_moe_eplb_layer_balancedness", balancer="0", layer="a") == 2 / 3
    assert value(found, "ep_moe_eplb_price_after_seconds", balancer="0") == 0.003
    assert not any("expert_routes" in key[0] for key in found), "a model has tens of thousands of these"
    with_experts = parsed(metrics.prometheus_text(FOUND, experts=True))
    assert value(with_experts, "ep_moe_layer_expert_routes_total", expert="0", **layer) == 20
    helped, typed = (re.findall(rf"^# {word} (\S+)", text, re.M) for word in ("HELP", "TYPE"))
    assert helped == typed
    assert len(set(helped)) == len(helped)
    assert {re.sub(r"_total$", "", key[0]) for key in found} == {re.sub(r"_total$", "", name) for name in helped}


@prometheus
def test_what_is_unknown_is_not_there():
    """Unknown values are not exported.

    Only the first rank of an etp group exports the counts that all its ranks share.
    """
    from dataclasses import replace

    unknown = replace(LAYER, tokens=None, expert_load=None, rank_load=None, sent_bytes=None, deadline_margin_s=None)
    found = parsed(metrics.prometheus_text(replace(FOUND, layers=(unknown,), balancers=())))
    assert {key[0] for key in found} == {
        "ep_moe_layer_info", "ep_moe_layer_calls_total", "ep_moe_layer_graph_replays_total",
        "ep_moe_layer_stage_seconds_total", "ep_moe_deadline_seconds",
    }  # fmt: skip
    second = parsed(metrics.prometheus_text(replace(FOUND, etp_rank=1), experts=True))
    names = {key[0] for key in second}
    assert "ep_moe_layer_calls_total" in names
    assert not names & {
        "ep_moe_layer_tokens_total", "ep_moe_layer_rank_routes_total", "ep_moe_layer_expert_routes_total"
    }  # fmt: skip


@prometheus
def test_the_endpoint_is_scraped():
    with EPContext.local() as context:
        layer = MoELayer(CONFIG, context, name="one")
        source = metrics.Source(context)
        with metrics.serve(source, port=0) as server:
            assert server.host == "127.0.0.1"

            def scrape():
                with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain")
                    return parsed(answer.read().decode())

            key = ("ep_moe_layer_tokens_total", ("layer", "one"), ("rank", "0"))
            assert scrape()[key] == 0
            layer(torch.randn(5, 16))
            assert scrape()[key] == 0, "the device is read by update alone"
            source.update()
            assert scrape()[key] == 5
            assert not any(name.startswith(("python_", "process_")) for name, *_ in scrape())
            with pytest.raises(ConfigError, match=f"port {server.port} of 127.0.0.1 cannot be used"):
                metrics.serve(source, port=server.port)
            port = server.port
        server.close()
        with pytest.raises(urllib.error.URLError):
            scrape()
        metrics.serve(source, port=port).close()


@prometheus
def test_wrong_arguments_of_serve():
    with EPContext.local() as context:
        source = metrics.Source(context)
        for port in (-1, 65536, "9400", True):
            with pytest.raises(ConfigError, match="serve: port must be an integer"):
                metrics.serve(source, port=port)
        with pytest.raises(ConfigError, match="serve: source must be"):
            metrics.serve(context, port=0)
        with pytest.raises(
            ConfigError, match=r"port 0 of 203.0.113.7 cannot be used"
        ):  # an address reserved for documentation (RFC 5737)
            metrics.serve(source, port=0, host="203.0.113.7")


def test_a_library_that_is_absent_is_named():
    with (
        EPContext.local() as context,
        mock.patch.dict(sys.modules, {"prometheus_client": None, "opentelemetry": None, "opentelemetry.metrics": None}),
    ):
        source = metrics.Source(context)
        for call in (lambda: metrics.prometheus_text(source.newest()), lambda: metrics.serve(source, port=0)):
            with pytest.raises(BackendUnavailable, match=r"needs prometheus-client; install ep-moe\[metrics\]"):
                call()
        with pytest.raises(BackendUnavailable, match=r"needs opentelemetry-api; install ep-moe\[otel\]"):
            metrics.to_opentelemetry(None, source)
        with pytest.raises(ConfigError, match="to_opentelemetry: source must be a Source"):
            metrics.to_opentelemetry(None, context)


def test_tensorboard_scalars():
    class Writer:
        def __init__(self):
            self.rows = {}

        def add_scalar(self, name, value, step):
            assert name not in self.rows
            self.rows[name] = (value, step)

    writer = Writer()
    metrics.to_tensorboard(writer, FOUND, 40)
    assert writer.rows['ep_moe/layer_tokens/b"\\'] == (11, 40)
    assert writer.rows["ep_moe/eplb_balancedness/0"] == (0.8, 40)
    assert writer.rows["ep_moe/eplb_layer_balancedness/0/a"] == (2 / 3, 40)
    with pytest.raises(ConfigError, match="writer must have add_scalar"):
        metrics.to_tensorboard(None, FOUND, 40)


def test_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        metrics.to_tensorboard(writer, FOUND, 40)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Scalars("ep_moe/eplb_commits/0")
    assert (event.step, event.value) == (40, 3)


def test_opentelemetry():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    with EPContext.local() as context:
        source = metrics.Source(context)
        source._newest = (FOUND, [LAYER.name])
        reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[reader])
        metrics.to_opentelemetry(provider.get_meter("ep_moe"), source, experts=True)
        (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
        provider.shutdown()
    found = {metric.name: metric for metric in scope.metrics}
    assert set(found) == {family.name.replace("ep_moe_", "ep_moe.", 1) for family in families(experts=True)} - {
        "ep_moe.layer_deadline_margin_seconds"  # this context has no peers
    }
    (tokens,) = found["ep_moe.layer_tokens"].data.data_points
    assert (tokens.value, dict(tokens.attributes)) == (11, {"rank": 5, "layer": 'b"\\'})
    assert found["ep_moe.layer_tokens"].data.is_monotonic
    assert found["ep_moe.layer_tokens"].description.startswith("Tokens of this rank")


# --- the dashboard ---------------------------------------------------------------------------------------------------


def queries(board):
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def exported():
    """Return label names by the metric name that Prometheus stores."""
    return {
        family.name + ("_total" if family.counter else ""): {*family.labels, "rank"}
        for family in families(experts=True)
    }


def test_queries_of_the_dashboard_are_of_exported_metrics():
    known, used = exported(), set()
    for title, query in queries(json.loads(DASHBOARD.read_text())):
        names = set(re.findall(r"\bep_moe_\w+", query))
        assert names, (title, query)
        assert names <= set(known), (title, names - set(known))
        used |= names
        labels = {label for name in names for label in known[name]}
        grouped = [label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")]
        matched = re.findall(r"(\w+)=~?\"", query)
        for label in {*grouped, *matched} - {"instance", "job", ""}:
            assert label in labels, (title, label)
        assert query.count("(") == query.count(")"), (title, query)
    left_out = {"ep_moe_layer_info", "ep_moe_layer_expert_routes_total", "ep_moe_layer_balancedness"}
    minor = {name for name in known if re.search(r"eplb_(steps|skipped|restarts|staging|price_cost)", name)}
    assert used >= set(known) - left_out - minor, set(known) - used


def test_the_dashboard_has_what_grafana_wants():
    board = json.loads(DASHBOARD.read_text())
    assert board["title"] == "ep_moe"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    placed = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & placed, panel["title"]
        placed |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_page_has_all_metrics():
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(ep_moe_\w+)` \|([^|]*)\|", page, re.M))
    assert {name: {"rank", *re.findall(r"`(\w+)`", labels)} for name, labels in rows.items()} == exported()


def test_a_meter_is_one_of_opentelemetry():
    pytest.importorskip("opentelemetry.metrics")
    with EPContext.local() as context:
        source = metrics.Source(context)
        with pytest.raises(ConfigError, match="to_opentelemetry: meter must be a Meter, got "):
            metrics.to_opentelemetry("meter", source)
        with pytest.raises(ConfigError, match="to_opentelemetry: source must be a Source, got "):
            metrics.to_opentelemetry("meter", context)
