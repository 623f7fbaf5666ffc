"""Test `expert_parallel` and `load_pretrained` on one rank: dtypes, the meta device, and models that are refused."""

import json
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from ep_moe import EPContext, MoELayer
from ep_moe.errors import CheckpointError, ConfigError, InputError
from ep_moe.integrations import transformers as module
from ep_moe.integrations.transformers import ExpertParallelBlock, expert_parallel, load_pretrained, moe_layers
from tests.fixtures.checkpoint_files import FAMILIES, LAYERS, logits, quiet, save, tiny_config, tiny_model, written
from tests.fixtures.interface_models import interface_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


def local():
    return EPContext.local(torch.device("cpu"))


def test_one_number_of_experts_is_asked_of_layers_that_are_alike(tmp_path, monkeypatch):
    quiet()
    save(tiny_model("mixtral"), tmp_path)
    monkeypatch.setattr(module, "build_model_on_meta", lambda *_: (None, None, None))
    counts = {"a": 8, "b": 8, "c": 4}
    monkeypatch.setattr(
        module, "find_experts",
        lambda model: {name: SimpleNamespace(layout=SimpleNamespace(experts=n)) for name, n in counts.items()},
    )  # fmt: skip
    with local() as context:
        with pytest.raises(ConfigError, match=r"layers have \[4, 8\] experts, and one number for all is asked"):
            module.num_experts(tmp_path, context)
        del counts["c"]
        assert module.num_experts(tmp_path, context) == 8


@pytest.mark.parametrize("make", [lambda: tiny_model("mixtral"), lambda: interface_model("olmoe")])
def test_layers_that_share_a_block_share_what_replaces_it(make):
    """A block that several layers share is replaced in all of them, so that they train the same weights."""
    quiet()
    ids, outputs = torch.arange(8).view(2, 4), []
    with local() as context:
        for replaced in (False, True):
            model = make().train()
            model.model.layers[1].mlp = model.model.layers[0].mlp
            model = expert_parallel(model, context) if replaced else model
            assert model.model.layers[1].mlp is model.model.layers[0].mlp
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            outputs.append(model(ids).logits.detach())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5 * float(outputs[0].abs().max()))


@pytest.mark.parametrize("make", [lambda: tiny_model("mixtral"), lambda: interface_model("olmoe")])
def test_experts_are_freed_once_they_are_replaced(make, monkeypatch):
    """A model in memory needs room for the experts of one more layer, not for all of them again."""
    quiet()
    model, alive = make(), []
    experts = [
        [weakref.ref(p) for n, p in layer.mlp.named_parameters() if "experts" in n] for layer in model.model.layers
    ]

    def making(*args, made=MoELayer.__init__, **options):
        alive.append([any(one() is not None for one in of_layer) for of_layer in experts])
        return made(*args, **options)

    monkeypatch.setattr(MoELayer, "__init__", making)
    with local() as context:
        expert_parallel(model, context)
    assert alive == [[True, True], [False, True]]
    assert not any(one() is not None for of_layer in experts for one in of_layer)


@pytest.mark.parametrize(
    ("make", "learns"),
    [
        (lambda: tiny_model("deepseek_v3"), ""),
        (lambda: tiny_model("qwen3_moe"), "gate.weight"),  # the router alone
        (lambda: interface_model("olmoe"), ""),
    ],
)
def test_an_optimizer_of_the_untouched_model_is_refused(make, learns):
    """An optimizer that was made before `expert_parallel` would not train what replaces the model's modules."""
    quiet()
    model, ids = make().train(), torch.arange(8).view(2, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns in name or "experts" not in name)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    before = set(model.parameters())
    with local() as context:
        model = expert_parallel(model, context)
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(ConfigError, match=r"that expert_parallel has replaced.*make the optimizer after"):
            early.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        kept = [parameter for parameter in model.parameters() if parameter in before]
        torch.optim.SGD(kept, lr=0.1).step()  # such as attention and shared experts
        assert kept


def test_a_model_on_the_meta_device_takes_no_weights():
    quiet()
    with local() as context:
        with torch.device("meta"):
            model = expert_parallel(tiny_model("mixtral"), context)
        with pytest.raises(ConfigError, match="the model is on the meta device; load it with load_pretrained"):
            module.load_weights(model, {})


def test_dtype_is_the_checkpoints(tmp_path):
    save(tiny_model("deepseek_v3").to(torch.bfloat16), tmp_path)
    model = load_pretrained(tmp_path, EPContext.local(torch.device("cpu")), progress=False)
    assert model.dtype == torch.bfloat16
    assert not any(part.training for part in model.modules())
    assert {layer.dtype for layer in moe_layers(model)} == {torch.bfloat16}
    assert {layer.router.e_score_correction_bias.dtype for layer in moe_layers(model)} == {torch.float32}


