"""`generate` of expert-parallel models whose ranks have different work, and ranks without a batch."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_moe import EPContext, InputError, ParallelConfig, PeerTimeout
from ep_moe.integrations.forward_sync import GenerationSync
from ep_moe.integrations.transformers import expert_parallel, idle_step, moe_layers
from ep_moe.parallel.groups import default_store
from ep_moe.testing import distributed, rank_device
from ep_moe.training import exclude_experts, record_routing, replay_routing, router_logits, sync_gradients
from tests.fixtures.checkpoint_files import FAMILIES, quiet, tiny_model
from tests.fixtures.distributed_cases import gather_from_all_ranks, same_error

LAYOUTS = {
    2: [{"dp": 2}, {"dp": 2, "ep": 1, "etp": 2}],
    4: [{"dp": 2, "tp": 2}, {"dp": 4, "ep": 2}, {"pp": 2, "dp": 2}],
}
GREEDY = {"do_sample": False, "pad_token_id": 0}
WAYS = {
    "greedy": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "prefill in chunks": {"prefill_chunk_size": 2},
}


def made(sizes, family="mixtral", deadline_s=60):
    quiet()
    context = EPContext.from_groups(ParallelConfig(**sizes), device=rank_device(), deadline_s=deadline_s)
    model = expert_parallel(tiny_model(family).to(rank_device()), context)
    return context, model, tiny_model(family).to(rank_device())


def prompt(layout, sequences=None):
    """Return the prompt of a dp rank. Ranks differ in the number and length of sequences."""
    at = layout.dp_rank + layout.dp * layout.pp_rank
    shape = (1 + at % 2 if sequences is None else sequences, 5 + at)
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(at)).to(rank_device())


@distributed(2, 4)
def test_ranks_that_end_at_different_lengths(world_size):
    for sizes in LAYOUTS[world_size]:
        context, model, plain = made(sizes)
        with context:
            for name, way in WAYS.items() if sizes == {"dp": 2} else [("greedy", {})]:
                ids = prompt(context.layout, 1 if name == "prompt lookup" else None)
                how = {"max_new_tokens": 3 + 4 * context.layout.dp_rank} | GREEDY | way
                assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how)), f"{sizes} {name}"
                assert torch.equal(model.generate(ids, **how, synced_gpus=True), plain.generate(ids, **how))
            numbers = gather_from_all_ranks(context.flight_recorder.number)
            assert len({numbers[rank] for rank in context.rank_groups["lockstep"].ranks}) == 1, "ranks out of step"


@distributed(2)
def test_what_ends_a_sequence_and_who_looks_on(world_size):
    """Stopping criteria, streamers, EOS, and dict outputs work as in transformers."""
    context, model, plain = made({"dp": 2}, "qwen3_moe")

    class Streamer(list):
        def put(self, tokens):
            self.append(tokens.tolist())

        def end(self):
            self.append("end")

    with context:
        ids = prompt(context.layout, 1)
        length = 8 + 3 * context.layout.dp_rank
        stop = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= length, device=ids.device)]
        found, expected = (
            m.generate(
                ids, max_new_tokens=9, stopping_criteria=stop, streamer=s, return_dict_in_generate=True, **GREEDY
            )
            for m, s in ((model, Streamer()), (plain, Streamer()))
        )
        assert torch.equal(found.sequences, expected.sequences)
        eos = int(plain.generate(ids, max_new_tokens=3, **GREEDY)[0, -1]) if context.layout.dp_rank else None
        how = {"max_new_tokens": 7, "eos_token_id": eos} | GREEDY
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


@distributed(2)
def test_a_compiled_decode(world_size):
    """Decoding through a compiled `model.__call__` works, as transformers does it on a GPU."""
    context, model, plain = made({"dp": 2})
    with context:
        model._valid_auto_compile_criteria = lambda *_: True
        graphs = []
        backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
        model.get_compiled_call = lambda _: torch.compile(model.__call__, backend=backend)
        ids = prompt(context.layout)
        how = {"max_new_tokens": 3 + 2 * context.layout.dp_rank, "cache_implementation": "static"} | GREEDY
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
        assert len(graphs) >= 3, "a graph in front of each block, and one behind the last"


@distributed(2)
def test_two_models_of_one_context(world_size):
    """An assistant model with expert-parallel blocks may run more often on one rank, and ranks may use different
    models."""
    context, model, plain = made({"dp": 2}, "qwen3_moe")
    with context:
        small = expert_parallel(tiny_model("qwen3_moe", num_hidden_layers=1).to(rank_device()), context)
        ids = prompt(context.layout, 1)
        how = {"max_new_tokens": 4 + 3 * context.layout.dp_rank} | GREEDY
        assert torch.equal(model.generate(ids, assistant_model=small, **how), plain.generate(ids, **how))
        one = (model, small)[context.layout.dp_rank]
        assert one.generate(ids, **how).shape[1] == ids.shape[1] + how["max_new_tokens"]


@distributed(2)
def test_early_exit_runs_fewer_layers_on_one_rank(world_size):
    """`assistant_early_exit` drafts by the first layers of the same model. Ranks draft unequally often."""
    context, model, plain = made({"dp": 2}, "qwen3_moe")
    with context:
        ids = prompt(context.layout, 1)
        how = {"max_new_tokens": 4 + 4 * context.layout.dp_rank} | GREEDY
        expected = plain.generate(ids, **how)
        assert torch.equal(model.generate(ids, assistant_early_exit=1, **how), expected)
        early = {"assistant_early_exit": 1} if context.layout.dp_rank else {}
        assert torch.equal(model.generate(ids, **early, **how), expected), "one rank alone"
        assert model.config.num_hidden_layers == plain.config.num_hidden_layers
        assert torch.equal(model.generate(ids, **how), expected)


@distributed(2)
def test_an_assistant_of_another_context_is_refused(world_size):
    """An assistant model of another context is refused.

    Ranks run the assistant unequally often, and would wait for each other in two contexts.
    """
    context, model, plain = made({"dp": 2}, "qwen3_moe", deadline_s=20)
    other = EPContext.from_groups(ParallelConfig(dp=2), device=rank_device(), deadline_s=20)
    with context, other:
        small = expert_parallel(tiny_model("qwen3_moe", num_hidden_layers=1).to(rank_device()), other)
        ids, how = prompt(context.layout, 1), {"max_new_tokens": 4 + 3 * context.layout.dp_rank} | GREEDY
        text = same_error(InputError, lambda: model.generate(ids, assistant_model=small, **how))
        assert "load it with the same context" in text
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


@distributed(2)
def test_a_rank_without_sequences_and_one_that_raises(world_size):
    context, model, plain = made({"dp": 2})
    with context:
        ids, how = prompt(context.layout), {"max_new_tokens": 4} | GREEDY
        if context.layout.dp_rank:
            assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
        else:
            assert torch.equal(model.generate(ids[:0], **how), ids[:0])
            assert torch.equal(model.generate(inputs=ids[:0], **how), ids[:0])
        if context.layout.dp_rank:
            model.generate(ids, **how)

        def broken(ids, scores, **_):
            if ids.shape[1] >= 7:
                raise ValueError("planted")
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        if context.layout.dp_rank:
            with pytest.raises(ValueError, match="planted"):
                model.generate(ids, stopping_criteria=[broken], **how)
        else:
            with pytest.raises(InputError, match="rank 1: generate raised ValueError: planted"):
                model.generate(ids, **how)
        how |= {"max_new_tokens": 3 + 4 * context.layout.dp_rank}  # the later calls stay in step
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


@distributed(2)
def test_continuous_batching_is_refused_on_all_ranks(world_size):
    """Continuous batching is refused on all ranks.

    Its thread calls the model as often as the rank's own requests need, and reports a failure as a short output.
    """
    context, model, plain = made({"dp": 2})
    with context:
        ids, how = prompt(context.layout, 1), {"max_new_tokens": 3 + 2 * context.layout.dp_rank} | GREEDY
        ways = {
            "generate_batch": lambda: model.generate_batch(ids.tolist(), max_new_tokens=3),
            "init_continuous_batching": lambda: model.init_continuous_batching(),
            "continuous_batching_context_manager": lambda: model.continuous_batching_context_manager(),
        }
        for name, call in ways.items():
            assert f"{name}: continuous batching" in same_error(InputError, call)
        one_alone = (ways["generate_batch"], lambda: model.generate(ids, **how))
        assert "model.generate on all ranks" in same_error(InputError, one_alone[context.layout.dp_rank])
        same_error(InputError, lambda: model.generate(ids, cache_implementation="paged", **how))
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


@distributed(2)
def test_synced_gpus_that_is_off_stays_off(world_size):
    context, model, plain = made({"dp": 2})
    with context, mock.patch.object(GenerationSync, "_next_forward", side_effect=AssertionError("an exchange")):
        ids, how = prompt(context.layout), {"max_new_tokens": 3} | GREEDY
        assert torch.equal(model.generate(ids, **how, synced_gpus=False), plain.generate(ids, **how))


@distributed(2)
def test_a_timeout_names_a_rank_that_ended_earlier(world_size):
    context, model, _ = made({"dp": 2}, deadline_s=3)
    ids = prompt(context.layout, 1)
    if dist.get_rank():
        with pytest.raises(PeerTimeout, match=r"fewer calls, because its batches or its generate ended earlier\?"):
            model.generate(ids, max_new_tokens=4, synced_gpus=False, **GREEDY)
    else:
        model.generate(ids, max_new_tokens=2, synced_gpus=False, **GREEDY)
        for _ in range(300):  # stay alive until the peer has noticed
            if default_store().check(["found out"]):
                break
            time.sleep(0.1)
    if dist.get_rank():
        default_store().set("found out", "")
    context.flight_recorder.close()


@distributed(2, 4)
def test_sampled_tokens_agree_over_tp(world_size):
    """tp ranks sample the same tokens without a common seed, also the last token, which no forward sees.

    The random state of the other tp ranks stays their own.
    """
    for sizes in [{"tp": 2}] if world_size == 2 else [{"dp": 2, "tp": 2}]:
        context, model, plain = made(sizes)
        with context:
            ids = prompt(context.layout)
            for new in (1, 5):
                torch.manual_seed(100 + dist.get_rank())
                found = model.generate(ids, max_new_tokens=new, do_sample=True, pad_token_id=0)
                after = torch.rand(())
                torch.manual_seed(100 + dist.get_rank())
                if context.layout.tp_rank:
                    assert torch.equal(torch.rand(()), after), "own random numbers"
                else:
                    how = {"max_new_tokens": new, "do_sample": True, "pad_token_id": 0}
                    assert torch.equal(plain.generate(ids, **how), found), "those of one process"
                tokens = gather_from_all_ranks((context.layout.dp_rank, found.tolist()))
                assert all(one == dict(tokens)[at] for at, one in tokens), tokens


@distributed(2)
def test_sampling_by_hand_with_other_seeds_is_refused(world_size):
    context, model, _ = made({"tp": 2})
    with context, torch.no_grad():
        ids = prompt(context.layout)
        model(ids)
        text = same_error(InputError, lambda: model(ids + dist.get_rank()))
        assert "needs the same tokens on all tp ranks" in text
        assert "torch.manual_seed" in text


# --- ranks without a batch -------------------------------------------------------------------------------------------


@distributed(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_idle_step(family, world_size):
    """An idle step of one rank leaves forward and backward of its peer as in one process, and counts no load."""
    context, model, plain = made({"dp": 2}, family)
    with context:
        ids, busy = prompt(context.layout, 2), context.layout.dp_rank == 1
        with torch.no_grad():
            found = model(ids).logits if busy else idle_step(model)
            expected = plain(ids).logits if busy else torch.zeros((), device=found.device)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        tokens = [sum(layer.stats().expert_load) / layer.config.top_k for layer in moe_layers(model)]
        assert tokens == [2 * 6] * len(tokens)
        model.train()
        loss = model(ids, labels=ids).loss if busy else idle_step(model)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        if busy:
            plain(ids, labels=ids).loss.backward()
            ours, theirs = (m.model.embed_tokens.weight.grad for m in (model, plain))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
        else:
            assert float(loss) == 0
            assert not model.model.embed_tokens.weight.grad.any()
            sums = [float(p.grad.abs().sum()) for layer in moe_layers(model) for p in layer.expert_weights.parameters()]
            assert sum(sums) > 0, "the peer's tokens"
        sync_gradients(model, context)


@distributed(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_padding_of_idle_steps_is_no_record(family, world_size):
    """Recorded routes and router logits hold only the rank's own tokens, and an idle rank replays none."""
    context, model, _ = made({"dp": 2}, family)
    with context:
        ids, busy = prompt(context.layout, 1), context.layout.dp_rank == 1
        length = 3 + 4 * context.layout.dp_rank
        with record_routing(model, rows=100) as record:
            found = model.generate(ids, max_new_tokens=length, **GREEDY)
            again = model.generate(found[:, :-1], max_new_tokens=1, **GREEDY)  # the same tokens in one call
        assert torch.equal(found, again)
        for routes in record.ids().values():
            assert len(routes) == 2 * (ids.shape[1] + length - 1)
            assert torch.equal(*(part.sort(1).values for part in routes.chunk(2)))
        record.reset()
        with torch.no_grad(), router_logits(model) as logits, record_routing(model, rows=100) as record:
            model(ids) if busy else idle_step(model)
        rows = ids.numel() if busy else 0
        assert {len(routes) for routes in record.ids().values()} == {len(each) for each in logits} == {rows}
        batch = {name: routes[: ids.numel()] for name, routes in record.ids().items()}
        given = batch if busy else {name: routes.new_zeros(9, routes.shape[1]) for name, routes in batch.items()}
        with replay_routing(model.train(), given):
            (model(ids, labels=ids).loss if busy else idle_step(model)).backward()


