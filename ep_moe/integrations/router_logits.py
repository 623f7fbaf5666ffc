"""`output_router_logits=True` of a Hugging Face model whose MoE blocks were replaced."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ep_moe.errors import ConfigError
from ep_moe.training.balance import router_logits


class RouterLogits:
    """Puts the layers' router logits where transformers puts those of its own routers.

    transformers collects outputs of its router classes, which the replaced blocks do not have. Its models compute the
    auxiliary loss from what the inner model returns, and so need no change.
    """

    def __init__(self) -> None:
        self._open: tuple[ExitStack, list[Tensor], bool] | None = None  # of the call under way, if it wants them

    def attach(self, model: PreTrainedModel) -> None:
        """To the model whose forward returns `router_logits`, such as MixtralModel."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        # as transformers' capture_outputs asks
        if not kwargs.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            return None
        if "router_logits" not in (model._can_record_outputs or {}):
            raise ConfigError(
                f"output_router_logits=True: {type(model).__name__} of transformers returns no router logits; set it "
                f"to False, and record them with ep_moe.training.router_logits(model)"
            )
        as_dict = kwargs.get("return_dict", getattr(model.config, "return_dict", True))
        stack = ExitStack()
        self._open = stack, stack.enter_context(router_logits(model)), as_dict is not False
        return args, kwargs | {"return_dict": True}

    def _end(self, model: PreTrainedModel, args: Any, output: Any) -> Any:
        if self._open is None:
            return None
        (stack, recorded, as_dict), self._open = self._open, None
        stack.close()
        if output is None:  # the call raises
            return None
        output["router_logits"] = tuple(recorded)
        return output if as_dict else output.to_tuple()
