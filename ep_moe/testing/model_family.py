"""Checks a model family's entry on a tiny model: logits must equal those of transformers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ep_moe.context import EPContext
from ep_moe.errors import EPMoEError

_SHAPE = (2, 24)  # shape of the probe batch
_SEEN = 100  # the least change of the logits that a tensor must cause, as a multiple of the tolerance


def check_family(config: Any, *, context: EPContext | None = None, tolerance: float = 1e-5) -> dict[str, float]:
    """Compare the logits of a tiny random model with expert-parallel blocks with those of transformers' own model.

    First, the blocks of the model are replaced in memory. Then transformers saves the model in both formats, and it is
    loaded. Last, each number and flag of the configuration is changed in turn. If that changes the logits of
    transformers, ours must change equally. So an entry that ignores a scaling factor or a flag fails, even if the
    configuration has its neutral value.

    Args:
        config: The transformers configuration of a tiny causal language model of the family, in float32.
        context: A context of one rank. Default: one on the CPU.
        tolerance: The largest allowed difference of logits, relative to the largest logit.

    Returns:
        The relative differences, by what was compared: "memory", "save_original_format=True", "norm_topk_prob=False"
        and so on. Changes that transformers or ep_moe refuses, or that do not change the logits, are left out.

    Raises:
        AssertionError: Logits differ. Or a tensor of a block does not affect the probe, so an entry could ignore it.
        ConfigError, CheckpointError: The entry does not cover a tensor.
    """
    from ep_moe.integrations.transformers import expert_parallel, load_pretrained

    with torch.random.fork_rng(devices=[]):
        return _FamilyCheck(config, context, tolerance, expert_parallel, load_pretrained).check()


class _FamilyCheck:
    """One tiny model and its probe batch."""

    def __init__(
        self, config: Any, context: EPContext | None, tolerance: float, expert_parallel: Any, load_pretrained: Any
    ) -> None:
        self.config, self.tolerance = config, tolerance
        self.context = context or EPContext.local(torch.device("cpu"))
        self.expert_parallel, self.load_pretrained = expert_parallel, load_pretrained
        device = self.context.device
        generator = torch.Generator("cpu").manual_seed(0)
        most = config.get_text_config().vocab_size
        self.ids = torch.randint(0, most, _SHAPE, generator=generator, device="cpu").to(device)
        self.model = self._built(config)
        for tensor in self.model.state_dict().values():
            if tensor.is_floating_point():  # a new model has tensors of zeros and ones, which may hide an omission
                tensor.add_(torch.randn(tensor.shape, generator=generator, device="cpu").to(device) / 5)
        self.model.eval()
        self.expected = self._logits(self.model)
        self.found: dict[str, float] = {}

    def check(self) -> dict[str, float]:
        replaced = self._replaced(self.model)
        self._compare("memory", replaced, self.expected)
        self._check_seen(replaced)
        for original in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                self._save(Path(folder), original)
                loaded = self.load_pretrained(folder, self.context, dtype=torch.float32, progress=False)
            self._compare(f"save_original_format={original}", loaded, self.expected)
        for name, value in _changes(self.config.get_text_config()):
            self._check_changed(name, value)
        return self.found

    def _check_changed(self, name: str, value: Any) -> None:
        config = copy.deepcopy(self.config)
        try:
            setattr(config.get_text_config(), name, value)
            model = self._built(config)
            model.load_state_dict(self.model.state_dict())
            expected = self._logits(model.eval())
        except Exception:  # transformers cannot build such a model, or its tensors have other shapes
            return
        if not expected.isfinite().all() or self._apart(expected, self.expected) < self.tolerance:
            return
        try:
            replaced = self._replaced(model)
        except EPMoEError:
            return  # ep_moe refuses it, which is correct
        self._compare(f"{name}={value!r}", replaced, expected)

    def _check_seen(self, replaced: Any) -> None:
        """Check that each tensor of a replaced block affects the logits of transformers' model."""
        kept = set(replaced.state_dict())
        state = self.model.state_dict()
        unseen = []
        for name, tensor in state.items():
            if name in kept or not tensor.is_floating_point():
                continue
            before = tensor.clone()
            tensor.copy_(before.flip(0) if len(before) > 1 and not torch.equal(before.flip(0), before) else -before)
            if self._apart(self._logits(self.model), self.expected) < _SEEN * self.tolerance:
                unseen.append(name)
            tensor.copy_(before)
        assert not unseen, (
            f"other numbers in {', '.join(unseen)} do not change the logits of {type(self.model).__name__}: an entry "
            f"could forget them; make a larger model"
        )

    def _compare(self, what: str, model: Any, expected: Tensor) -> None:
        apart = self._apart(self._logits(model), expected)
        assert apart <= self.tolerance, (
            f"{what}: logits of {type(model).__name__} with expert-parallel blocks differ from transformers' by "
            f"{apart:.1e} of the largest, more than {self.tolerance:g}: the entry leaves something out"
        )
        self.found[what] = apart

    def _replaced(self, model: Any) -> Any:
        return self.expert_parallel(copy.deepcopy(model), self.context)

    def _built(self, config: Any) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        return model.to(self.context.device)

    def _save(self, folder: Path, original: bool) -> None:
        model = copy.deepcopy(self.model)
        model.should_save_on_this_rank = lambda *_: True  # each rank of a job saves to its own folder
        model.save_pretrained(folder, save_original_format=original)

    @torch.no_grad()
    def _logits(self, model: Any) -> Tensor:
        found: Tensor = model(input_ids=self.ids, use_cache=False).logits
        return found

    @staticmethod
    def _apart(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).abs().max() / expected.abs().max())


def _changes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield other values for each flag and number of a configuration, as (field, value)."""
    for name, value in sorted(config.to_dict().items()):
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int):
            yield from ((name, other) for other in (value + 1, value - 1) if other > 0)
        elif isinstance(value, float):
            yield name, value * 1.5 + 0.1
