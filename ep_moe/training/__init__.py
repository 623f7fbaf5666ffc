"""What a training loop needs beside the layer: losses of the routers."""

from ep_moe.training.logits import router_logits
from ep_moe.training.losses import load_balancing_loss, router_z_loss, sequence_balancing_loss

__all__ = ["load_balancing_loss", "router_logits", "router_z_loss", "sequence_balancing_loss"]
