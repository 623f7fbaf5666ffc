"""Test which tensors of a checkpoint are reported because a model has no place for them."""

from types import SimpleNamespace

import pytest

from ep_moe.checkpoint.unexpected_tensors import unexpected


def said(*names, ignored=None, multimodal=False, known=("model.norm.weight", "lm_head.weight")):
    model = SimpleNamespace(state_dict=lambda: dict.fromkeys(known), _keys_to_ignore_on_load_unexpected=ignored)
    source = SimpleNamespace(
        names=lambda: names,
        companions=lambda name: (f"{name}_scale",),
        declared=SimpleNamespace(multimodal=multimodal),
    )
    return unexpected(model, source, ["model.layers.0.mlp"])


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",  # the model's own parameter
        "model.norm.weight_scale",  # its scale
        "model.layers.0.mlp.more",  # within a MoE block, which is checked separately
        "model.rotary_emb.inv_freq",  # a buffer that the model computes
    ],
)
def test_a_tensor_with_a_place_or_without_a_use_is_not_named(name):
    assert said(name) is None


@pytest.mark.parametrize("name", ["model.norm.bias", "model.layers.0.mlp2.more", "mtp.weight"])
def test_a_tensor_without_a_place_is_named(name):
    assert said("lm_head.weight", name) == f"{name} is not loaded: SimpleNamespace has no such weights"


@pytest.mark.parametrize("ignored", [[r"^mtp\."], ["nothing", r"mtp\..*weight"]])
def test_what_the_models_class_ignores_is_not_named(ignored):
    """Tensors that the model's class ignores are not named. transformers ignores them silently too."""
    assert said("mtp.weight", ignored=ignored) is None
    assert said("mtp.weight", ignored=["nothing"]).startswith("mtp.weight is not loaded")


def test_of_a_multimodal_model_other_parts_are_not_named():
    """Tensors of other parts of a multimodal model are not named, because the text model has no place for them."""
    images, text = "vision.blocks.0.weight", "model.norm.bias"
    assert said(images, text, multimodal=True).startswith(f"{text} is not loaded")
    assert said(images, text).startswith(f"{images}, {text} is not loaded")
