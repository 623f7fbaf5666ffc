"""Scripts of examples/ run on gloo ranks with the commands that they document.

test_plugin_example.py covers examples/plugin.
"""

import os

import pytest

from ep_moe.parallel.groups import TorchrunEnv
from tests.fixtures.programs import ON_CPU, ROOT, TORCHRUN, ran

SCRIPTS = {
    "serve": "rank 1: 16 answers, equal to transformers: True",
    "rl_weight_push": "update 4: loss",
    "rollout_replay": "24 log-probabilities of 2 ranks and of one process are equal",
    "from_vllm": "grouped sigmoid: allgather with reference gives what FusedMoE gives",
}
pytestmark = [
    pytest.mark.skipif(TorchrunEnv.present(), reason="starts torchrun itself"),
    pytest.mark.timeout(240),
]


def torchrun(name: str, ranks: int, *arguments: str) -> str:
    words = (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), f"examples/{name}.py", *arguments)
    code, out, err = ran(*words, env=os.environ | ON_CPU, timeout_s=220)
    assert code == 0, err[-2000:]
    return out


def test_each_script_is_tried():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SCRIPTS, "train"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_2_ranks(name):
    assert SCRIPTS[name] in torchrun(name, 2)


def test_a_run_of_2_ranks_goes_on_with_4(tmp_path):
    first = torchrun("train", 2, "--steps", "2", "--save", str(tmp_path / "checkpoint"))
    assert first.count("loss") == 2
    # each rank also computes all steps as one process; the third step is the first to use the optimizer's state
    second = torchrun("train", 4, "--steps", "4", "--resume", str(tmp_path / "checkpoint"), "--check")
    assert second.count("loss") == 2
    assert "4 ranks and one process agree" in second
