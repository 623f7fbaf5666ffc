"""A balancer's numbers in other people's formats."""

from ep_moe.eplb.migration.consensus import State
from ep_moe.eplb.stats import BalancerStats, prometheus_text, to_tensorboard
from ep_moe.placement.placement import LayerStats

STATS = BalancerStats(
    state=State.MOVING,
    steps=40,
    rebalances=2,
    commits=3,
    rollbacks=1,
    skipped=0,
    restarts=0,
    received_bytes=4096,
    staging_bytes=128,
    layers=(LayerStats("a", (3, 1), (3.0, 1.0)), LayerStats('b"\\', (2, 2), (2.0, 2.0))),
    price="",
    error="",
)


def test_prometheus():
    lines = prometheus_text(STATS).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["ep_moe_eplb_commits_total"] == "3"
    assert values["ep_moe_eplb_state"] == "4"
    assert values["ep_moe_eplb_balancedness"] == "0.8"  # (2 + 2) / (3 + 2)
    assert float(values['ep_moe_eplb_layer_balancedness{layer="a"}']) == 2 / 3
    assert values['ep_moe_eplb_layer_fullest_rank_routes{layer="b\\"\\\\"}'] == "2.0"
    typed = [line.split()[2] for line in lines if line.startswith("#")]
    assert {name.split("{")[0] for name in values} == set(typed)
    assert len(typed) == len(set(typed))


def test_tensorboard():
    class Writer:
        def __init__(self):
            self.rows = {}

        def add_scalar(self, name, value, step):
            self.rows[name] = (value, step)

    writer = Writer()
    to_tensorboard(writer, STATS)
    assert writer.rows["eplb/balancedness"] == (0.8, 40)
    assert writer.rows["eplb/balancedness/a"] == (2 / 3, 40)
    assert writer.rows["eplb/received_bytes"] == (4096, 40)
