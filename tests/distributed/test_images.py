"""Models with images, videos or sounds, where one rank has only text, equal the original models."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import LlavaForConditionalGeneration

from ep_moe import CheckpointError, EPContext
from ep_moe.integrations.generic import ExpertParallelExperts
from ep_moe.integrations.transformers import (
    expert_parallel,
    export_weights,
    load_pretrained,
    moe_layers,
    save_pretrained,
)
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet, save, tensors_of
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error
from tests.fixtures.transformers_models import (
    tiny_ids,
    tiny_llava,
    tiny_picture,
    tiny_sound,
    tiny_transformers_model,
    tiny_video,
)

BOUND = 1e-5  # relative to the largest number: float32 rounding through the layers
# ernie4_5_vl_moe has separate experts for image rows; dots3_note has experts in its vision tower, which are not split
KINDS = ("qwen3_vl_moe", "glm4v_moe", "llava", "qwen3_omni_moe_thinker", "ernie4_5_vl_moe", "dots3_note")
if transformers.__version__ < "5.24":  # untested with older versions
    pytest.skip("written against the models of transformers 5.24", allow_module_level=True)


def model_of(kind):
    return (tiny_llava() if kind == "llava" else tiny_transformers_model(kind)).to(rank_device())


def inputs_of(model):
    """Return this rank's batches: image and video (and sound for the thinker); the last rank has text only."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    picture = tiny_picture(model)  # also sets the model's image token
    text = {"input_ids": tiny_ids()[rank % 2 :][:1, : 9 + rank]}
    blind = ranks > 1 and rank == ranks - 1
    batches = [text] if blind else [picture]
    if model.config.model_type != "llava":
        batches.append(text if blind else tiny_video(model))
    if model.config.model_type.startswith("qwen3_omni"):
        batches.append(text if blind else tiny_sound(model))
    return [{name: tensor.to(rank_device()) for name, tensor in batch.items()} for batch in batches]


@torch.no_grad()
def logits(model, batch):
    return model(**batch, use_cache=False).logits


@distributed(1, 2, deadline_s=180)
def test_logits_with_images_videos_and_sounds(world_size):
    quiet()
    for kind in KINDS:
        with EPContext.from_groups(device=rank_device()) as context:
            model = model_of(kind)
            batches = inputs_of(model)
            expected = [logits(model, batch) for batch in batches]
            for batch, one in zip(batches, expected, strict=True):
                for part in ("pixel_values", "pixel_values_videos", "input_features"):
                    if part in batch:  # check that the input matters
                        assert (logits(model, batch | {part: batch[part] * 2}) - one).abs().max() > 100 * BOUND
            if kind == "dots3_note":
                with pytest.warns(UserWarning, match=r"the experts of model\.vision_tower\S* stay whole on every rank"):
                    expert_parallel(model, context)
            else:
                expert_parallel(model, context)
            for batch, one in zip(batches, expected, strict=True):
                apart = {"rtol": 0, "atol": BOUND * float(one.abs().max())}
                torch.testing.assert_close(logits(model, batch), one, **apart, msg=lambda m, kind=kind: f"{kind}: {m}")


@distributed(2, deadline_s=120)
def test_gradients_where_one_rank_has_an_image(world_size):
    """Experts of image rows get their gradients also on the rank that has no image."""
    quiet()
    with EPContext.from_groups(device=rank_device()) as context:
        plain, model = model_of("ernie4_5_vl_moe"), model_of("ernie4_5_vl_moe")
        batch, _ = inputs_of(model)
        inputs_of(plain)
        expert_parallel(model, context)
        model(**batch, use_cache=False).logits.sum().backward()
        both = [tiny_picture(plain), {"input_ids": tiny_ids()[1:][:1, :10]}]
        for each in both:
            each = {name: tensor.to(rank_device()) for name, tensor in each.items()}
            plain(**each, use_cache=False).logits.sum().backward()
        used = 0
        for name, one in model.named_modules():
            if not isinstance(one, ExpertParallelExperts):
                continue
            theirs = plain.get_submodule(name)
            for expert in one.local_experts:
                own, grad = one.moe.expert_weights.get_submodule(str(expert)).w2.grad, theirs.down_proj.grad[expert]
                torch.testing.assert_close(own, grad, rtol=0, atol=BOUND * float(theirs.down_proj.grad.abs().max()))
                used += "vision_moe" in name and bool(grad.any())
        assert sum(gather_from_all_ranks(used)), "no expert of image rows was used"


@distributed(1, 2)
def test_experts_for_text_and_for_images_are_saved_together(world_size):
    """transformers joins both modules of experts of a layer in published files (ERNIE 4.5 VL)."""
    quiet()
    folder = Path(gather_from_all_ranks(tempfile.mkdtemp())[0])
    plain, model = model_of("ernie4_5_vl_moe"), model_of("ernie4_5_vl_moe")
    with EPContext.from_groups(device=rank_device()) as context:
        expert_parallel(model, context)
        save_pretrained(model, folder / "ours")
        exported = dict(export_weights(model))
        if dist.get_rank() == 0:
            save(plain, folder / "theirs")
            ours, theirs = tensors_of(folder / "ours"), tensors_of(folder / "theirs")
            assert ours.keys() == exported.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert torch.equal(ours[name], tensor), name
                assert torch.equal(exported[name].cpu(), tensor), name
        text = same_error(CheckpointError, lambda: load_pretrained(folder / "ours", context, progress=False))
        assert "moe_intermediate_size" not in text, "a list of sizes is not a mistake of the file"
        dist.barrier()


@pytest.fixture(scope="session")
def llava(tmp_path_factory):
    quiet()
    folder = tmp_path_factory.mktemp("llava")
    save(tiny_llava(), folder)
    return folder


@distributed(2, deadline_s=120)
def test_a_wrapper_of_a_known_family_is_loaded_whole(world_size, llava):
    quiet()
    plain = tiny_llava()
    with EPContext.from_groups(device=rank_device()) as context:
        model = load_pretrained(llava, context, progress=False)
        assert type(model) is LlavaForConditionalGeneration
        assert len(moe_layers(model)) == 2
        plain = plain.to(rank_device())
        (batch,), _ = inputs_of(plain), inputs_of(model)
        expected = logits(plain, batch)
        torch.testing.assert_close(logits(model, batch), expected, rtol=0, atol=BOUND * float(expected.abs().max()))
        save_pretrained(model, llava / "again")
        if dist.get_rank() == 0:
            again = LlavaForConditionalGeneration.from_pretrained(llava / "again").state_dict()
            for name, tensor in plain.state_dict().items():
                assert torch.equal(again[name].to(tensor.device), tensor), name
