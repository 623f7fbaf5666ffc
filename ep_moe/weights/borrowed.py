"""Expert weights that belong to another module. Each call lends its tensors to the kernels; nothing is stored here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from ep_moe.errors import ConfigError
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.weights.expert_weights import ExpertWeights
from ep_moe.weights.layouts.base import WeightLayout
from ep_moe.weights.parts import connect_in_autograd


class BorrowedWeights(ExpertWeights):
    """The weights of this rank's slots, in tensors that the owner lends for one call.

    Gradients return to the owner as sums over the EP group. They are neither divided nor summed over other EP groups.

    The arguments are those of `ExpertSlots`. The layout must be canonical and the scheme plain (not quantized).
    """

    def __init__(self, *args: Any, device: torch.device | None = None, **options: Any) -> None:
        self._lent: dict[str, Tensor] = {}
        super().__init__(*args, device=torch.device("meta"), **options | {"trainable": False})
        assert self.scheme.plain, "codes cannot be lent"
        assert type(self.weight_layout) is WeightLayout, "the lender has the canonical layout"
        self._device = torch.get_default_device() if device is None else device
        self._parameters.clear()

    @contextmanager
    def borrow(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let kernels read these tensors inside the `with` block.

        Args:
            tensors: Canonical tensors [L, ...], by the names of the stored tensors. To train, pass tensors that were
                computed from the owner's parameters. An expert that receives no row gets a zero gradient, so that all
                ranks enter the owner's gradient reduction.
        """
        assert tensors.keys() == set(self.names), f"{sorted(tensors)} are not {self.names}"
        lent = dict(tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in lent.values()):
            lent = connect_in_autograd({name: tensor.detach() for name, tensor in lent.items()}, list, lent.values())
        before, self._lent = self._lent, lent
        self._dtype = lent["w13"].dtype  # FSDP2 may lend another dtype than it stores; backward reads it after the call
        try:
            yield
        finally:
            self._lent = before

    @property
    def _raw_tensors(self) -> dict[str, Any]:
        return self._lent

    def _join(self) -> dict[str, Tensor]:
        return self._lent

    @property
    def any_requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self._lent.values())

    def stored_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors lent to the current call, or those passed to `run_with_tensors`. Empty between calls."""
        return self._lent if self._joined is None else self._joined

    def reset_parameters(self) -> None:
        """Do nothing: the owner initializes its parameters."""

    @property
    def dtype(self) -> torch.dtype:
        return self._lent["w13"].dtype if self._lent else self._dtype

    @property
    def device(self) -> torch.device:
        return self._lent["w13"].device if self._lent else self._device

    def set_expert_map(self, expert_map: ExpertMap) -> NoReturn:
        self._refuse("move between ranks")

    def update_expert(self, logical_id: int, tensors: Mapping[str, Tensor]) -> NoReturn:
        self._refuse("are written")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> NoReturn:
        self._refuse("are saved")

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        self._refuse("are loaded")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"these experts belong to a transformers model and {what} only through it; use the model's own "
            "parameters and methods, or load it with ep_moe.integrations.transformers.load_pretrained"
        )
