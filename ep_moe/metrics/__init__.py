"""Metrics for operators: a snapshot of layers and balancers, and exporters.

    source = metrics.Source(context)
    with metrics.serve(source, port=9400 + context.layout.rank):
        for step, batch in enumerate(batches):
            model(batch)
            if step % 100 == 0:
                source.update()

Metrics add no counting to a call. A snapshot reads counters that placements, call graphs, the flight recorder and
balancers have anyway.
"""

from ep_moe.metrics.exporters import Server, prometheus_text, serve, to_opentelemetry, to_tensorboard
from ep_moe.metrics.source import LayerMetrics, Snapshot, Source, snapshot, stages

__all__ = [
    "LayerMetrics",
    "Server",
    "Snapshot",
    "Source",
    "prometheus_text",
    "serve",
    "snapshot",
    "stages",
    "to_opentelemetry",
    "to_tensorboard",
]
