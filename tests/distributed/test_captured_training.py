"""A training step in the user's own CUDA graph equals eager steps bit for bit, with new rows, routes and weights."""

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer, ParallelConfig
from ep_moe.testing import distributed, rank_device
from ep_moe.training import use_main_grads

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs GPUs of compute capability 9.0", allow_module_level=True)

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4)
TOKENS = 96
REPLAYS = 12  # more than the calls in which backward compares ranks


class Step:
    """Run forward and backward on tensors that keep their addresses."""

    def __init__(self, context: EPContext, *, main: bool = False) -> None:
        torch.manual_seed(0)
        self.layer = MoELayer(CONFIG, context, experts="bf16_triton", all2all="nvlink_p2p", dtype=torch.bfloat16)
        if main:
            use_main_grads(self.layer)
        self.x = torch.zeros(TOKENS, 256, dtype=torch.bfloat16, device=context.device, requires_grad=True)
        self.behind = torch.zeros(TOKENS, 256, dtype=torch.bfloat16, device=context.device)

    def bring(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.x, self.behind):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))

    def run(self) -> torch.Tensor:
        out = self.layer(self.x)
        out.backward(self.behind)
        return out.detach()

    def forget(self) -> None:
        self.layer.zero_grad()
        self.x.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        named = {name: parameter.grad for name, parameter in self.layer.named_parameters()}
        return {name: grad.clone() for name, grad in (named | {"x": self.x.grad}).items() if grad is not None}


@distributed(2)
@pytest.mark.parametrize("main", [False, True])
def test_replays_equal_eager_steps(main, world_size):
    """A captured training step equals an eager one bit for bit.

    With `main`, the captured step writes gradients into `main_grad` buffers; the eager step does not.
    """
    device = rank_device()
    with (
        EPContext.from_groups(ParallelConfig(dp=2), device=device, max_tokens=TOKENS) as context,
        torch.cuda.device(device),
    ):
        captured, eager = Step(context, main=main), Step(context)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                captured.run()
                captured.forget()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = captured.run()
        for replay in range(REPLAYS):
            for step in (captured, eager):
                step.bring(10 * replay + context.layout.rank)
            graph.replay()
            eager.forget()
            wanted = {"out": eager.run()} | eager.gradients()
            found = {"out": out} | captured.gradients()
            assert found.keys() == wanted.keys()
            assert len(wanted) > 3 * len(eager.layer.expert_weights.slots_of_expert), "of every expert here"
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), f"replay {replay}: {name}"
                assert name != "x" or tensor.any()
            with torch.no_grad():  # update in place as an optimizer does; the router by an equal amount on every rank
                for step in (captured, eager):
                    for parameter in step.layer.expert_weights.parameters():
                        parameter -= 1e-3 * parameter.grad.sign()
