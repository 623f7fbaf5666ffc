"""Test an answer of `ep-moe fit` as text: each number has its unit, its meaning and its source."""

import copy

import pytest

from ep_moe.bench.expected_time import ITSELF, RANKS, Expected, held_back
from ep_moe.cli import fit
from ep_moe.cli.fit import print_answer

GIB, KIB = 2**30, 2**10
ANSWER = {
    "asked": {
        "model": "a-model", "gpus": 16, "per_host": 8, "quantization": "fp8_block", "tokens": 64, "redundant": 3,
    },
    "gpu": {
        "name": "H200", "memory_bytes": 141 * GIB, "rates": {"source": "datasheet"}, "nic_bytes_per_s": 40e9,
        "nic_source": "said so",
    },
    "layout": {"dp": 8, "tp": 2, "ep": 4, "etp": 1, "replicas": 1, "idle_ranks_of_an_ep_group": 0},
    "backends": {"all2all": "hierarchical", "experts": "bf16_triton", "reason": "two hosts"},
    "memory": {
        "layer_bytes": {"experts": 2 * GIB, "workspace": GIB, "transport": 3 * GIB, "library": None}, "moe_layers": 10,
        "rest_of_model_bytes": 5 * GIB, "total_bytes": 29 * GIB, "fits": True, "kv_bytes_per_token": 3 * KIB,
        "kv_tokens_in_what_is_left": 77, "not_counted": "NCCL",
    },
    "layer_time": {
        "floor_us": 20.0, "floor_parts_us": {"weights": 5.0, "out": 15.0}, "bound": "the wire", "expected_us": 30.0,
        "launches_us": 8.0, "ratio": 1.5, "source": "a file",
        "accuracy": {
            "predicted_from": "other ranks", "held_back_lines": 9, "within_20_percent": 6, "median_error": 0.11,
            "worst_error": -0.3, "worst_error_to_16_tokens": 0.4,
        },
    },
    "wire": {"nvlink_bytes_per_call": 6 * KIB, "nic_bytes_per_call": 7 * KIB},
    "crossover": {
        "flat_us": 0.5, "two_level_us": 0.25, "two_level_pays": "from 33", "second_level_costs_us": 8.0,
        "source": "floor only",
    },
    "best": {
        "criteria": "least floor",
        "layouts": [
            {"dp": 16, "tp": 1, "ep": 16, "etp": 1, "floor_us": 18.0, "bytes": 7 * GIB, "all2all": "a", "experts": "b"},
        ],
    },
}  # fmt: skip
TEXT = """\
a-model on 16 x H200, 8 a host: dp 8, tp 2, ep 4, etp 1
  experts in fp8_block, 64 tokens of each GPU in a call
backends  hierarchical with bf16_triton: two hosts

memory of the fullest rank, from shapes
  experts                      2.00 GiB  x 10 MoE layers
  workspace                    1.00 GiB  once
  transport                    3.00 GiB  once
  library                     not known  and not in the total
  rest of the model            5.00 GiB  attention, embeddings, dense layers: whole on each rank, estimated without \
quantization
  total                       29.00 GiB  of 141.00 GiB (datasheet): fits
  KV cache                 3.0 KiB a token, estimated as transformers keeps it: room for 77 tokens
  not counted: NCCL

one routed MoE layer, without router and shared experts
  floor     20.0 us in turn (weights 5.0, out 15.0; bound by the wire)
            rates: datasheet; between hosts 40 GB/s
            (said so)
  expected  30.0 us (floor x 1.50), of which 8 us for launches, whatever the size
            a file
            from other ranks: within 20 % on 6 of 9 measured lines that were held back, half of them within
            11%, the worst -30%, and +40% up to 16 tokens
  bytes     6 KiB over NVLink and 7 KiB over its network card reach a rank in a call, both ways
  network   a token takes 500.0 ns if sent to each rank, 250.0 ns in two levels (to each host, then to its ranks)
            two levels are faster: from 33 tokens per rank on, if they cost 8 us more (floor only)

best layouts (least floor; floors, not measured)
  dp 16, tp 1, ep 16, etp 1: 18.0 us, 7.00 GiB, a with b
"""


def changed(part, **fields):
    answer = copy.deepcopy(ANSWER)
    answer[part] |= fields
    return answer


def printed(answer):
    lines = []
    print_answer(answer, lines.append)
    return "\n".join(lines) + "\n"


def test_an_answer_in_words():
    assert printed(ANSWER) == TEXT


ACCURACY = ANSWER["layer_time"]["accuracy"]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            changed("layout", idle_ranks_of_an_ep_group=2),
            "  2 of 4 ranks hold no expert; --redundant 5 gives each of them a replica",
        ),
        (
            changed("memory", rest_of_model_bytes=None),
            "  rest of the model        left out: this configuration has MoE layers alone; give a folder or a Hub name",
        ),
        (
            changed("memory", fits=False),
            "  total                       29.00 GiB  of 141.00 GiB (datasheet): DOES NOT FIT",
        ),
        (changed("layer_time", floor_us=None, source="no model of it"), "  no model of it"),
        (changed("layer_time", expected_us=None, source="floor only"), "  expected  floor only"),
        (
            changed("layer_time", accuracy={"predicted_from": None}),
            "  expected  30.0 us, measured: this layer (floor x 1.50)",
        ),
        (
            changed("layer_time", accuracy=ACCURACY | {"held_back_lines": 0}),
            "            from other ranks: no measured lines tell how far off that is",
        ),
        (
            changed("layer_time", accuracy=ACCURACY | {"worst_error_to_16_tokens": None}),
            "            11%, the worst -30%",
        ),
        (ANSWER | {"crossover": None}, "  network   not used: the EP group is on one host"),
        (
            changed("crossover", two_level_pays="never"),
            "            two levels are faster: never, if they cost 8 us more (floor only)",
        ),
        (changed("best", layouts=[]), "  none fits"),
        (
            changed("memory", total_bytes=GIB // 50),
            "  total                        0.02 GiB  of 141.00 GiB (datasheet): fits",
        ),
        (
            changed("memory", total_bytes=GIB // 200),
            "  total                      5242.9 KiB  of 141.00 GiB (datasheet): fits",
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_or_is_otherwise_has_words_of_its_own(answer, line):
    assert line not in TEXT.splitlines()
    assert line in printed(answer).splitlines()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (changed("memory", kv_bytes_per_token=None), "KV cache"),
        (changed("layer_time", floor_us=None), "floor "),
        (ANSWER | {"crossover": None}, "two levels"),
    ],
)
def test_what_is_not_known_is_not_told(answer, words):
    assert words in TEXT
    assert words not in printed(answer)


def test_errors_of_predictions_are_those_of_their_kind():
    """A prediction states the errors of its kind. A line that was measured has none."""
    assert fit._accuracy(Expected(1.0, 1.0, "", ITSELF)) == {"predicted_from": None}
    held, found = held_back(RANKS), fit._accuracy(Expected(1.0, 1.0, "", RANKS))
    assert (found["predicted_from"], found["held_back_lines"]) == (RANKS, len(held.errors))