@pytest.mark.parametrize("make", [lambda: tiny_model("mixtral"), lambda: interface_model("olmoe")])
def test_data_parallel_wrappers_leave_experts_alone(make):
    """Data-parallel wrappers ignore expert parameters. accelerate and Trainer wrap a model without the user's code."""
    with local() as context:
        model = expert_parallel(make(), context)
        of_experts = {name for name, _ in model.named_parameters() if ".expert_weights." in name}
        ignored = set(model._ddp_params_and_buffers_to_ignore)
        assert {name for name, _ in model.named_parameters()} & ignored == of_experts
        assert of_experts


def kept_in_float32(model):
    blocks = tuple(name for name, m in model.named_modules() if isinstance(m, ExpertParallelBlock))
    rest = {name for name, p in model.named_parameters() if p.dtype == torch.float32 and not name.startswith(blocks)}
    return rest, [layer.router.weight.dtype for layer in moe_layers(model)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_parts_of_a_model_of_16_bits(family, dtype, tmp_path):
    """Parts that transformers keeps in float32 stay in float32, and logits agree.

    The files have the router in float32, and all else in 16 bits.
    """
    quiet()
    written = tiny_model(family)
    for name, parameter in written.named_parameters():
        if not name.endswith(("gate.weight", "router.weight", "router.bias")):
            parameter.data = parameter.data.to(dtype)
    save(written, tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    loaded = load_pretrained(tmp_path, local(), dtype=dtype, progress=False)
    replaced = expert_parallel(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval(), local())
    kept = {name for name, p in plain.named_parameters() if p.dtype == torch.float32}
    routers = {name for name in kept if name.endswith(("gate.weight", "router.weight", "router.bias"))}
    if family == "deepseek_v3" and not routers and transformers.__version__ < "5.24":
        pytest.skip(f"transformers {transformers.__version__} keeps no router in float32")
    assert bool(routers) == (family == "deepseek_v3")
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for model in (loaded, replaced):
        rest, of_routers = kept_in_float32(model)
        assert rest == kept - routers
        assert set(of_routers) == {torch.float32 if routers else dtype}
        assert {layer.dtype for layer in moe_layers(model)} == {dtype}
        for layer, number in zip(moe_layers(model), LAYERS[family], strict=True):
            if routers:
                gate, stored = (m.model.layers[number].mlp.gate for m in (plain, written))
                close = {"rtol": 1e-5, "atol": 1e-5}  # the order of sums differs; rounded weights would differ by 1e-2
                torch.testing.assert_close(layer.router.logits(x), gate(x)[0], **close)
                assert torch.equal(layer.router.weight, stored.weight)
                assert torch.equal(layer.to(dtype).router.weight, stored.weight)


def test_meta_model_stays_on_meta():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    context = EPContext.local(torch.device("cpu"))
    expert_parallel(model, context)
    assert len(moe_layers(model)) == 2
    for layer in moe_layers(model):
        tensors = [*layer.parameters(), *layer.buffers()]
        assert tensors
        assert all(t.is_meta for t in tensors)
        with pytest.raises(InputError, match="on the meta device"):
            layer(torch.zeros(1, 32))


def test_a_family_published_under_another_name(checkpoints, tmp_path):
    """A known family loads under another published name, and its own code is not run.

    Kimi-K2 has DeepSeek-V3's form, another name and its own code.
    """
    published = tmp_path / "published"
    shutil.copytree(checkpoints["deepseek_v3 fp8"].folder, published)
    config = json.loads((published / "config.json").read_text())
    named = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (published / "config.json").write_text(json.dumps(config | named))
    models = [load_pretrained(f, local()) for f in (published, checkpoints["deepseek_v3 fp8"].folder)]
    ids = torch.arange(20).reshape(1, 20)
    assert torch.equal(*[logits(model, ids) for model in models])
    assert models[0].config.to_dict() | {"_name_or_path": ""} == models[1].config.to_dict() | {"_name_or_path": ""}


def test_unknown_model_type_is_refused(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    save(model, tmp_path)
    for call in (lambda: expert_parallel(model, local()), lambda: load_pretrained(tmp_path, local())):
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM \(model_type 'llama'\) has no module that computes"):
            call()


def test_numbers_outside_the_experts_in_another_quantization_are_refused():
    source = SimpleNamespace(
        has=lambda name: False, unsupported_tensors=lambda prefix: {f"{prefix}.qzeros": "AutoRound"}
    )
    with pytest.raises(CheckpointError, match=r"^proj\.weight .*AutoRound"):
        module._load_rest(nn.ModuleDict({"proj": nn.Linear(2, 2)}), source, ("experts",), set())
