"""Test log records: their names under `ep_moe`, one way to make loggers, no handlers, and none in warm calls."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ep_moe
from ep_moe import EPContext, InputError, MoEConfig, MoELayer, Routing
from ep_moe.parallel import flight_recorder
from ep_moe.parallel.flight_recorder import FlightRecorder
from ep_moe.parallel.heartbeats import Step

PACKAGE = Path(ep_moe.__file__).parent
CONFIG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
METHODS = ("debug", "info", "warning", "error", "critical", "exception", "log")


def loggers():
    """Yield (file, name, whether at module level) for each logger.

    The command line also sets up the package's logger.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        top = {id(node) for statement in tree.body for node in ast.walk(statement) if isinstance(statement, ast.Assign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger":
                yield path.relative_to(PACKAGE), ast.literal_eval(node.args[0]), id(node) in top


def test_loggers_have_the_name_of_their_folder():
    found = [one for one in loggers() if one[0].as_posix() not in ("__init__.py", "cli/output.py")]
    assert len(found) >= 10
    for path, name, module_level in found:
        assert (name, module_level) == (f"ep_moe.{path.with_suffix('').parts[0]}", True), path


def test_the_package_sets_no_handler():
    """The package sets no handler, so Python prints warnings if the application configures no logging."""
    done = subprocess.run(
        [sys.executable, "-c", "import logging, ep_moe; logging.getLogger('ep_moe.x').warning('seen')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "seen\n"
    assert logging.getLogger("ep_moe").propagate
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "cli":
            text = path.read_text()
            assert "basicConfig" not in text, path
            assert "StreamHandler" not in text, path


@pytest.fixture
def layer():
    with EPContext.local() as context:
        yield MoELayer(CONFIG, context, name="one")


def test_a_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO, "ep_moe"), EPContext.local() as context:
        layer = MoELayer(CONFIG, context, name="one")
    (said,) = [record for record in caplog.records if record.name == "ep_moe.selection"]
    assert said.getMessage().startswith(f"one: all2all {layer.choice.all2all}, experts {layer.choice.experts}: ")


@pytest.mark.parametrize("gradients", [False, True])
def test_a_warm_call_makes_no_logging_call(layer, monkeypatch, gradients):
    """A warm call makes no logging call, not even one that its level would drop."""
    x = torch.randn(5, 16, requires_grad=gradients)
    routing = Routing(torch.zeros(5, 2, dtype=torch.int64) + torch.tensor([0, 1]), torch.full((5, 2), 0.5))

    def calls():
        with torch.set_grad_enabled(gradients):
            for out in (layer(x), layer.forward_routed(x, routing)):
                if gradients:
                    out.sum().backward()

    calls()
    made = []
    for name in METHODS:
        monkeypatch.setattr(logging.Logger, name, lambda self, *args, **_: made.append((self.name, args)))
    calls()
    calls()
    assert not [one for one in made if one[0].startswith("ep_moe")]


def test_a_refused_call_is_logged(layer, caplog):
    with caplog.at_level(logging.INFO, "ep_moe"), pytest.raises(InputError):
        layer(torch.randn(5, 17))
    (said,) = [record for record in caplog.records if record.name == "ep_moe.layer"]
    assert said.getMessage().startswith("one rejects a call on rank 0: ")
    assert "17" in said.getMessage()


def test_a_slow_peer_is_logged_once_for_each_step(caplog):
    recorder = FlightRecorder(deadline_s=100.0)
    for number, late in ((1, 9.0), (1, 11.0), (1, 14.0), (2, 3.0), (2, 12.0)):
        recorder._step = Step(number, "one", "dispatch", "torch_a2a", False)
        recorder._say_slow(late)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"rank 0 has waited {seconds} s in dispatch of one (step {number}); a peer is slow, and counts as lost after "
        f"100 s"
        for number, seconds in ((1, 11), (2, 12))
    ]
    caplog.clear()
    recorder.deadline_s = 1.0
    recorder._step = Step(3, "one", "dispatch", "torch_a2a", False)
    recorder._say_slow(flight_recorder._PATIENCE_S - 1)
    assert not caplog.records, "a short deadline is said by itself"
