"""Our names of a checkpoint's tensors: those of transformers' causal language models, whatever wraps them."""

from __future__ import annotations

import re
from collections.abc import Container

# multimodal models keep the text model deeper; base models keep it without `model.`
_TEXT = re.compile(r"^(?:(?:thinker|model|language_model|text_model|llm)\.)*(?=(?:layers\.\d+|embed_tokens|norm)\.)")
_HEAD = re.compile(r"^(?:(?:thinker|model|language_model|text_model|llm)\.)+(?=lm_head\.)")
_BLOCK = r"(?P<block>\.(?:mlp|block_sparse_moe|feed_forward)\.)"
_RENAMED = (
    # Hunyuan
    (re.compile(rf"{_BLOCK}gate\.wg\.weight"), r"\g<block>gate.weight"),
    # Granite
    (re.compile(rf"{_BLOCK}router\.layer\.weight"), r"\g<block>gate.weight"),
    (re.compile(rf"{_BLOCK}input_linear\.weight"), r"\g<block>experts.gate_up_proj"),
    (re.compile(rf"{_BLOCK}output_linear\.weight"), r"\g<block>experts.down_proj"),
)
_MARKS = (".wg.", ".router.layer.", "put_linear.")
_FACTORS = (".scale", ".qscale_weight")  # of blocks, under other names


def our_name(name: str, names: Container[str]) -> str:
    """Our name of a tensor. names: all of the checkpoint"""
    if name.endswith(_FACTORS) and f"{name.rpartition('.')[0]}.weight" in names:
        name = f"{name.rpartition('.')[0]}.weight_scale_inv"
    if not name.startswith("model.layers."):
        name = _HEAD.sub("", _TEXT.sub("model.", name)).removeprefix("language_model.")
    if any(mark in name for mark in _MARKS):
        for pattern, ours in _RENAMED:
            name = pattern.sub(ours, name)
    return name
