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
# factors of blocks under other names
_FACTORS = re.compile(r"\.(?:scale|qscale_weight)$")


def our_name(name: str, names: Container[str]) -> str:
    """Our name of a tensor. names: all of the checkpoint"""
    if (factors := _FACTORS.search(name)) is not None and f"{name[: factors.start()]}.weight" in names:
        name = f"{name[: factors.start()]}.weight_scale_inv"
    name = _HEAD.sub("", _TEXT.sub("model.", name)).removeprefix("language_model.")
    for pattern, ours in _RENAMED:
        name = pattern.sub(ours, name)
    return name
