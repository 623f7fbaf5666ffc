"""Test calls of one model from two threads: what each call sees, and which call is refused."""

import threading

import pytest
import torch

from ep_moe import EPContext, MoEConfig, MoELayer
from ep_moe.integrations.transformers import expert_parallel, moe_layers
from tests.fixtures.checkpoint_files import quiet, tiny_model

pytest.importorskip("transformers")
SHORT, LONG = (torch.arange(n).view(1, n) for n in (5, 7))


@pytest.mark.parametrize("wants", [True, False])
@torch.no_grad()
def test_router_logits_are_those_of_the_call(wants):
    """Router logits are those of the thread's own call.

    The second call runs inside the first, before its first layer.
    """
    quiet()
    plain = tiny_model("qwen3_moe")
    with EPContext.local(torch.device("cpu")) as context:
        model, found = expert_parallel(tiny_model("qwen3_moe"), context), {}

        def second():
            with torch.no_grad():
                found["second"] = model(LONG, output_router_logits=wants)

        def within(*_):
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=second)
                thread.start()
                thread.join()

        hook = model.model.layers[0].self_attn.register_forward_pre_hook(within)
        first = model(SHORT, output_router_logits=True)
        hook.remove()
        assert not any(layer._logit_taps for layer in moe_layers(model))
        for out, ids in ((first, SHORT), *([(found["second"], LONG)] if wants else [])):
            wanted = plain(ids, output_router_logits=True)
            torch.testing.assert_close(out.router_logits, wanted.router_logits, rtol=1e-5, atol=1e-5)
        assert wants or found["second"].router_logits is None


def test_a_call_that_begins_is_met_by_no_other(monkeypatch):
    """A call that another thread makes while the first one starts is refused.

    The other thread enters after the first one found the context free.
    """
    with EPContext.local(torch.device("cpu")) as context:
        layer = MoELayer(MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2), context)
        x, found = torch.ones(3, 32), []
        wanted = layer(x)
        begin_call = context.flight_recorder.begin_call

        def second():
            with pytest.raises(RuntimeError, match="not re-entrant"):
                layer(x)
            found.append("refused")

        def first(*args):
            monkeypatch.undo()
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
            begin_call(*args)

        monkeypatch.setattr(context.flight_recorder, "begin_call", first)
        assert torch.equal(layer(x), wanted)
        assert found == ["refused"]

        def fails(*args):
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(context.flight_recorder, "begin_call", fails)
        with pytest.raises(KeyboardInterrupt):
            layer(x)
        assert torch.equal(layer(x), wanted), "the next call is not refused"
