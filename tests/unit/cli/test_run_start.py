"""Test how `ep-moe run` starts its ranks, what it loads, and which parts a rank runs."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ep_moe import ConfigError, ExpertMap, Wire
from ep_moe.cli import run as run_module
from ep_moe.cli.run import DEMO, RunOptions, resolve_options, run
from ep_moe.integrations import transformers as loading
from ep_moe.parallel.groups import TorchrunEnv

CPU = torch.device("cpu")
pytest.importorskip("transformers")


@pytest.fixture
def started(monkeypatch):
    """Return the calls that would start ranks, and the lines on stderr."""
    found, noted = [], []

    def run_local_ranks(target, world, arguments, **how):
        found.append((target, world, arguments, how))
        return ["the first rank's report", None]

    monkeypatch.setattr(TorchrunEnv, "present", lambda: False)
    monkeypatch.setattr(run_module, "run_local_ranks", run_local_ranks)
    monkeypatch.setattr(run_module, "model_folder", lambda *given, **how: (*given, how))
    monkeypatch.setattr(run_module, "note", noted.append)
    return found, noted


@pytest.mark.parametrize(
    ("sizes", "world"), [({}, 4), ({"dp": 1}, 1), ({"tp": 2}, 2), ({"dp": 3, "tp": 2}, 6), ({"dp": 128}, 128)], ids=str
)
def test_as_many_ranks_are_started_as_the_sizes_say(sizes, world, started):
    found, noted = started
    options = RunOptions(**sizes, deadline_s=400.0)
    assert run(options) == "the first rank's report"
    arguments = {
        "options": resolve_options(options, world), "device": CPU, "folder": (str(DEMO), {"revision": None}),
        "forked": True,
    }  # fmt: skip
    assert found == [("ep_moe.cli.run:run_on_rank", world, arguments, {"deadline_s": 1200.0})]
    assert noted == [f"run: starting {world} rank{'s' * (world > 1)} on this machine"]


def test_more_ranks_than_a_machine_has_room_for_are_refused(started):
    with pytest.raises(ConfigError, match=r"--dp \* --tp = 130 ranks are more than the 128"):
        run(RunOptions(dp=65, tp=2))


def test_a_quiet_run_of_a_model_of_the_hub(started):
    """A run of a model from the Hub gives ranks at least 15 minutes, even with a shorter deadline for peers."""
    found, noted = started
    run(RunOptions(model="org/m", revision="v2", text=__file__, quiet=True, deadline_s=5.0))
    ((_, _, arguments, how),) = found
    assert (arguments["folder"], how, noted) == (("org/m", {"revision": "v2"}), {"deadline_s": 900.0}, [])


def test_a_run_without_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setattr(run_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ep-moe run needs transformers; install ep-moe\[hf\]"):
        run_module.check_options(RunOptions())


@pytest.mark.parametrize("fails", [False, True])
def test_torchruns_ranks_are_taken_as_they_are(fails, monkeypatch):
    """Ranks of torchrun are used as they are. Their process group is destroyed after the run, even if it fails."""
    asked, ended = [], []

    def on_rank(options, device):
        if fails:
            raise ConfigError("no")
        return options, device

    monkeypatch.setattr(TorchrunEnv, "present", lambda: True)
    monkeypatch.setattr(TorchrunEnv, "read", lambda: SimpleNamespace(world_size=6))
    monkeypatch.setattr(run_module, "local_device", lambda: "here")
    monkeypatch.setattr(run_module, "init_from_torchrun", lambda device, deadline_s: asked.append((device, deadline_s)))
    monkeypatch.setattr(run_module, "run_on_rank", on_rank)
    monkeypatch.setattr(run_module.dist, "destroy_process_group", lambda: ended.append(True))
    options = RunOptions(deadline_s=7.0)
    if fails:
        with pytest.raises(ConfigError, match="no"):
            run(options)
    else:
        assert run(options) == (resolve_options(options, 6), "here")
    assert (asked, ended) == ([("here", 7.0)], [True])


@pytest.mark.parametrize(
    ("options", "world", "found"),
    [
        (RunOptions(), 4, (2, 2, "float32")),
        (RunOptions(), 3, (3, 1, "float32")),
        (RunOptions(model="m"), 4, (4, 1, "auto")),
        (RunOptions(model="m", dtype="float16"), 4, (4, 1, "float16")),
        (RunOptions(dp=3), 4, (3, 1, "float32")),
        (RunOptions(dp=2), 6, (2, 3, "float32")),
    ],
)
def test_what_is_left_open_is_filled_in(options, world, found):
    """Open options are filled in: the demo uses tp = 2 where possible, in float32, in which perplexities agree."""
    resolved = resolve_options(options, world)
    assert (resolved.dp, resolved.tp, resolved.dtype) == found


@pytest.mark.parametrize(("forked", "level"), [(True, "info"), (True, None), (False, "info")])
def test_log_records_are_those_of_a_rank_in_a_process_of_its_own(forked, level, monkeypatch):
    """A rank sets up log records only in a forked process. Elsewhere logging is set up already."""
    levels = []

    class Opened(Exception):
        pass

    @contextmanager
    def records(level):
        levels.append(level)
        yield

    def opened(*_, **__):
        raise Opened

    monkeypatch.setattr(run_module, "log_records", records)
    monkeypatch.setattr(run_module, "EPContext", SimpleNamespace(from_groups=opened))
    with pytest.raises(Opened):
        run_module.run_on_rank(RunOptions(dp=1, tp=1, log_level=level), CPU, forked=forked)
    assert levels == ["info"] * (forked and level is not None)


@pytest.mark.parametrize("redundant", [0, 2])
def test_a_model_is_loaded_as_was_asked(redundant, monkeypatch):
    loaded = []
    context = SimpleNamespace(layout=SimpleNamespace(ep=4))
    monkeypatch.setattr(loading, "num_experts", lambda folder, context: 8)
    monkeypatch.setattr(loading, "load_pretrained", lambda *given, **how: loaded.append((given, how)) or "a model")
    options = RunOptions(
        redundant=redundant,
        all2all="allgather",
        experts="reference",
        quantization="fp8_block",
        wire="fp8_row",
        quiet=True,
    )
    assert run_module._loaded(options, Path("m"), context, torch.float16, "tuned") == "a model"
    wanted = {"dtype": torch.float16, "all2all": "allgather", "experts": "reference", "quantization": "fp8_block"}
    wanted |= {"wire": Wire(dispatch="fp8_row"), "tuned": "tuned", "progress": False}
    expert_map = ExpertMap.redundant(8, 4, 2) if redundant else None
    assert loaded == [((Path("m"), context), wanted | {"expert_map": expert_map})]


@pytest.mark.parametrize(("dispatch", "calibrated"), [("plain", False), ("fp8_row", False), ("fp8_tensor", True)])
def test_a_wire_under_one_scale_has_the_checkpoints(dispatch, calibrated, monkeypatch):
    of_file = Wire(dispatch="fp8_tensor", input_scale=0.5)
    monkeypatch.setattr(loading, "calibrated_wire", lambda folder, context, dispatch: of_file)
    assert run_module._wire(dispatch, Path("m"), None) == (of_file if calibrated else Wire(dispatch=dispatch))


@pytest.mark.parametrize(
    ("name", "stated", "found"),
    [
        ("auto", torch.float16, torch.float16),
        ("auto", None, torch.float32),
        ("bfloat16", torch.float16, torch.bfloat16),
        (None, torch.float16, torch.float32),
    ],
)
def test_a_dtype_is_that_of_the_flag_or_of_the_checkpoint(name, stated, found, monkeypatch):
    monkeypatch.setattr("ep_moe.integrations.config_file.read_config", lambda folder: SimpleNamespace(dtype=stated))
    assert run_module.model_dtype(name, Path("m")) is found


@pytest.mark.parametrize(("room", "large"), [(300, False), (299, True)])
def test_weights_are_large_by_all_their_files(room, large, tmp_path, monkeypatch):
    for number in range(2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(150))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(run_module, "_REFERENCE_BYTES", room)
    assert (run_module._too_large(tmp_path) is not None) is large


@pytest.mark.parametrize(("rank", "error"), [(0, None), (0, OSError("no space left")), (1, None)])
def test_a_trace_is_of_one_forward_of_rank_0_that_is_not_counted(rank, error, monkeypatch):
    """A trace has one forward of rank 0, which is not counted as load. A write error is raised on all ranks."""
    counted, forwards, written, problems = [True, True], [], [], []

    class Layer:
        def __init__(self, number):
            self.number = number

        @contextmanager
        def no_stats(self):
            counted[self.number] = False
            yield
            counted[self.number] = True

    def export(file):
        written.append(file)
        if error is not None:
            raise error

    @contextmanager
    def profile(activities):
        yield SimpleNamespace(export_chrome_trace=export)

    monkeypatch.setattr(run_module, "profile", profile)
    consensus = SimpleNamespace(raise_on_all_ranks=lambda what, problem: problems.append(problem))
    context = SimpleNamespace(layout=SimpleNamespace(rank=rank), device=CPU, consensus=consensus)
    run_module._trace("t.json", [Layer(0), Layer(1)], lambda: forwards.append(list(counted)), context)
    assert forwards == [[False, False]]
    assert written == ["t.json"] * (rank == 0)
    assert [str(problem) for problem in problems] == [
        "--trace t.json cannot be written: no space left" if error else "None"
    ]


def test_the_title_of_a_report_names_what_ran(monkeypatch):
    monkeypatch.setattr(run_module.dist, "get_backend", lambda: "gloo")
    layout = SimpleNamespace(world=8, dp=4, tp=2, ep=2, etp=1)
    layer = SimpleNamespace(choice=SimpleNamespace(all2all="allgather", experts="reference"))
    context = SimpleNamespace(layout=layout, device=CPU)
    options = RunOptions(model="/data/a-model", quantization="fp8_block")
    assert run_module._title(options, context, layer) == (
        "a-model: 8 ranks (dp 4, tp 2; ep 2, etp 1), gloo on cpu, all2all allgather, experts reference, "
        "quantization fp8_block"
    )
