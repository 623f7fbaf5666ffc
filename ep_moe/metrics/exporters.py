"""Export snapshots: Prometheus' text format and endpoint, TensorBoard, OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ep_moe.checks import check_count, check_flag, check_kind
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.metrics.families import MetricFamily, families
from ep_moe.metrics.source import Snapshot, Source

_PORTS = 65535
LOOPBACK = "127.0.0.1"


def prometheus_text(found: Snapshot, *, experts: bool = False) -> str:
    """Write a snapshot in Prometheus' text format.

    Args:
        found: The snapshot.
        experts: Include the load of each logical expert: E series per layer.

    Returns:
        The text, with HELP and TYPE for each metric.

    Raises:
        BackendUnavailable: prometheus-client is not installed.
        ConfigError: An argument has a wrong type.
    """
    check_kind("prometheus_text: found", found, Snapshot)
    client = _prometheus("prometheus_text")
    text: str = client.generate_latest(_registry(client, lambda: found, experts)).decode()
    return text


class Server:
    """An endpoint that answers until it is closed; a context manager. `serve` creates it.

    Args:
        host: The address on which it listens.
        server: The server of prometheus-client.
        thread: The thread in which the server answers.

    Attributes:
        host: The address on which it listens.
        port: The port on which it listens.
    """

    def __init__(self, host: str, server: Any, thread: Any) -> None:
        self.host, self.port = host, int(server.server_port)
        self._server, self._thread = server, thread

    def close(self) -> None:
        """Stop answering, and release the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(source: Source, *, port: int, host: str = LOOPBACK, experts: bool = False) -> Server:
    """Answer Prometheus with the newest snapshot of a source, in a thread.

    Not collective: each rank that is to be watched calls it, with its own port on its host. The thread only reads host
    memory. The endpoint has no authentication.

    Args:
        source: The source of snapshots; `Source.update` renews them.
        port: Port in [0, 65535]; 0 for any free one.
        host: The address on which to listen. Default: only this machine.
        experts: Include the load of each logical expert.

    Returns:
        The endpoint.

    Raises:
        ConfigError: The address or port cannot be used.
        BackendUnavailable: prometheus-client is not installed.
    """
    check_kind("serve: source", source, Source)
    port = check_count("serve: port", port, at_least=0, at_most=_PORTS)
    check_kind("serve: host", host, str)
    client = _prometheus("serve")
    registry = _registry(client, source.newest, experts)
    try:
        server, thread = client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"serve: port {port} of {host} cannot be used: {error}; give another port to each rank of a host, or 0 for "
            f"any free one"
        ) from error
    return Server(host, server, thread)


def to_tensorboard(writer: Any, found: Snapshot, step: int) -> None:
    """Write a snapshot's numbers as scalars.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or another object with `add_scalar(name, value, step)`.
        found: The snapshot.
        step: The model's step.

    Raises:
        ConfigError: The writer has no such method.
    """
    check_kind("to_tensorboard: found", found, Snapshot)
    if not callable(getattr(writer, "add_scalar", None)):
        raise ConfigError(f"to_tensorboard: writer must have add_scalar, as SummaryWriter, got {type(writer).__name__}")
    for family in families():
        for labels, number in family.samples(found):
            writer.add_scalar("/".join([family.name.replace("ep_moe_", "ep_moe/", 1), *labels]), number, step)


def to_opentelemetry(meter: Any, source: Source, *, experts: bool = False) -> None:
    """Create an OpenTelemetry observable instrument for each metric.

    The SDK's reader calls them in its own thread. They only read host memory.

    Args:
        meter: The meter, from `opentelemetry.metrics.get_meter("ep_moe")`.
        source: The source of snapshots; `Source.update` renews them.
        experts: Include the load of each logical expert.

    Raises:
        ConfigError: An argument has a wrong type.
        BackendUnavailable: opentelemetry-api is not installed.
    """
    check_kind("to_opentelemetry: source", source, Source)
    try:
        from opentelemetry.metrics import Meter, Observation
    except ImportError as error:
        raise BackendUnavailable("to_opentelemetry needs opentelemetry-api; install ep-moe[otel]") from error
    check_kind("to_opentelemetry: meter", meter, Meter)

    def callback(family: MetricFamily) -> Any:
        def observe(_: Any) -> Iterator[Any]:
            found = source.newest()
            for values, number in family.samples(found):
                yield Observation(number, {"rank": found.rank, **dict(zip(family.labels, values, strict=True))})

        return observe

    for family in families(experts=experts):
        make = meter.create_observable_counter if family.counter else meter.create_observable_gauge
        make(family.name.replace("ep_moe_", "ep_moe.", 1), callbacks=[callback(family)], description=family.about)


def _prometheus(what: str) -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise BackendUnavailable(f"metrics.{what} needs prometheus-client; install ep-moe[metrics]") from error
    return prometheus_client


def _registry(client: Any, newest: Any, experts: bool) -> Any:
    """Return a new registry, without the default metrics of the process."""
    chosen = families(experts=check_flag("experts", experts))

    class Collector:
        def collect(self) -> Iterator[Any]:
            found = newest()
            for family in chosen:
                kind = client.core.CounterMetricFamily if family.counter else client.core.GaugeMetricFamily
                metric = kind(family.name, family.about, labels=[*family.labels, "rank"])
                for values, number in family.samples(found):
                    metric.add_metric([*values, str(found.rank)], number)
                if metric.samples:
                    yield metric

    registry = client.CollectorRegistry()
    registry.register(Collector())
    return registry
