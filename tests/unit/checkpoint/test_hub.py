"""Test names of the Hugging Face Hub in place of folders: the cache, one download per host, and errors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from ep_moe import CheckpointError, ConfigError, EPContext
from ep_moe.checkpoint import hub
from ep_moe.checkpoint.hub import model_folder
from ep_moe.checkpoint.reader import load_layers
from ep_moe.cli.app import app
from ep_moe.cli.run import DEMO
from ep_moe.integrations.config_file import read_config
from ep_moe.integrations.transformers import load_pretrained, moe_layers, num_experts, read_moe_config
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.testing import distributed, rank_device
from tests.fixtures.checkpoint_files import make_layers, written

huggingface_hub = pytest.importorskip("huggingface_hub")
NAME, COMMIT, OLDER = "org/some-model", "a" * 40, "b" * 40
HERE = {"local_files_only": True}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return written(tmp_path_factory.getbasetemp())


def cached(cache: Path, source, commit: str = COMMIT, ref: str | None = "main", name: str = NAME) -> Path:
    """Make a folder like huggingface_hub's cache: a snapshot of links to blobs. Return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / part).mkdir(parents=True, exist_ok=True)
    for file in Path(source).iterdir():
        shutil.copy(file, repository / "blobs" / f"{commit}-{file.name}")
        if not (snapshot / file.name).is_symlink():
            (snapshot / file.name).symlink_to(f"../../blobs/{commit}-{file.name}")
    if ref is not None:
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def local():
    return EPContext.local(torch.device("cpu"))


def test_a_name_is_found_in_the_cache(checkpoints, tmp_path):
    """A cached name loads as a whole model, as layers and as a configuration, also in another revision."""
    checkpoint = checkpoints["mixtral single"]
    snapshot = cached(tmp_path, checkpoint.folder)
    options = {"cache_dir": tmp_path, **HERE}
    model = load_pretrained(NAME, local(), progress=False, **options)
    plain = load_pretrained(checkpoint.folder, local(), progress=False)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    source = load_layers(make_layers(checkpoint, local(), [0]), NAME, "mixtral", progress=False, **options)
    assert source.folder == snapshot
    assert read_config(NAME, **options).model_type == "mixtral"
    assert read_moe_config(NAME, local(), **options) == checkpoint.config
    cached(tmp_path, checkpoints["mixtral shards"].folder, OLDER, ref="v1")
    for revision in ("v1", OLDER):
        assert model_folder(NAME, revision=revision, **options).name == OLDER
    assert model_folder(NAME, **options).name == COMMIT
    cached(tmp_path, checkpoint.folder, name="one-word")
    assert model_folder("one-word", **options).name == COMMIT


def test_links_to_blobs_of_the_cache_alone_leave_a_folder(tmp_path):
    for place, followed in (("models--org--name/blobs", True), ("models--org--name/x", False), ("x/blobs", False)):
        target = tmp_path / place / "file"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        link = tmp_path / f"link to {place.replace('/', ' ')}"
        link.symlink_to(target)
        assert hub._is_cached_blob(link) is followed, place


def test_a_file_behind_a_link_to_another_folder_is_refused(tmp_path):
    """A file in a linked folder is no blob of a cache, even if its folder has that name."""
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sub").symlink_to(blobs)
    with pytest.raises(
        CheckpointError, match=r"blobs/x\.safetensors, outside the folder; copy the file into the folder"
    ):
        hub.file_inside(tmp_path / "model", "sub/x.safetensors")


