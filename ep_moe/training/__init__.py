"""What a training loop needs beside the layer: losses of the routers, and their balance without a loss."""

from ep_moe.training.balance import BiasUpdate
from ep_moe.training.logits import router_logits
from ep_moe.training.losses import load_balancing_loss, router_z_loss, sequence_balancing_loss

__all__ = ["BiasUpdate", "load_balancing_loss", "router_logits", "router_z_loss", "sequence_balancing_loss"]
