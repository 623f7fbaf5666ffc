"""Test the perplexities of `ep-moe run`, which must equal transformers', and what a rebalance counts."""

import json
from unittest import mock

import pytest
import torch

from ep_moe import ConfigError, EPContext, MoEConfig, MoELayer, ParallelConfig, Routing
from ep_moe.cli import perplexity
from ep_moe.cli.run import RunOptions, is_exact
from ep_moe.testing import distributed, rank_device
from tests.fixtures.distributed_cases import gather_from_all_ranks
from tests.fixtures.helpers import fill

CONFIG = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=8, top_k=2)


@pytest.mark.parametrize(
    ("options", "dtype", "exact"),
    [
        ({}, torch.float32, True),
        ({}, torch.bfloat16, False),
        ({"wire": "fp8_block"}, torch.float32, False),
        ({"quantization": "fp8_dynamic"}, torch.float32, False),
    ],
)
def test_what_rounds_nothing_must_be_exact(options, dtype, exact):
    assert is_exact(RunOptions(**options), dtype) is exact


@distributed(2)
def test_bytes_between_tp_ranks_are_those_that_both_received(world_size):
    received = []

    class Counted(perplexity.ExpertBalancer):
        def stats(self):
            found = super().stats()
            received.append(found.received_bytes)
            return found

    context = EPContext.from_groups(ParallelConfig(tp=2), device=rank_device(), deadline_s=20)
    with context, mock.patch.object(perplexity, "ExpertBalancer", Counted):
        layer = fill(MoELayer(CONFIG, context))
        x, weights = torch.ones(4, 32, device=context.device), torch.ones(4, 2, device=context.device)
        ids = torch.tensor([[0, 1]] * 4, device=context.device)  # both on rank 0

        def forward(_):
            layer.forward_routed(x, Routing(ids, weights))
            return 1.0, 1

        found = perplexity.rebalance([layer], context, forward, 2)
        on_ranks = gather_from_all_ranks(received[-1])
    assert min(on_ranks) > 0
    assert found.sent_bytes == sum(on_ranks)


def test_a_tokenizer_of_the_repositorys_own_code_is_refused_and_not_asked_about(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    asked = []
    (tmp_path / "config.json").write_text('{"model_type": "no-model-of-transformers"}')
    named = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["someone/model--tokens.Theirs", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    monkeypatch.setattr("builtins.input", asked.append)
    with pytest.raises(ConfigError, match="a tokenizer that transformers cannot make without code of its repository"):
        perplexity._tokenizer(tmp_path)
    assert not asked


def test_a_rank_without_windows_serves_its_experts_in_the_layers_dtype():
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(CONFIG, context, experts="reference", dtype=torch.bfloat16)
        reader = perplexity.TextReader(None, [layer], torch.zeros(0, 8, dtype=torch.int64), 2, context)
        assert (reader.steps, reader.forward(0)) == (0, (0.0, 0))