def test_a_folder_comes_first(checkpoints, tmp_path, monkeypatch):
    """A folder takes precedence over a name, even if its relative path could be a name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    shutil.copytree(checkpoints["mixtral single"].folder, NAME)
    assert moe_layers(load_pretrained(NAME, local(), progress=False))


def test_what_is_asked_of_the_library(checkpoints, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return checkpoints["mixtral single"].folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    given = {"revision": "v2", "token": "secret", "cache_dir": "/cache", "local_files_only": False}
    load_pretrained(NAME, local(), progress=False, **given)
    for without_weights in (read_moe_config, num_experts, lambda name, _: read_config(name)):
        without_weights(NAME, local())
    (name, whole), *others = asked
    assert name == NAME
    assert whole.items() >= given.items()
    assert "*.safetensors" in whole["allow_patterns"]
    for _, small in others:
        assert "*.safetensors" not in small["allow_patterns"]  # configurations are small
        assert {"*.json", "*.model"} <= set(small["allow_patterns"])
    wanted = ["model.safetensors", "config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    same_weights = [f"{form}/model.safetensors" for form in ("original", "metal", "onnx")]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*wanted, *same_weights, "pytorch_model.bin", "consolidated-1.safetensors"],
        allow_patterns=whole["allow_patterns"], ignore_patterns=whole["ignore_patterns"],
    )  # fmt: skip
    assert list(kept) == wanted
    with pytest.raises(ConfigError, match=r"load_pretrained has no argument 'revison' \(did you mean 'revision'\?\)"):
        load_pretrained(NAME, local(), revison="v2")
    with pytest.raises(TypeError, match="unexpected keyword argument revison; of the Hub there are revision, token"):
        read_moe_config(NAME, local(), revison="v2")


def test_a_subfolder_of_a_name(checkpoints, tmp_path, monkeypatch):
    """Only the files of the subfolder are downloaded."""
    asked = []

    def download(name, **options):
        asked.append(options)
        return tmp_path

    shutil.copytree(checkpoints["mixtral single"].folder, tmp_path / "a" / "b")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder(NAME, subfolder="a/b/", revision="v2") == tmp_path / "a" / "b"
    (options,) = asked
    assert (options["revision"], "subfolder" in options) == ("v2", False)
    kept = huggingface_hub.utils.filter_repo_objects(
        ["a/b/model.safetensors", "a/b/config.json", "model.safetensors", "a/b/original/model.safetensors", "a/c.json"],
        allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"],
    )  # fmt: skip
    assert list(kept) == ["a/b/model.safetensors", "a/b/config.json"]


def test_names_that_are_nowhere(tmp_path, monkeypatch):
    options = {"cache_dir": tmp_path, **HERE}
    for call in (
        lambda name: load_pretrained(name, local(), **options),
        lambda name: read_config(name, **options),
        lambda name: model_folder(name, **options),
    ):
        with pytest.raises(
            CheckpointError, match=r"there is no folder org/mistyped, and no model of that name came from"
        ):
            call("org/mistyped")
        for path in ("/no/such/folder", "./org/model", "models/org/model", "org/mod el", "org/model/"):
            with pytest.raises(
                CheckpointError, match=r"there is no folder .*; give the folder of a checkpoint, or a name"
            ):
                call(path)

    def refused(*_, **__):
        raise OSError("no revision\nv9")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(CheckpointError, match=r"no model of that name .*OSError: no revision v9"):
        model_folder(NAME, revision="v9")
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"need huggingface_hub; install ep-moe\[hf\]"):
        model_folder(NAME)


def counted(cache, commits, downloads):
    """Return a `snapshot_download` that fakes the Hub: a download puts the model into the cache."""
    honest = huggingface_hub.snapshot_download

    def download(name, **options):
        if not options.get("local_files_only"):
            downloads.append(name)
            cached(cache, DEMO, commits[dist.get_rank()])
        return honest(name, **(options | HERE))

    return download


@pytest.mark.parametrize("asked", [{}, {"local_files_only": False}])
@pytest.mark.parametrize("first", [True, False])
def test_ranks_wait_long_for_what_may_be_downloaded_alone(first, asked, tmp_path, monkeypatch):
    """Only the rank that may download waits for a long time; a local folder needs no wait.

    The first rank of a host downloads. Another rank downloads only if its own cache, which it reads first, lacks the
    model.
    """
    done, tries = [], []

    def download(name, **options):
        tries.append(bool(options.get("local_files_only")))
        if tries[-1]:
            raise OSError("not in the cache")
        done.append("download")
        return tmp_path / COMMIT

    consensus = SimpleNamespace(
        first_here=lambda *_: first, require_equal=lambda *_: None,
        raise_on_all_ranks=lambda what, problem, deadline_s=None: done.append(deadline_s),
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model_folder(NAME, consensus, **asked)
    long = hub._LONGEST_S
    assert tries == ([False] if first else [True, False]), "of the cache alone"
    assert done == (["download", long, long] if first else [long, "download", long])
    done.clear()
    model_folder(tmp_path, consensus)
    assert done == [None, None]  # the context's own deadline


@distributed(2)
def test_one_rank_of_a_host_downloads():
    from tests.fixtures.distributed_cases import gather_from_all_ranks

    places = gather_from_all_ranks(tempfile.mkdtemp())
    downloads = []
    with EPContext.from_groups(device=rank_device()) as context, pytest.MonkeyPatch.context() as patch:
        one = Path(places[0])
        patch.setattr(huggingface_hub, "snapshot_download", counted(one, [COMMIT, COMMIT], downloads))
        assert model_folder(NAME, context.consensus, cache_dir=one).name == COMMIT
        assert sum(map(len, gather_from_all_ranks(downloads))) == 1
        assert moe_layers(load_pretrained(NAME, context, progress=False, cache_dir=one))  # cached by now
        # two hosts, each with its own cache
        mine = Path(places[dist.get_rank()]) / "own"
        patch.setattr(hub.socket, "gethostname", lambda: f"host{dist.get_rank()}")
        downloads.clear()
        patch.setattr(huggingface_hub, "snapshot_download", counted(mine, [COMMIT, COMMIT], downloads))
        model_folder(NAME, context.consensus, cache_dir=mine)
        assert gather_from_all_ranks(downloads) == [[NAME], [NAME]]
        # two hosts of one name
        patch.setattr(hub.socket, "gethostname", lambda: "localhost")
        again = Path(places[dist.get_rank()]) / "again"
        downloads.clear()
        patch.setattr(huggingface_hub, "snapshot_download", counted(again, [COMMIT, COMMIT], downloads))
        model_folder(NAME, context.consensus, cache_dir=again)
        assert gather_from_all_ranks(downloads) == [[NAME], [NAME]]
        # a push between two downloads
        patch.setattr(hub.socket, "gethostname", lambda: f"host{dist.get_rank()}")
        moved = Path(places[dist.get_rank()]) / "moved"
        patch.setattr(huggingface_hub, "snapshot_download", counted(moved, [COMMIT, OLDER], downloads))
        with pytest.raises(ConfigError, match=f'commit of {NAME}: "{COMMIT}" on rank 0, "{OLDER}" on rank 1'):
            model_folder(NAME, context.consensus, cache_dir=moved)
    shutil.rmtree(places[dist.get_rank()])


@distributed(2)
def test_an_error_of_one_rank_is_raised_on_all():
    from tests.fixtures.distributed_cases import gather_from_all_ranks

    with tempfile.TemporaryDirectory() as place, EPContext.from_groups(device=rank_device(), deadline_s=30) as context:
        mine = Path(place)
        if dist.get_rank() == 0:
            cached(mine, DEMO)
        with pytest.raises(CheckpointError, match=rf"rank 1: there is no folder {NAME}, and no model") as caught:
            load_pretrained(NAME, context, cache_dir=mine, local_files_only=True)
        assert len(set(gather_from_all_ranks(str(caught.value)))) == 1
        path = str(DEMO) if dist.get_rank() == 0 else "/no/such/folder"
        with pytest.raises(CheckpointError, match="rank 1: there is no folder /no/such/folder"):
            load_pretrained(path, context)
        assert load_pretrained(str(DEMO), context, progress=False) is not None  # the ranks are still in step


@pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")
def test_the_command_line_takes_names(tmp_path, monkeypatch):
    """Commands look up a name before ranks start. `tune` reads its configuration from there too."""
    honest = huggingface_hub.snapshot_download
    cached(tmp_path, DEMO, OLDER, ref="v1")

    def download(name, **options):
        return honest(name, **(options | HERE | {"cache_dir": tmp_path}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    run = ["run", NAME, "--text", str(DEMO / "heldout.txt"), "--text-tokens", "512", "--dp", "1"]
    result = CliRunner().invoke(app, [*run, "--revision", "v1"])
    assert result.exit_code == 0, result.output
    assert "some-model: 1 ranks" in result.output
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: there is no folder {NAME}, and no model of that name came from")
    assert len(result.output.splitlines()) == 1
    result = CliRunner().invoke(app, ["tune", "org/mistyped", "--tokens", "1", "--out", str(tmp_path / "tuned.json")])
    assert result.exit_code == 2
    assert "there is no folder org/mistyped, and no model of that name" in result.output
