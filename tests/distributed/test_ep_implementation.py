"""`DistributedConfig(ep_implementation="ep_moe")`: transformers' training over ep_moe's transports and kernels."""

import dataclasses

import pytest
import torch
import transformers
from transformers.distributed import DistributedConfig

from ep_moe import registry
from ep_moe.errors import ConfigError, InputError
from ep_moe.experts.reference import ReferenceExperts
from ep_moe.integrations.ep_implementation import borrowing_layers, register_ep_implementation
from ep_moe.testing import distributed, rank_device
from ep_moe.weights.layouts.base import WeightLayout
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.interface_models import interface_checkpoints
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")
if not hasattr(expert_parallel, "EPImplementationInterface"):
    pytest.skip("this transformers has no EPImplementationInterface", allow_module_level=True)

# concatenated; interleaved, transposed and with biases; without a gate
KINDS = ["olmoe", "gpt_oss", "nemotron_h"]
# sizes of DistributedConfig, by number of ranks
LAYOUTS = {
    2: [{"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 2}],
    4: [
        {"fsdp_size": 4, "ep_size": 4},
        {"fsdp_size": 4, "ep_size": 2},
        {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
        {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
        {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    ],
}
# a layout decides which rank holds which experts, a kind how experts are stored; each kind is sharded in all ways
CUT_EACH_WAY = LAYOUTS[4][3]
TOLERANCE = 1e-5  # relative to the largest number: float32 rounding in another summation order


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    quiet()
    return interface_checkpoints(tmp_path_factory.mktemp("ep_implementation"), KINDS)


def loaded(folder, **sizes):
    config = DistributedConfig(ep_implementation="ep_moe", **sizes)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def batches(sizes):
    """Return the distinct batches [B, S] of all ranks, and the index of this rank's batch."""
    own = sizes.get("dp_replicate_size", 1) * sizes.get("fsdp_size", 1)
    made = [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(at)) for at in range(own)]
    return [ids.to(rank_device()) for ids in made], torch.distributed.get_rank() // sizes.get("tp_size", 1)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(found, expected):
    found = whole(found)
    return (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@distributed(2, 4, deadline_s=300)
def test_training_equals_one_process(checkpoints, world_size):
    """Logits, all gradients, and logits after an optimizer step equal those of one process."""
    quiet()
    register_ep_implementation()
    for kind in KINDS:
        for sizes in LAYOUTS[world_size] if kind == "olmoe" or world_size == 2 else [CUT_EACH_WAY]:
            compare_with_one_process(checkpoints / kind / "fused", sizes, f"{kind} {sizes}")


@distributed(2, 4)
def test_a_transport_with_a_backward_of_its_own(checkpoints, world_size):
    quiet()
    with p2p_on_cpu():
        register_ep_implementation(all2all="nvlink_p2p", max_tokens=18)
        for sizes in LAYOUTS[world_size][:2]:
            compare_with_one_process(checkpoints / "olmoe" / "fused", sizes, f"{sizes}")


def compare_with_one_process(folder, sizes, where):
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).to(rank_device()).train()
    batch, own = batches(sizes)
    model = loaded(folder, **sizes).train()
    assert borrowing_layers(model), where
    whole_batch = [plain(input_ids=ids, labels=ids, use_cache=False) for ids in batch]
    torch.stack([one.loss for one in whole_batch]).mean().backward()
    out = model(input_ids=batch[own], labels=batch[own], use_cache=False)
    assert close(out.logits, whole_batch[own].logits), where
    out.loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if expected[name].grad is None:
            continue
        assert parameter.grad is not None, f"{where} {name}"
        assert close(parameter.grad, expected[name].grad), f"{where} {name}"
    assert sum("experts." in name and one.grad.abs().max() > 1e-6 for name, one in expected.items()) >= 4
    for one in (plain, model):
        torch.optim.SGD(one.parameters(), lr=1.0, foreach=False).step()
    with torch.no_grad():
        found, wanted = (one(input_ids=batch[own], use_cache=False).logits for one in (model, plain))
    assert close(found, wanted), f"{where}, a step on"
    borrowing_layers(model)[0].context.destroy()


@distributed(2)
def test_nothing_is_held_twice(checkpoints, world_size):
    """Kernels read the memory of transformers' parameters; layers allocate no expert weights."""
    quiet()
    register_ep_implementation()
    model = loaded(checkpoints / "olmoe" / "fused", tp_size=2, ep_size=2)
    read = []
    for layer in borrowing_layers(model):
        assert layer.plan()["experts"] == 0
        compute = layer.experts.compute
        layer.experts.compute = lambda *given, layer=layer, compute=compute: (
            read.append(layer.expert_weights.stored_tensors()["w13"].data_ptr()) or compute(*given)
        )
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.int64, device=rank_device()))
    held = [one.to_local().data_ptr() for name, one in model.named_parameters() if name.endswith("gate_up_proj")]
    assert read == held


@distributed(4)
def test_experts_without_rows_get_zeros(checkpoints, world_size):
    """An expert without rows gets a zero gradient, not None.

    FSDP reduces the gradient over all ranks with a copy of the expert, also where only one of them has rows.
    """
    quiet()
    register_ep_implementation()
    model = loaded(checkpoints / "olmoe" / "fused", fsdp_size=4, ep_size=2).train()
    rank = torch.distributed.get_rank()
    reached = []
    for layer in borrowing_layers(model):
        compute = layer.experts.compute
        layer.experts.compute = lambda received, *rest, compute=compute: (
            reached.append(int((received.local_ids >= 0).sum())) or compute(received, *rest)
        )
    experts = model.config.num_experts
    for block in model.model.layers:  # ranks 0 and 1 send all rows to experts 0 and 1; the other ranks use all experts
        choose = block.mlp.gate.forward

        def chosen(x, choose=choose):
            logits, weights, ids = choose(x)
            spread = torch.arange(ids.numel(), device=ids.device).view_as(ids) % experts
            return logits, weights, spread % 2 if rank < 2 else spread

        block.mlp.gate.forward = chosen
    ids = torch.randint(0, 64, (1, 9), device=rank_device())
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert (min(reached) == 0) == (rank == 1), reached


@distributed(2)
def test_generate_and_save(checkpoints, tmp_path, world_size):
    """`generate` gives the tokens of one process, and `save_pretrained` a folder that loads bit for bit."""
    quiet()
    register_ep_implementation()
    for kind in ("olmoe", "gpt_oss"):
        folder = checkpoints / kind / "fused"
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder).to(rank_device()).eval()
        for number, sizes in enumerate(LAYOUTS[2]):
            model = loaded(folder, **sizes).eval()
            ids, own = batches(sizes)
            options = {"max_new_tokens": 4 + own, "do_sample": False, "pad_token_id": 0}
            assert model.generate(ids[own], **options).tolist() == plain.generate(ids[own], **options).tolist()
            saved = tmp_path / f"{kind}{number}"
            model.save_pretrained(saved)
            torch.distributed.barrier()
            again = transformers.AutoModelForCausalLM.from_pretrained(saved).state_dict()
            for name, tensor in plain.state_dict().items():
                assert torch.equal(again[name], tensor.cpu()), f"{kind} {sizes} {name}"


class NoBackward(ReferenceExperts):
    """A kernel of another package without a backward, which "auto" prefers to `reference`."""

    name = "no_backward"
    capabilities = dataclasses.replace(
        ReferenceExperts.capabilities, differentiable=False, ahead_of=frozenset({"reference"})
    )

    def compute(self, received, out):
        assert not torch.is_grad_enabled()
        return super().compute(received, out)


class OwnLayout(NoBackward):
    name = "own_layout"
    weight_layout = type("Layout", (WeightLayout,), {})


@distributed(2)
def test_calls_with_gradients_take_a_kernel_with_a_backward(checkpoints, world_size, monkeypatch):
    plugins = {f"{one.name}": f"{__name__}:{one.__name__}" for one in (NoBackward, OwnLayout)}
    monkeypatch.setattr(registry, "_plugins", lambda kind: plugins if kind == "experts" else {})
    quiet()
    register_ep_implementation()
    folder, sizes = checkpoints / "olmoe" / "fused", {"fsdp_size": 2, "ep_size": 2}
    model, (ids, own) = loaded(folder, **sizes), batches(sizes)
    assert [layer.choice.experts for layer in borrowing_layers(model)] == ["no_backward", "reference"] * 2
    with torch.no_grad():
        expected = model(input_ids=ids[own], use_cache=False).logits
    out = model(input_ids=ids[own], labels=ids[own], use_cache=False)
    assert torch.equal(out.logits, expected)
    out.loss.backward()

    register_ep_implementation(experts="no_backward")
    model = loaded(folder, **sizes)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids[own], use_cache=False).logits, expected)
    with pytest.raises(InputError, match=r"a call with gradients: .*no_backward has no backward"):
        model(input_ids=ids[own], use_cache=False)

    register_ep_implementation(experts="own_layout")
    with pytest.raises(ConfigError, match="own_layout has a weight layout of its own, and would hold the experts"):
        loaded(folder, **sizes)


