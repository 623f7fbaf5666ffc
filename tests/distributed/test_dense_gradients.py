"""Dense gradients that some ranks lack, or that are no plain rows of numbers, against one process."""

import torch
from torch import Tensor, nn

from ep_moe import EPContext, MoELayer, ParallelConfig, training
from ep_moe.testing import distributed, rank_device
from tests.fixtures.training_model import CONFIG, WIDTH


class Skipping(nn.Module):
    """Whose parts are used where a call names them."""

    def __init__(self, context: EPContext) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(CONFIG, context)

    def forward(self, x: Tensor, used: str) -> Tensor:
        for name in used.split():
            x = x + getattr(self, name)(x)
        return x


def made(context: EPContext) -> Skipping:
    torch.manual_seed(0)
    return Skipping(context).to(context.device)


# what each rank uses in each step
STEPS = [("first second moe", "first second moe"), ("first", "first"), ("first second", "first"), ("first", "first")]


@distributed(2, deadline_s=60)
def test_what_no_rank_uses_does_not_move(world_size):
    """With zeros for gradients AdamW would move it by its momentum and its decay."""
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20) as context:
        model, alone = made(context), made(EPContext.local(rank_device()))
        optimizers = [
            torch.optim.AdamW(training.parameter_groups(each), lr=0.1, weight_decay=0.1) for each in (model, alone)
        ]
        for step, used in enumerate(STEPS):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(context.device).chunk(2)
            rank = context.layout.rank
            model(x[rank], used[rank]).square().mean().backward()
            training.sync_gradients(model, context)
            training.sync_gradients(model, context)
            sum(alone(part, names).square().mean() / 2 for part, names in zip(x, used, strict=True)).backward()
            for name, parameter in alone.named_parameters():
                if "expert_weights" in name:
                    continue
                found = model.get_parameter(name)
                assert (found.grad is None) == (parameter.grad is None), (step, name)
                torch.testing.assert_close(found, parameter, msg=f"{step}: {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
