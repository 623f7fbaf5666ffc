"""Expert-parallel load balancing: plans expert maps from load, and compares their gain with the cost of moving."""

from ep_moe.eplb.cost import H200, LayerTime, Machine, Price, verdict
from ep_moe.eplb.planner.plan import plan
from ep_moe.eplb.planner.score import Traffic, balancedness, critical_path, loads_by_rank, traffic
from ep_moe.eplb.trace import LoadTrace

__all__ = [
    "H200",
    "LayerTime",
    "LoadTrace",
    "Machine",
    "Price",
    "Traffic",
    "balancedness",
    "critical_path",
    "loads_by_rank",
    "plan",
    "traffic",
    "verdict",
]
