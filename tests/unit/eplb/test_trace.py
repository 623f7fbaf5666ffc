"""Test `LoadTrace`: loading returns what was saved, and an error names a bad file."""

import numpy as np
import pytest

from ep_moe import ConfigError
from ep_moe.eplb import LoadTrace

COUNTS = np.arange(24).reshape(4, 2, 3)


def test_a_file_returns_the_trace(tmp_path):
    made = LoadTrace(
        COUNTS.astype(np.int32), np.array([5, 6, 7, 8]), "mixtral-8x7b", ("model.layers.1", "model.layers.7")
    )
    made.save(tmp_path / "trace.npz")
    found = LoadTrace.load(tmp_path / "trace.npz")
    assert found.counts.dtype == found.tokens.dtype == np.int64
    assert (found.counts == COUNTS).all()
    assert found.tokens.tolist() == [5, 6, 7, 8]
    assert (found.model, found.layers) == ("mixtral-8x7b", ("model.layers.1", "model.layers.7"))
    assert (found.steps, found.num_layers, found.num_experts) == (4, 2, 3)


def test_a_trace_keeps_its_counts():
    """A trace copies its arrays, so later changes to them have no effect."""
    counts, tokens = COUNTS.astype(np.int64), np.ones(4, np.int64)
    trace = LoadTrace(counts, tokens)
    counts[:], tokens[:] = 0, 0
    assert (trace.counts == COUNTS).all()
    assert (trace.tokens == 1).all()


def test_windows_are_sums_over_steps():
    trace = LoadTrace(COUNTS, np.ones(4, np.int64))
    assert (trace.window() == COUNTS.sum(0)).all()
    assert (trace.window(1, 3) == COUNTS[1] + COUNTS[2]).all()
    assert (trace.window(-1) == COUNTS[3]).all()
    assert trace.layers == ("0", "1")
    with pytest.raises(ConfigError) as error:
        trace.window(4)
    assert "window(4, None) has none of the 4 steps" in str(error.value)


GOOD = {"format": np.int64(1), "counts": COUNTS, "tokens": np.ones(4, np.int64), "model": "", "layers": ["a", "b"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "it has no format"),
        ({k: v for k, v in GOOD.items() if k != "tokens"}, "it has no tokens"),
        (GOOD | {"format": np.int64(2)}, "format 2, this version reads 1"),
        (GOOD | {"format": np.ones(2)}, "this version reads 1"),
        (GOOD | {"counts": COUNTS.astype(float)}, "counts must be integers of at least 0 in 3 dimensions"),
        (GOOD | {"counts": COUNTS[0]}, "got int64 [2, 3]"),
        (GOOD | {"counts": -COUNTS}, "integers of at least 0"),
        (GOOD | {"counts": COUNTS[:0]}, "not empty"),
        (GOOD | {"tokens": np.ones(3, np.int64)}, "4 steps in counts and 3 in tokens"),
        (GOOD | {"layers": ["a"]}, "1 names for 2 layers"),
        (GOOD | {"counts": np.array([[[None]]])}, "is not a load trace"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, fields, message):
    np.savez(tmp_path / "trace.npz", **fields)
    with pytest.raises(ConfigError) as error:
        LoadTrace.load(tmp_path / "trace.npz")
    assert message in str(error.value)
    assert "trace.npz" in str(error.value)


def test_the_good_file_is_good(tmp_path):
    np.savez(tmp_path / "trace.npz", **GOOD)
    assert LoadTrace.load(tmp_path / "trace.npz").layers == ("a", "b")


@pytest.mark.parametrize("raw", [b"", b"no archive", b"PK\x03\x04broken", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_archive_is_refused(tmp_path, raw):
    (tmp_path / "trace.npz").write_bytes(raw)
    with pytest.raises(ConfigError) as error:
        LoadTrace.load(tmp_path / "trace.npz")
    assert "trace.npz is not a load trace" in str(error.value)


def test_an_array_alone_is_refused(tmp_path):
    np.save(tmp_path / "trace.npy", COUNTS)
    with pytest.raises(ConfigError) as error:
        LoadTrace.load(tmp_path / "trace.npy")
    assert "trace.npy is not a load trace" in str(error.value)


def test_a_file_of_text_is_refused_in_own_words(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match=r"text is not a load trace; write one with LoadTrace.save"):
        LoadTrace.load(tmp_path / "text")


def test_a_damaged_or_other_archive_is_refused(tmp_path):
    file = tmp_path / "trace.npz"
    LoadTrace(COUNTS, np.ones(4, np.int64)).save(file)
    good = file.read_bytes()
    at = good.index(b"counts.npy") + len(b"counts.npy")  # the member's bytes follow
    file.write_bytes(good[: at + 30] + bytes(8) + good[at + 38 :])
    with pytest.raises(ConfigError, match="is not a load trace"):
        LoadTrace.load(file)
    behind = good.index(b"PK\x01\x02")
    for offset, value in ((8, 1), (10, 99)):  # an encrypted member; an unknown compression method
        changed = bytearray(good)
        changed[behind + offset] = value
        file.write_bytes(changed)
        with pytest.raises(ConfigError, match="is not a load trace"):
            LoadTrace.load(file)


def test_the_ending_may_be_left_out_as_where_it_was_saved(tmp_path):
    trace = LoadTrace(COUNTS, np.ones(4, np.int64))
    trace.save(tmp_path / "trace")
    assert (LoadTrace.load(tmp_path / "trace").counts == trace.counts).all()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        LoadTrace.load(tmp_path / "nowhere.npz")
    assert "nowhere.npz does not exist" in str(error.value)
