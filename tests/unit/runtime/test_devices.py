"""Test the current device: which functions enter another one, and that no function of the package relies on it."""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import ep_moe
from ep_moe import Activation, ConfigError, EPContext, InputError, MoEConfig, MoELayer
from ep_moe.cli import tune
from ep_moe.eplb.balancer import ExpertBalancer
from ep_moe.eplb.rebalance import RebalanceLoop
from ep_moe.execution.graphs import CallGraphs
from ep_moe.metrics import source
from ep_moe.placement.placement import Placement
from ep_moe.quant import microscale
from ep_moe.runtime.devices import as_device, is_other_gpu_current, on_device, on_device_of, with_index, without_class
from ep_moe.weights.layouts import cutlass_mixed
from tests.fixtures.helpers import fill

ROOT = Path(ep_moe.__file__).parent
# functions of torch.cuda that use the current device unless given one
NAMED = {
    "Stream", "current_stream", "synchronize", "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats",
    "max_memory_allocated", "reset_peak_memory_stats", "get_device_name", "get_device_capability",
    "get_device_properties",
}  # fmt: skip
# calls that use the current device on purpose, such as timing
MEANT = {
    "bench/harness.py": {"torch.cuda.synchronize()", "event.record()", "torch.cuda.current_stream()"},
    "parallel/rank_group.py": {"dist.barrier(group, device_ids=ids)"},
}  # fmt: skip


@pytest.fixture
def gpus(monkeypatch):
    """Pretend to have two GPUs, of which 0 is current. Return the devices that `on_device` entered."""
    current, entered = [0], []

    class Entered:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", Entered)
    return entered


def test_another_device_is_entered(gpus):
    with on_device(torch.device("cuda", 1)):
        assert gpus == [1]
        with on_device(torch.device("cuda", 1)):
            pass
        with on_device(torch.device("cuda", 0)):
            pass
    assert gpus == [1, 0]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("device", [torch.device("cuda", 0), torch.device("cpu"), torch.device("cpu", 0)])
def test_nothing_is_entered(gpus, device):
    with on_device(device):
        pass
    assert gpus == []
    assert not is_other_gpu_current(device.index if device.type == "cuda" else None)


def test_a_function_runs_on_the_device_of_its_arguments(gpus):
    @on_device_of(lambda device, **_: device)
    def where(device, *, scale):
        """Words."""
        return torch.cuda.current_device() * scale

    assert where(torch.device("cuda", 1), scale=3) == 3
    assert gpus == [1]
    assert (where.__name__, where.__doc__) == ("where", "Words.")


def test_a_capture_on_another_device_is_refused(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match=r"captured on cuda:0, .* work on cuda:1; capture it within torch.cuda.device"):
        on_device(torch.device("cuda", 1))


def test_a_device_without_an_index_is_the_current_one(gpus):
    assert with_index(torch.device("cuda")) == torch.device("cuda", 0)
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert with_index("cuda") == "cuda"  # refused later, by a consensus of all ranks


def test_compiled_code_enters_nothing(gpus):
    def call(x):
        with on_device(torch.device("cuda", 1)):
            return x + 1

    assert torch.compile(call, fullgraph=True, backend="eager")(torch.ones(1)).item() == 2
    assert gpus == []


