"""`torch.compile` on 2 GPUs under torchrun, where no rank sets its current device."""

import os
import tempfile
import warnings

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and TorchrunEnv.present()), reason="needs GPUs, and torchrun with 2 ranks"
)
CONFIG = MoEConfig(hidden_size=512, intermediate_size=256, num_experts=16, top_k=4)
BF16 = torch.bfloat16


def made(context: EPContext, **how) -> MoELayer:
    layer, generator = MoELayer(CONFIG, context, dtype=BF16, **how), torch.Generator().manual_seed(1)
    for expert in range(CONFIG.num_experts):
        w13, w2 = (torch.randn(*size, generator=generator) * 0.05 for size in ((512, 512), (512, 256)))
        layer.update_expert(expert, w13=w13, w2=w2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(16, 512, generator=torch.Generator().manual_seed(2)))
    return layer


def rows(rank: int, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, 512, generator=torch.Generator().manual_seed(10 * tokens + rank)).to(device, BF16)


@distributed(2)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("how", [{}, {"all2all": "allgather"}, {"all2all": "torch_a2a"}, {"all2all": "nvlink_p2p"}])
def test_a_compiled_layer_is_the_eager_one(how, mode):
    """A compiled layer equals the eager one bit for bit.

    Each size is called several times: the second call is recorded, later ones are replayed.
    """
    torch.compiler.reset()
    with EPContext.from_torchrun(max_tokens=512) as context, torch.no_grad():
        layer, rank = made(context, **how), context.layout.rank
        compiled = torch.compile(layer, mode=mode)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*inline_asm.*")
            for tokens in (300, 17, 300, 1, 17, 300):
                x = rows(rank, tokens, context.device)
                for _ in range(2):
                    found, want = compiled(x).clone(), layer(x)
                    assert torch.equal(found, want), tokens
        load = int(layer.placement.expert_load.sum())
        assert load == 4 * CONFIG.top_k * (3 * 300 + 2 * 17 + 1)


@distributed(2)
def test_gradients_of_a_compiled_layer_are_the_eager_ones():
    torch.compiler.reset()
    with EPContext.from_torchrun() as context:
        layer = made(context, all2all="torch_a2a", experts="reference")
        found = []
        for call in (layer, torch.compile(layer)):
            layer.zero_grad()
            x = rows(context.layout.rank, 64, context.device).requires_grad_()
            y = call(x)
            y.float().square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-2 * expected.abs().max().item())


@distributed(2)
@pytest.mark.parametrize("experts", ["reference", "bf16_triton"])
def test_a_local_layer_in_one_graph(experts):
    """A layer of one rank compiles with `fullgraph=True`.

    Constants of the placement exceed int32, the index type of inductor's kernels.
    """
    torch.compiler.reset()
    with EPContext.local(rank_device()) as context, torch.no_grad():
        layer = made(context, experts=experts)
        compiled = torch.compile(layer, fullgraph=True)
        for tokens in (300, 17, 64):
            x = rows(0, tokens, context.device)
            found, want = compiled(x), layer(x)
            torch.testing.assert_close(found, want, rtol=0, atol=2e-2 * want.abs().max().item())
        assert int(layer.placement.expert_load.sum()) == 2 * 4 * (300 + 17 + 64)


@distributed(2)
def test_load_under_activation_checkpointing():
    with EPContext.from_torchrun() as context:
        layer = made(context, all2all="torch_a2a", experts="reference")
        for reentrant in (True, False):
            layer.placement.reset_load()
            x = rows(context.layout.rank, 64, context.device).requires_grad_()
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).float().sum().backward()
            assert int(layer.placement.expert_load.sum()) == 64 * 4


@distributed(2)
def test_autocast_around_layers():
    with EPContext.from_torchrun(max_tokens=512) as context, torch.no_grad():
        layer, x = made(context), rows(context.layout.rank, 64, context.device)
        want = layer(x)
        with torch.autocast("cuda", dtype=BF16):
            for _ in range(4):
                assert torch.equal(layer(x.float()), want)


@distributed(2)
def test_generation_with_a_static_cache():
    """`generate` with a static cache works, for which transformers compiles the decoding steps."""
    import transformers

    from ep_moe.integrations.transformers import load_pretrained

    quiet()
    torch.compiler.reset()
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=True, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.Qwen3MoeForCausalLM(config).to(BF16).eval()
    with EPContext.from_torchrun(max_tokens=4096) as context:
        folder = f"{tempfile.gettempdir()}/ep_moe_static_cache_{os.environ['MASTER_PORT']}"
        if context.layout.rank == 0:
            whole.save_pretrained(folder)
        context.consensus.raise_on_all_ranks("the checkpoint is written", None)
        model = load_pretrained(folder, context, progress=False)
        whole.to(context.device)
        ids = torch.tensor([[1, 5, 9, 30 + context.layout.rank, 77]], device=context.device)
        how = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        for _ in range(2):
            found = model.generate(ids, **how, cache_implementation="static")
            logits = whole(found).logits[0, ids.shape[1] - 1 : -1].float()
            chosen = logits.gather(1, found[0, ids.shape[1] :, None])[:, 0]
            # within bfloat16 rounding of the best one: a random model has near ties
            assert (logits.max(1).values - chosen <= 2e-2 * logits.abs().max()).all()