@distributed(2)
def test_an_idle_step_in_a_wrapper_and_with_checkpointing(world_size):
    context, model, _ = made({"dp": 2})
    with context:
        model.train()
        model.gradient_checkpointing_enable()
        wrapped = torch.nn.parallel.DistributedDataParallel(exclude_experts(model), broadcast_buffers=False)
        ids = prompt(context.layout, 2)
        (wrapped(input_ids=ids, use_cache=False).logits.mean() if dist.get_rank() else idle_step(wrapped)).backward()
        grads = gather_from_all_ranks(model.model.embed_tokens.weight.grad.abs().sum().item())
        assert grads[0] == grads[1] > 0


@distributed(2)
def test_an_empty_batch_is_one_sentence_that_names_the_call(world_size):
    for sizes in ({"dp": 2}, {"tp": 2}):
        context, model, _ = made(sizes, deadline_s=20)
        with context, torch.no_grad():
            ids = prompt(context.layout)
            given = ids[:0] if dist.get_rank() else ids
            text = same_error(InputError, lambda model=model, given=given: model(given))
            assert "rank 1: input_ids or inputs_embeds of shape [0, " in text
            assert "idle_step(model)" in text
            model(ids)
            same_error(InputError, lambda model=model, ids=ids: model.model(inputs_embeds=torch.zeros(2, 0, 32)))
            model(ids)