@distributed(2)
def test_a_model_may_choose_fewer_experts_than_there_is_room_for(checkpoints, world_size):
    quiet()
    register_ep_implementation(top_k=4)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0)).to(rank_device())
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "olmoe" / "fused").to(rank_device()).eval()
    model = loaded(checkpoints / "olmoe" / "fused", tp_size=2, ep_size=2).eval()
    with torch.no_grad():
        assert close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert {layer.config.top_k for layer in borrowing_layers(model)} == {4}


@distributed(2)
def test_refusals_are_alike_on_all_ranks(checkpoints, world_size):
    quiet()
    folder, sizes = checkpoints / "olmoe" / "fused", {"fsdp_size": 2, "ep_size": 2}
    register_ep_implementation(top_k=1)
    model, (ids, own) = loaded(folder, **sizes), batches(sizes)
    with pytest.raises(InputError, match=r"chooses 2 experts a token, and its configuration says 1; call .*top_k=2"):
        model(input_ids=ids[own])
    register_ep_implementation()
    layer = borrowing_layers(loaded(folder, **sizes))[0]
    for call in (lambda: layer.tune([8]), lambda: layer.capture([8]), lambda: layer.capture_routed([8])):
        with pytest.raises(ConfigError, match=r"needs the weights of .*load_pretrained"):
            call()
    for call in (layer.state_dict, lambda: layer.update_expert(0, w2=torch.zeros(1))):
        with pytest.raises(ConfigError, match="belong to a transformers model and are"):
            call()


@distributed(1)
def test_importing_ep_moe_registers_nothing(world_size):
    """Importing ep_moe does not register the implementation in transformers.

    Ranks are forked from a process that imported ep_moe and called nothing of it.
    """
    assert "ep_moe" not in expert_parallel.EPImplementationInterface()
    register_ep_implementation()
    assert "ep_moe" in expert_parallel.EPImplementationInterface()
