"""PEFT's LoRA on attention and experts: gradients, adapters and merged weights equal those of one process."""

import pytest
import torch
import torch.distributed as dist
import transformers

from ep_moe import ConfigError, EPContext, ParallelConfig
from ep_moe.integrations.lora import add_lora, load_lora, merge_lora, save_lora
from ep_moe.integrations.transformers import (
    export_weights,
    idle_step,
    load_pretrained,
    load_weights,
    moe_layers,
    save_pretrained,
)
from ep_moe.testing import distributed, rank_device
from ep_moe.training import clip_grad_norm_, sync_gradients
from ep_moe.weights import lora
from tests.fixtures.checkpoint_files import quiet, tiny_model
from tests.fixtures.interface_models import interface_model
from tests.fixtures.lora_models import PER_EXPERT, lora_config, old_names, plain_twin, write_old
from tests.fixtures.p2p_on_cpu import p2p_on_cpu

peft = pytest.importorskip("peft")
# experts with the model's own router; a known family; transposed and interleaved experts; some without a gate
KINDS = {"olmoe": interface_model, "qwen3_moe": tiny_model, "gpt_oss": tiny_model, "nemotron_h": interface_model}
KINDS |= {"llama4_text": tiny_model}  # transposed, which PEFT does not handle
MADE = KINDS | {"deepseek_v3": tiny_model}
LAYOUTS = {2: [{"dp": 2}, {"dp": 1, "tp": 2}], 4: [{"dp": 4, "ep": 2}, {"dp": 2, "tp": 2}]}
TOLERANCE = 2e-5


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    quiet()
    folder = tmp_path_factory.mktemp("lora")
    for kind, make in MADE.items():
        make(kind).save_pretrained(folder / kind)
    return folder


def batches(ranks):
    return [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(at)) for at in range(ranks)]


def apart(found, expected):
    found, expected = found.cpu(), expected.cpu()
    return float((found - expected).abs().max() / expected.abs().max())


@distributed(2, 4, deadline_s=300)
def test_training_equals_peft_on_one_process(models, tmp_path, world_size):
    """Training from a PEFT adapter equals PEFT in one process: logits, gradient norm, a step, saved adapter, merged
    weights."""
    quiet()
    for kind in KINDS:
        plain = plain_twin(models, kind)
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp_path / kind)
        dist.barrier()
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        for number, sizes in enumerate(LAYOUTS[world_size]):
            where = f"{kind} {sizes}"
            with EPContext.from_groups(ParallelConfig(**sizes), device=rank_device()) as context:
                layout = context.layout
                ids = batches(layout.dp)
                for name, parameter in plain.named_parameters():
                    parameter.data.copy_(before[name])
                    parameter.grad = None
                outs = [plain(input_ids=one, labels=one, use_cache=False) for one in ids]
                torch.stack([out.loss for out in outs]).mean().backward()
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)

                model = load_pretrained(models / kind, context, experts="reference", progress=False).train()
                model = load_lora(model, tmp_path / kind, trainable=True)
                trained = [name for name, p in model.named_parameters() if p.requires_grad]
                assert all("lora_" in name for name in trained), where
                own = ids[layout.dp_rank].to(rank_device())
                out = model(input_ids=own, labels=own, use_cache=False)
                assert apart(out.logits, outs[layout.dp_rank].logits) < TOLERANCE, where
                out.loss.backward()
                sync_gradients(model, context)
                assert apart(clip_grad_norm_(model, context, 1.0), norm) < TOLERANCE, where

                for one in (plain, model):
                    torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=10.0).step()
                with torch.no_grad():
                    every = plain(input_ids=torch.cat(ids), use_cache=False).logits
                    expected = every.chunk(len(ids))[layout.dp_rank]
                    assert apart(model(input_ids=own, use_cache=False).logits, expected) < TOLERANCE, where

                saved = tmp_path / f"{kind}{number}"
                save_lora(model, saved)
                dist.barrier()
                if dist.get_rank() == 0:
                    again = transformers.AutoModelForCausalLM.from_pretrained(models / kind)
                    again = peft.PeftModel.from_pretrained(again, saved).eval()
                    with torch.no_grad():
                        assert apart(again(input_ids=torch.cat(ids), use_cache=False).logits, every) < TOLERANCE

                merged = merge_lora(model)
                with torch.no_grad():
                    assert apart(merged(input_ids=own, use_cache=False).logits, expected) < TOLERANCE, where
                assert not any("lora" in name for name in merged.state_dict())
                save_pretrained(merged, tmp_path / f"{kind}{number}merged")
                dist.barrier()
                if dist.get_rank() == 0:
                    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}{number}merged").eval()
                    with torch.no_grad():
                        assert apart(again(input_ids=torch.cat(ids), use_cache=False).logits, every) < TOLERANCE


