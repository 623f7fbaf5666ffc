"""Arguments that transformers' `from_pretrained` takes and `load_pretrained` takes too, or refuses by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ep_moe.checkpoint.hub import HubOptions
from ep_moe.checks import did_you_mean, shown
from ep_moe.errors import ConfigError


class FromPretrainedOptions(HubOptions, total=False):
    """Options of the lookup, and further arguments of `from_pretrained`.

    torch_dtype: the older name of `dtype`; trust_remote_code: False, because no code of a repository is run;
    low_cpu_mem_usage, use_safetensors, weights_only: no effect, because each rank reads only its part of safetensors
    """

    torch_dtype: torch.dtype | str | None
    trust_remote_code: bool | None
    low_cpu_mem_usage: bool | None
    use_safetensors: bool | None
    weights_only: bool


_NO_EFFECT = ("low_cpu_mem_usage",)  # transformers does not use it any more
_ALWAYS_TRUE = ("use_safetensors", "weights_only")
_DEVICE = "leave it out: the model is on the context's device, EPContext.from_torchrun(device=...)"
_RANKS = "leave it out, and give the ranks to the context: EPContext.from_torchrun(ParallelConfig(tp=...))"
_QUANTIZATION = "pass quantization= for the experts; the checkpoint's own quantization is read without it"
_KERNELS = "pass experts=, a kernel of ep_moe"
_CACHE = "download the model before, by `hf download`"
_REMEDIES = {
    "trust_remote_code": "leave it out: load_pretrained runs transformers' own class, and no code of a repository",
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict"), _DEVICE),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), _RANKS),
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), _QUANTIZATION),
    **dict.fromkeys(("force_download", "proxies"), _CACHE),
    "experts_implementation": _KERNELS,
    **dict.fromkeys(("use_kernels", "kernel_config", "allow_all_kernels", "fusion_config"), _KERNELS),
    "state_dict": "write a checkpoint, or call expert_parallel(model, context)",
    "generation_config": "set model.generation_config after the call",
    **dict.fromkeys(("adapter_kwargs", "adapter_name"), "call ep_moe.integrations.lora.load_lora(model, folder)"),
    "key_mapping": "rename the tensors in the files",
    "disable_mmap": "leave it out: each rank reads the parts of the files that it needs",
    "tqdm_class": "pass progress=",
    "ignore_mismatched_sizes": "pass config= with the sizes of the files",
    "output_loading_info": "leave it out: missing and unexpected tensors are errors or warnings",
    **dict.fromkeys(_ALWAYS_TRUE, "leave it out: load_pretrained reads safetensors files alone"),
    **dict.fromkeys(("variant", "gguf_file"), "give the folder of a checkpoint with model*.safetensors files"),
}


def check_arguments(given: Mapping[str, Any], named: Iterable[str]) -> HubOptions:
    """Check the further arguments of `load_pretrained`, and return the options of the lookup among them.

    An argument with a value that means what `load_pretrained` does anyway (None, False) is accepted, as in
    `from_pretrained`.

    Args:
        given: The arguments by name.
        named: The names of the arguments that `load_pretrained` has itself.

    Raises:
        ConfigError: `load_pretrained` cannot do what an argument asks for.
    """
    known = HubOptions.__annotations__
    for name, value in given.items():
        if name in known or name in _NO_EFFECT or name == "torch_dtype":
            continue
        if name not in _REMEDIES:
            raise ConfigError(
                f"load_pretrained has no argument {name!r}{did_you_mean(name, {*named, *known})}; "
                f"a field of the model's configuration is passed as config=AutoConfig.from_pretrained(path, {name}=...)"
            )
        if value not in ((None, True) if name in _ALWAYS_TRUE else (None, False)):
            raise ConfigError(f"load_pretrained does not take {name}={shown(value)}; {_REMEDIES[name]}")
    return {name: value for name, value in given.items() if name in known}  # type: ignore[return-value]


def dtype_asked_for(dtype: Any, torch_dtype: Any) -> torch.dtype | None:
    """Return the dtype that two arguments of one meaning ask for. None: that of the checkpoint ("auto").

    Raises:
        ConfigError: An argument is no dtype and no name of one, or the two differ.
    """
    found = [
        as_dtype(name, value) for name, value in (("dtype", dtype), ("torch_dtype", torch_dtype)) if value is not None
    ]
    if len(set(found)) > 1:
        raise ConfigError(f"dtype={dtype!r} and torch_dtype={torch_dtype!r} differ; pass dtype alone")
    return found[0] if found else None


def as_dtype(argument: str, value: Any) -> torch.dtype | None:
    """Return a dtype or the dtype of a name. None and "auto" return None. Raise ConfigError for any other value."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"{argument} must be a torch.dtype, its name such as 'bfloat16', or 'auto', got {shown(value)}"
        )
    return found
