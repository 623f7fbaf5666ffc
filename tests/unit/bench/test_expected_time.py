"""Test predicted layer times against those that `bench.layer` measured."""

from dataclasses import replace

import pytest

from ep_moe.bench import expected_time
from ep_moe.bench.expected_time import ITSELF, MODEL, RANKS, ROWS_BACK, ROWS_OUT, TOKENS, Layer, held_back
from ep_moe.bench.floors import Floor, deduplicated, floor, kind_of
from ep_moe.bench.measured_lines import FOLDER, MeasuredLine, measured, work_us
from ep_moe.config import MoEConfig, Wire
from ep_moe.runtime.gpus import GPUS

CONFIG = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=16, top_k=2)
LAUNCHES = 20.0


def line_of(ranks: int, tokens: int, multiple: float, **other) -> MeasuredLine:
    """Return a line that took `LAUNCHES` and `multiple` times its floor, which only the weights determine."""
    own = Floor(weights=10.0 * tokens, products=0, out=0, back=0)
    given = {"file": "layer-h200.csv", "gpu": "h200", "config": CONFIG, "model": "small", "pair": "k + t"}
    given |= {"scheme": "none", "rows": "bf16 / bf16", "us": LAUNCHES + multiple * own.weights, "drawn": 1.0}
    return MeasuredLine(**given | {"ranks": ranks, "tokens": tokens, "floor": own} | other)


def layer(ranks: int, tokens: int, us: float, **other) -> Layer:
    given = {"gpu": "h200", "pair": "k + t", "scheme": "none", "rows": "bf16 / bf16", "config": CONFIG}
    return Layer(**given | {"ranks": ranks, "tokens": tokens, "floor": Floor(us, 0, 0, 0)} | other)


LINES = [line_of(4, 1, 1.0), line_of(4, 4, 2.0), line_of(4, 16, 1.0), line_of(8, 8, 3.0, file="b-h200.csv")]


@pytest.fixture
def predict(monkeypatch):
    def predicted(asked: Layer, lines=LINES):
        monkeypatch.setattr(expected_time, "measured", lambda: tuple(lines))
        return expected_time.expected_time(asked)

    return predicted


def test_a_measured_layer_gets_its_time(predict):
    found = predict(layer(4, 4, 77))
    assert (found.us, found.basis) == (LINES[1].us, ITSELF)
    assert f"{FOLDER}/layer-h200.csv: small, 4 ranks, k + t, rows bf16 / bf16: 100.0 us at 4 tokens" in found.source


def test_between_lines_the_multiple_goes_with_the_logarithm(predict):
    found = predict(layer(4, 8, 80))
    assert (found.us, found.launches_us) == (pytest.approx(LAUNCHES + 1.5 * 80), pytest.approx(LAUNCHES))
    assert found.basis == TOKENS


def test_the_nearest_ranks_are_taken_at_as_many_rows_per_expert(predict):
    found = predict(layer(2, 8, 30))  # as many rows per expert as 4 ranks of 4 tokens
    assert found.us == pytest.approx(LAUNCHES + 2.0 * 30)
    assert found.basis == RANKS
    assert "(4 ranks for 2)" in found.source


def test_beyond_the_lines_the_last_multiple_holds_and_is_said(predict):
    found = predict(layer(4, 64, 640))
    assert found.us == pytest.approx(LAUNCHES + 640)
    assert "beyond the measured 8 rows per expert" in found.source


def test_rows_and_sizes_that_differ_are_said(predict):
    for rows, basis in (("fp8 / bf16", ROWS_OUT), ("bf16 / fp8", ROWS_BACK)):
        found = predict(layer(4, 4, 40, rows=rows))
        assert found.basis == basis
        assert f"rows bf16 / bf16 for {rows}" in found.source
    for change, says in (
        ({"num_experts": 32}, "for another number of experts or top-k, or other shapes"),
        ({"intermediate_size": 16}, "for experts of 0.25 times the size"),
    ):
        found = predict(layer(4, 4, 40, config=replace(CONFIG, **change)))
        assert found.basis == MODEL
        assert says in found.source


@pytest.mark.parametrize("other", [{"gpu": "h100"}, {"pair": "k + u"}, {"scheme": "mxfp4"}])
def test_nothing_is_predicted_from_another_gpu_kernel_or_scheme(other, predict):
    assert predict(layer(4, 4, 40, **other)) is None


def test_the_routes_of_a_run_may_be_lighter_than_the_mean(predict):
    lines = [replace(one, drawn=0.5, us=LAUNCHES + 0.5 * 2.0 * one.floor.weights) for one in LINES[:2]]
    found = predict(layer(4, 2, 20), [replace(lines[0], us=LAUNCHES + 5), lines[1]])
    assert found.launches_us == pytest.approx(LAUNCHES)
    assert found.us == pytest.approx(LAUNCHES + 1.5 * 20)


def test_work_is_between_the_floor_and_its_parts_in_turn():
    assert work_us(Floor(3, 4, 1, 1)) == 7
    assert work_us(Floor(3, 0, 1, 1)) == Floor(3, 0, 1, 1).in_turn == 5


def test_lines_have_the_floors_of_the_routes_that_they_drew():
    """Each measured line has the floor of the routes that it drew.

    With many tokens this is the mean floor. With one token on each of 4 ranks, the routes drew a quarter fewer experts.
    """
    lines = measured()
    assert all(abs(line.drawn - 1) < 0.02 for line in lines if line.tokens * line.ranks >= 256)
    (few,) = {round(line.drawn, 2) for line in lines if (line.file, line.tokens) == ("layer-deepseek-h200.csv", 1)}
    assert 0.7 < few < 0.8
    line = next(line for line in lines if line.scheme == "none" and line.tokens == 8192)
    kind = kind_of(GPUS[line.gpu], "none", Wire())
    assert line.floor == floor(line.config, kind, line.ranks, 8192, per_host=line.ranks, way=deduplicated)


@pytest.mark.parametrize(
    ("basis", "lines", "within", "median"),
    [(RANKS, 126, 121, 0.05), (TOKENS, 203, 175, 0.08), (ROWS_BACK, 27, 27, 0.01)],
)
def test_held_back_lines_are_predicted(basis, lines, within, median):
    """Held-back lines are predicted as accurately as docs/how-to/fit.md says."""
    found = held_back(basis)
    assert len(found.errors) == lines
    assert found.within(0.2) >= within
    assert found.median < median


def test_no_lines_tell_of_rows_sent_in_another_format():
    found = held_back(ROWS_OUT)
    assert (found.errors, found.median, found.worst(found.errors)) == ((), None, None)


def test_another_model_is_an_estimate():
    found = held_back(MODEL)
    assert len(found.errors) == 170
    assert found.within(0.2) >= 100


def test_what_is_held_back_predicts_nothing(monkeypatch):
    """A held-back line does not predict itself.

    One line of 4 ranks takes longer than all others predict. It misleads the prediction of the 8-rank line with as many
    rows per expert.
    """
    lines = [line_of(4, tokens, 1.0) for tokens in (1, 4, 16)]
    lines += [line_of(8, tokens, 1.0, file="b-h200.csv") for tokens in (1, 2, 8)]
    lines[1] = line_of(4, 4, 3.0)
    monkeypatch.setattr(expected_time, "measured", lambda: tuple(lines))
    held_back.cache_clear()
    errors = held_back(RANKS).errors
    held_back.cache_clear()
    assert errors == pytest.approx([0, 60 / 140 - 1, 0, 40 / 30 - 1, 80 / 40 - 1, 0])