@distributed(2)
def test_linear_layers_of_each_expert(models, tmp_path, world_size):
    """Adapters that name the linear layers of each expert load, as trained where each expert was a module.

    Factors of shared experts stay PEFT's.
    """
    quiet()
    for kind in ("qwen3_moe", "olmoe", "deepseek_v3"):
        changes = {"target_modules": PER_EXPERT, "target_parameters": None}
        if kind == "deepseek_v3":
            changes["target_modules"] = ["q_a_proj", *PER_EXPERT[1:]]
        plain = plain_twin(models, kind, **changes).eval()
        old = old_names(plain, kind) if kind == "qwen3_moe" else None
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp_path / kind)
            if old is not None:
                write_old(old, changes, tmp_path / f"{kind}_old")
        dist.barrier()
        with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
            ids = batches(2)[context.layout.dp_rank].to(rank_device())
            with torch.no_grad():
                expected = plain(input_ids=ids.cpu(), use_cache=False).logits
            for folder in [kind] if old is None else [kind, f"{kind}_old"]:
                model = load_pretrained(models / kind, context, experts="reference", progress=False)
                bare = model(input_ids=ids, use_cache=False).logits
                model = load_lora(model, tmp_path / folder)
                with torch.no_grad():
                    found = model(input_ids=ids, use_cache=False).logits
                assert apart(found, expected) < TOLERANCE < apart(bare, expected), (kind, folder)
            save_lora(model, tmp_path / f"{kind}_again")
            dist.barrier()
            again = transformers.AutoModelForCausalLM.from_pretrained(models / kind)
            again = peft.PeftModel.from_pretrained(again, tmp_path / f"{kind}_again").eval()
            with torch.no_grad():
                assert apart(again(input_ids=ids.cpu(), use_cache=False).logits, expected) < TOLERANCE, kind


@distributed(2)
def test_fresh_factors_change_nothing_and_learn(models, world_size):
    """New factors leave the logits unchanged and train.

    Also on a rank without a batch, with adapted experts only, and over a transport with its own backward.
    """
    quiet()
    for changes, way in (
        ({}, {}),
        ({"target_modules": None}, {}),
        ({"target_modules": None}, {"all2all": "nvlink_p2p"}),
    ):
        with p2p_on_cpu(), EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), max_tokens=18) as context:
            torch.manual_seed(0)
            model = load_pretrained(models / "olmoe", context, experts="reference", progress=False, **way)
            ids = batches(1)[0].to(rank_device())
            with torch.no_grad():
                expected = model(input_ids=ids, use_cache=False).logits
            model = add_lora(model, lora_config("olmoe", **changes)).train()
            with torch.no_grad():
                assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
            trained = [p for p in model.parameters() if p.requires_grad]
            assert {p.dtype for p in trained} == {torch.float32}
            optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
            for _ in range(5):
                loss = idle_step(model) if context.layout.dp_rank else model(input_ids=ids, labels=ids).loss
                loss.backward()
                sync_gradients(model, context)
                assert all(p.grad is not None for p in trained), way
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            assert context.layout.dp_rank or losses[-1] < losses[0] - 0.1, losses


