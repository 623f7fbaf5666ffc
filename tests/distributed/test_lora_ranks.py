"""One rank's fault with a LoRA adapter, or adapters that differ between ranks, are one error on all ranks."""

import functools

import pytest
import torch
import torch.distributed as dist

from ep_moe import CheckpointError, ConfigError, EPContext, ParallelConfig
from ep_moe.integrations.lora import add_lora, load_factors, load_lora, save_lora
from ep_moe.integrations.transformers import load_pretrained
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import quiet
from tests.fixtures.distributed_cases import same_error
from tests.fixtures.interface_models import interface_model
from tests.fixtures.lora_models import lora_config

pytest.importorskip("peft")


@pytest.fixture(scope="session")
def olmoe(tmp_path_factory):
    quiet()
    folder = tmp_path_factory.mktemp("lora_ranks")
    interface_model("olmoe").save_pretrained(folder)
    return folder


@distributed(2)
def test_an_adapter_that_cannot_be_written_is_one_error_on_all_ranks(olmoe, tmp_path, world_size):
    """A write error of the first rank, which writes the adapter, raises on all ranks."""
    quiet()
    (tmp_path / "file").touch()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        model = load_pretrained(olmoe, context, experts="reference", progress=False)
        model = add_lora(model, lora_config("olmoe", target_modules=[]))
        text = same_error(CheckpointError, lambda: save_lora(model, tmp_path / "file" / "adapter"))
        assert "file/adapter: the adapter cannot be written: " in text


@distributed(2)
def test_ranks_with_other_adapters_are_named(olmoe, tmp_path, world_size):
    """Each rank would scale its own experts otherwise, in silence. Other targets ended processes in a sum."""
    quiet()
    rank = dist.get_rank()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        model = load_pretrained(olmoe, context, experts="reference", progress=False)
        for changes, seed, words in (
            ({"lora_alpha": 16}, 0, 'LoraConfig.lora_alpha: "8" on rank 0, "16" on rank 1'),
            ({"target_parameters": ["experts.down_proj"]}, 0, "LoraConfig.target_parameters: "),
            ({"target_modules": ["q_proj"]}, 0, "LoraConfig.target_modules: "),
            ({}, 1, "seed: 0 on rank 0, 1 on rank 1"),
        ):
            config = lora_config("olmoe", **(changes if rank else {}))
            call = functools.partial(add_lora, model, config, seed=seed * rank)
            assert f"add_lora: the ranks were given different values; pass the same values on all ranks. {words}" in (
                same_error(ConfigError, call)
            )
        folder = tmp_path / "adapter"
        save_lora(add_lora(model, lora_config("olmoe")), folder)
        again = load_pretrained(olmoe, context, experts="reference", progress=False)
        text = same_error(CheckpointError, lambda: load_lora(again, tmp_path / "nowhere" if rank else folder))
        assert f"rank 1: {tmp_path}/nowhere/adapter_config.json cannot be read: " in text
        load_lora(again, folder)


@distributed(2)
def test_ranks_that_read_other_adapters_are_named(olmoe, tmp_path, world_size):
    """Hosts may have another file under one name. Their experts would be of different adapters, in silence."""
    quiet()
    with EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=30) as context:
        model = load_pretrained(olmoe, context, experts="reference", progress=False)
        trained = add_lora(model, lora_config("olmoe"))
        save_lora(trained, tmp_path / "one")
        factor = next(parameter for name, parameter in trained.named_parameters() if "lora_B" in name)
        with torch.no_grad():
            factor.add_(1.0)
        save_lora(trained, tmp_path / "other")
        own = tmp_path / ("other" if dist.get_rank() else "one")
        again = load_pretrained(olmoe, context, experts="reference", progress=False)
        for call in (lambda: load_lora(again, own), lambda: load_factors(trained, own)):
            assert 'adapter_model.safetensors: "checksum ' in same_error(ConfigError, call)
        load_factors(trained, tmp_path / "one")
        assert torch.equal(factor, torch.zeros_like(factor))
