"""What an operator watches: one snapshot of layers and balancers, and its ways out.

    source = metrics.Source(context)
    with metrics.serve(source, port=9400 + context.layout.rank):
        for step, batch in enumerate(batches):
            model(batch)
            if step % 100 == 0:
                source.update()

Nothing is counted for it on the path of a call. A snapshot reads what placements, call graphs, the flight recorder and
balancers hold anyway."""

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