def test_a_layer_computes_on_the_device_of_its_context(gpus, monkeypatch):
    """A layer computes on its context's device. The context claims to be on the other GPU, while all is on the CPU."""
    context = EPContext.local(torch.device("cpu"))
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2, activation=Activation.RELU2)
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append(torch.cuda.current_device())
            return torch.zeros_like(x)

    layer = fill(MoELayer(config, context, experts="reference", shared_experts=Watched()))
    context.device, context._gpu = torch.device("cuda", 1), 1
    # the real check would notice this
    monkeypatch.setattr("ep_moe.execution.layer_checks.rows_problem", lambda *_: None)
    layer(torch.ones(2, 16))
    assert seen == [1]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "function",
    [
        MoELayer.update_expert, MoELayer.stats, MoELayer._tune_kernel, source._layer_metrics,
        EPContext._pooled, EPContext.tune, EPContext.capture, EPContext.capture_routed, EPContext.destroy,
        ExpertBalancer.step, ExpertBalancer.move_to, ExpertBalancer.settle, ExpertBalancer.close,
        RebalanceLoop.__init__, CallGraphs.capture, Placement._tables, cutlass_mixed.unfold_humming, tune.tune,
        microscale.quantize_mxfp8, microscale.quantize_mxfp4, microscale.e2m1_values,
    ],
    ids=lambda function: function.__qualname__,
)  # fmt: skip
def test_what_users_call_enters_the_device_first(function, gpus, monkeypatch):
    """Functions that users reach first enter the device of the context or tensor that they are given."""

    def enter(self):
        raise EnteredError(self.index)

    class EnteredError(Exception):
        pass

    monkeypatch.setattr(torch.cuda.device, "__enter__", enter)
    device = torch.device("cuda", 1)
    context = SimpleNamespace(device=device)
    given = SimpleNamespace(device=device, context=context, _context=context, replica_count=context)
    taken = inspect.signature(function).parameters.values()
    arguments = [given for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    with pytest.raises(EnteredError, match="1"):
        function(*arguments)


# --- by the source --------------------------------------------------------------------------------------------------


def relying(source: str) -> list[str]:
    """Return the calls in a source text that depend on the current device, or change it."""
    return [ast.unparse(call) for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call) and _relies(call)]


def _relies(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "torch.cuda.set_device" or name.endswith("dist.barrier") or name == "dist.barrier":
        return True
    given = bool(call.args or call.keywords)
    if name.startswith("torch.cuda."):
        return name.removeprefix("torch.cuda.") in NAMED and not given
    return name.endswith(".record") and not given and isinstance(call.func, ast.Attribute)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_package_names_the_device(path):
    found = set(relying(path.read_text()))
    assert found <= MEANT.get(path.relative_to(ROOT).as_posix(), set()), (
        "name the device, or use ep_moe.parallel.rank_group.barrier"
    )


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.set_device(device)", "torch.cuda.Stream()", "torch.cuda.current_stream()",
        "torch.cuda.synchronize()", "event.record()", "dist.barrier()", "torch.distributed.dist.barrier(group)",
    ],
)  # fmt: skip
def test_it_sees_one(call):
    assert relying(f"x = 1\n{call}") == [call]


@pytest.mark.parametrize("call", ["torch.cuda.Stream(device)", "event.record(stream)", "barrier(device)"])
def test_it_lets_one_be(call):
    assert relying(call) == []


def test_errors_are_those_of_torch_too():
    assert issubclass(ep_moe.OutOfMemory, torch.OutOfMemoryError)
    assert not issubclass(ep_moe.OutOfMemory, ConfigError)


@pytest.mark.parametrize("given", ["cpu", torch.device("cpu")])
def test_devices_by_name(given):
    assert as_device(given) == torch.device("cpu")
    with EPContext.local(given) as context:
        layer = MoELayer(MoEConfig(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1), context, device=given)
        assert context.device == layer.device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("given", ["cuda", 0, torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused(given):
    """A missing GPU is refused with a ConfigError.

    Depending on its build, torch raises AssertionError or RuntimeError.
    """
    with pytest.raises(ConfigError, match=r"device .*got 0|device 'cuda' is none that torch has here"):
        EPContext.local(given)


@pytest.mark.parametrize("wrong", ["", "cud", "cpu:x", -1, 2**70, True, 1.5, [], object()])
def test_what_is_no_device_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"device must be a torch.device or its name"):
        as_device(wrong)
    with pytest.raises(ConfigError, match=r"device must be a torch.device or its name"):
        EPContext.local(wrong)


def test_a_result_that_is_under_way_is_waited_for():
    x = torch.ones(3)
    assert type(without_class(AsyncCollectiveTensor(x))) is torch.Tensor
    assert without_class(x) is x