@distributed(2)
def test_disabled_adapters_are_those_of_experts_too(models, world_size):
    """`disable_adapter()` disables experts' factors too.

    Preference optimization uses the model without its adapter as the reference.
    """
    quiet()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context, torch.no_grad():
        model = load_pretrained(models / "olmoe", context, experts="reference", progress=False)
        ids = batches(2)[context.layout.rank].to(rank_device())
        plain = model(input_ids=ids).logits
        model = add_lora(model, lora_config("olmoe"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        adapted = model(input_ids=ids).logits
        assert apart(adapted, plain) > 0.01
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, plain)
        assert torch.equal(model(input_ids=ids).logits, adapted)
        for name in ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload"):
            with pytest.raises(ConfigError, match=rf"{name} of PEFT would leave out the factors.*merge_lora\(model\)"):
                getattr(model, name)()
        for name, arguments in (("add_adapter", ("b", None)), ("load_adapter", ("a", "b")), ("delete_adapter", ("a",))):
            with pytest.raises(ConfigError, match=f"{name} of PEFT would leave out the factors"):
                getattr(model, name)(*arguments)
        rescaled = r"scale of all LoRA layers of PEFT was changed, from .*lora_alpha"
        for call in (lambda: model.generate(input_ids=ids, max_new_tokens=1), lambda: merge_lora(model)):
            with pytest.raises(ConfigError, match=rescaled), peft.helpers.rescale_adapter_scale(model, 0.5):
                call()
        assert torch.equal(model(input_ids=ids).logits, adapted)
        model.base_model.disable_adapter_layers()
        assert apart(merge_lora(model)(input_ids=ids).logits, adapted) < TOLERANCE


@distributed(2)
def test_modules_to_save_are_trained_and_saved(models, tmp_path, world_size):
    """`modules_to_save` works for a router that stays the model's, for shared experts that moved into the block, and
    the head."""
    quiet()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        ids = batches(2)[context.layout.rank].to(rank_device())
        for kind, names in (("olmoe", ["gate", "lm_head"]), ("llama4_text", ["feed_forward.shared_expert"])):
            model = load_pretrained(models / kind, context, experts="reference", progress=False)
            bare = model(input_ids=ids, use_cache=False).logits.detach()
            changes = {"target_modules": ["q_proj"], "target_parameters": None, "modules_to_save": names}
            model = add_lora(model, lora_config(kind, **changes))
            for number, (name, parameter) in enumerate(model.named_parameters()):
                if parameter.requires_grad and "modules_to_save" in name:
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                    parameter.data += 0.1 * noise.to(parameter.device)
            with torch.no_grad():
                expected = model(input_ids=ids, use_cache=False).logits
            assert apart(expected, bare) > 0.01, kind
            save_lora(model, tmp_path / kind)
            dist.barrier()
            again = transformers.AutoModelForCausalLM.from_pretrained(models / kind)
            again = peft.PeftModel.from_pretrained(again, tmp_path / kind).eval()
            with torch.no_grad():
                assert apart(again(input_ids=ids.cpu(), use_cache=False).logits, expected) < TOLERANCE, kind


@distributed(2)
def test_peft_alone_is_refused_what_it_would_leave_out(models, tmp_path, world_size):
    """PEFT itself is refused for routers and experts of replaced blocks, in loaded and in new adapters.

    All other targets work.
    """
    quiet()
    dense = {"target_modules": ["o_proj"], "target_parameters": None}
    cases = (
        ("qwen3_moe", {"modules_to_save": ["gate"]}, "modules_to_save names 'gate'"),
        ("qwen3_moe", {"modules_to_save": ["experts"]}, "modules_to_save names 'experts'"),
        ("qwen3_moe", {"target_parameters": ["experts.down_proj"]}, "target_parameters names 'experts.down_proj'"),
        ("qwen3_moe", {"target_modules": ["o_proj", "gate"]}, "target_parameters names 'gate.weight'"),
        ("olmoe", {"target_parameters": ["experts.down_proj"]}, "target_parameters names 'experts.down_proj'"),
        ("gpt_oss", {"modules_to_save": ["router"]}, "modules_to_save names 'router'"),
        ("qwen3_moe", {"target_modules": "all-linear"}, "target_parameters names '"),  # PEFT includes experts
        ("olmoe", {"modules_to_save": ["gate", "lm_head"]}, None),
        ("qwen3_moe", {"modules_to_save": ["lm_head"]}, None),
    )
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        ids = batches(2)[context.layout.rank].to(rank_device())
        for number, (kind, changes, text) in enumerate(cases):
            where = f"{kind} {changes}"
            folder, config = tmp_path / str(number), lora_config(kind, **dense | changes)
            if dist.get_rank() == 0:
                plain_twin(models, kind, **dense | changes).save_pretrained(folder)
            dist.barrier()

            def load(kind=kind):
                return load_pretrained(models / kind, context, experts="reference", progress=False)

            made = peft.get_peft_model(load(), config)
            if text is not None:
                for _ in range(2):
                    with pytest.raises(ConfigError, match=rf"{text}.*load_lora\(model, folder\)"):
                        made(input_ids=ids, use_cache=False)
                if kind == "gpt_oss":
                    continue  # PEFT raises KeyError: ep_moe's router has the same name elsewhere
                with pytest.raises(ConfigError, match=rf"{text}.*load_lora\(model, folder\)"):
                    peft.PeftModel.from_pretrained(load(), folder)
                continue
            made(input_ids=ids, use_cache=False)
            plain = transformers.AutoModelForCausalLM.from_pretrained(models / kind)
            plain = peft.PeftModel.from_pretrained(plain, folder).eval()
            found = peft.PeftModel.from_pretrained(load(), folder)
            with torch.no_grad():
                expected = plain(input_ids=ids.cpu(), use_cache=False).logits
                assert apart(found(input_ids=ids, use_cache=False).logits, expected) < TOLERANCE, where


@distributed(2)
def test_what_would_lose_factors_is_refused(models, tmp_path, world_size):
    quiet()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        model = load_pretrained(models / "olmoe", context, experts="reference", progress=False)
        unserved = {"lora_dropout": 0.1, "use_dora": True, "init_lora_weights": False, "layers_to_transform": [0]}
        for name, value in unserved.items():
            with pytest.raises(ConfigError, match=f"LoraConfig.{name}"):
                add_lora(model, lora_config("olmoe", **{name: value}))
        with pytest.raises(ConfigError, match=r"target_parameters names 'mlp\.gate_up', which is no parameter"):
            add_lora(model, lora_config("olmoe", target_parameters=["mlp.gate_up"]))
        for kind, router, text in (
            ("qwen3_moe", "mlp.gate", "names 'gate.weight', which is no parameter"),  # the name that PEFT makes of it
            ("gpt_oss", "mlp.router", "names 'mlp.router', which GptOssForCausalLM .* has no more"),
        ):
            known = load_pretrained(models / kind, context, experts="reference", progress=False)
            with pytest.raises(ConfigError, match=text):
                add_lora(known, lora_config(kind, target_modules=["q_proj", router], target_parameters=None))
        for kind, field, names, text in (
            ("qwen3_moe", "modules_to_save", ["gate"], "names 'gate', which Qwen3MoeForCausalLM .* has no more"),
            ("qwen3_moe", "modules_to_save", ["lm_head", "experts"], "names 'experts', which .* has no more"),
            ("qwen3_moe", "modules_to_save", ["mlp"], "names 'mlp', whose experts are on several ranks"),
            ("qwen3_moe", "modules_to_save", ["router"], "names 'router', which only expert-parallel layers have"),
            ("deepseek_v3", "modules_to_save", ["gate"], "names 'gate', which .* has no more"),
            ("deepseek_v3", "modules_to_save", ["experts"], "names 'experts', which .* has no more"),
            ("gpt_oss", "modules_to_save", ["router"], "names 'router', which .* has no more"),
            ("gpt_oss", "target_modules", r".*\.(o_proj|router)", "names .*router.*has no more"),
            ("gpt_oss", "target_parameters", ["router.weight"], "names 'router.weight', which .* has no more"),
            ("olmoe", "modules_to_save", ["experts"], "names 'experts', whose experts are on several ranks"),
        ):
            known = load_pretrained(models / kind, context, experts="reference", progress=False)
            changes = {"target_modules": ["o_proj"], "target_parameters": None, field: names}
            with pytest.raises(ConfigError, match=rf"LoraConfig\.{field} {text}"):
                add_lora(known, lora_config(kind, **changes))
        with pytest.raises(ConfigError, match="gate_proj without also targeting up_proj"):
            add_lora(model, lora_config("olmoe", target_modules=["gate_proj"]))
        with pytest.raises(ConfigError, match="save_lora needs a model of add_lora"):
            save_lora(model, tmp_path)
        adapted = add_lora(model, lora_config("olmoe"))
        with pytest.raises(ConfigError, match="would leave out the factors of experts"):
            adapted.save_pretrained(tmp_path)
        with pytest.raises(
            ConfigError, match="get_peft_model_state_dict of PEFT would leave out the factors of experts"
        ):
            peft.get_peft_model_state_dict(adapted)
        with pytest.raises(ConfigError, match="the experts have LoRA factors"):
            save_pretrained(model, tmp_path)
        with pytest.raises(ConfigError, match="have LoRA factors already"):
            lora.add_lora(moe_layers(model)[0].expert_weights, {}, 0)
        etp = EPContext.from_groups(ParallelConfig(tp=2, ep=1, etp=2), device=rank_device())
        model = load_pretrained(models / "olmoe", etp, experts="reference", progress=False)
        with pytest.raises(ConfigError, match="each expert is sharded over 2 ranks"):
            add_lora(model, lora_config("olmoe"))
        etp.destroy()


@distributed(2)
@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
def test_a_model_of_peft_is_no_checkpoint(kind, models, tmp_path, world_size):
    """Exporting, loading and saving a PeftModel is refused, as its weights have other names.

    Also if only attention has factors.
    """
    quiet()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device()) as context:
        known = load_pretrained(models / kind, context, experts="reference", progress=False)
        model = add_lora(known, lora_config(kind, target_modules=["q_proj"], target_parameters=None))
        for call in (
            lambda: list(export_weights(model)),
            lambda: load_weights(model, {}),
            lambda: save_pretrained(model, tmp_path / "saved"),
        ):
            with pytest.raises(ConfigError, match=r"PeftModel.* call ep_moe\.integrations\.lora\.merge_lora\(model\)"):
                call()
        names = {name for name, _ in export_weights(merge_lora(model))}
        assert any(name.endswith("q_proj.weight") for name in names)
