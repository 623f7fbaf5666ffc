"""Test `ep-moe run` with a user's model and text, and the flags and files that it refuses in one sentence."""

import re
import shutil

import pytest
import torch

from ep_moe import ConfigError
from ep_moe.cli.run import RunOptions, _too_large, resolve_options, run
from ep_moe.parallel.groups import TorchrunEnv
from tests.fixtures.checkpoint_files import tiny_model
from tests.fixtures.run_command import PRINTED, invoke, single_process

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")

# --- the user's model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """Return a folder with a byte-level model, one with a small vocabulary, one with a tokenizer, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("users")
    tiny_model("mixtral", vocab_size=256).to(torch.bfloat16).save_pretrained(root / "bytes")
    tiny_model("deepseek_v3").save_pretrained(root / "small")
    words = ["what", "is", "said", "here", "means", "nothing", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    shutil.copytree(root / "small", root / "words")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(root / "words")
    (root / "text.txt").write_text("what is said here means nothing \N{EURO SIGN}\n" * 40)
    return root


def test_a_models_own_folder_and_text(users):
    result = invoke(
        "run", users / "bytes", "--text", users / "text.txt", "--dp", 3, "--dtype", "float32",
        "--window", 32, "--text-tokens", 1000, "--batch", 4,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "bytes: 3 ranks (dp 3, tp 1; ep 3, etp 1)" in result.output
    assert "perplexity over 992 tokens" in result.output
    assert "equal to 5 digits" in result.output


def test_dtype_is_the_checkpoints(users):
    options = RunOptions(
        model=str(users / "bytes"),
        text=str(users / "text.txt"),
        dp=1,
        tp=2,
        window=64,
        text_tokens=256,
        reference=False,
    )
    report = run(options)
    assert not report.exact
    text = (users / "text.txt").read_bytes()
    perplexity, loads = single_process(users / "bytes", text[:256], 64, 256)
    assert report.perplexity == pytest.approx(perplexity, rel=0.2)
    assert [sum(load) for load in report.expert_load] == [sum(load) for load in loads] == [256 * 2] * 2


def test_tokenizer_of_the_checkpoint(users):
    report = run(RunOptions(model=str(users / "words"), text=str(users / "text.txt"), dp=2, tp=1, window=35))
    assert report.tokens == 7 * 40
    perplexity, loads = single_process(users / "words", bytes(range(7)) * 40, 35, 280)
    assert report.perplexity == pytest.approx(perplexity, rel=PRINTED)
    assert report.expert_load == loads


# --- errors ------------------------------------------------------------------------------------------------------

BAD = {
    "--window 1": "--window must be at least 2, got 1",
    "--batch 0": "--batch must be at least 1, got 0",
    "--text-tokens 0": "--text-tokens must be at least 1, got 0",
    "--dp 0": "--dp must be at least 1, got 0",
    "--tp 0": "--tp must be at least 1, got 0",
    "--dp -2 --tp 2": "--dp must be at least 1, got -2",
    "--ep 0": "--ep must be at least 1, got 0",
    "--etp 0": "--etp must be at least 1, got 0",
    "--deadline 0": "--deadline must be a number of seconds, at least 0.001 and at most 604800, got 0",
    "--deadline -1": "--deadline must be a number of seconds",
    "--deadline nan": "--deadline must be a number of seconds, .*, got nan",
    "--deadline inf": "--deadline must be a number of seconds, .*, got inf",
    "--deadline 1e-9": "--deadline must be a number of seconds, .*, got 1e-09",
    "--deadline 1e6": "--deadline must be a number of seconds, .*, got 1000000.0",
    "--dp 1000000": "--dp . --tp = 1000000 ranks are more than the 128 that ep-moe run starts on one machine; ",
    "--tp 99999999999999999999": "--dp . --tp = 9+ ranks are more than the 128",
    "--deadline 1e300": "--deadline must be a number of seconds, .*, got 1e\\+300",
    "--dtype float8": "--dtype must be auto or one of float32, bfloat16, float16, got 'float8'",
    "--all2all carrier_pigeon": "--all2all must be auto or one of local, .*, got 'carrier_pigeon'",
    "--quantization fp9": "--quantization must be one of none, fp8_static, .*, got 'fp9'",
    "--quantization fp8_block": ".* cannot run here .quantization fp8_block needs .* a multiple of 128, got 64",
    "--experts nobody": "--experts must be auto or one of .*reference, .*flashinfer_mega_bf16.*, got .nobody.",
    "/nowhere/at/all --text {text}": "there is no folder /nowhere/at/all; give the folder of a checkpoint",
    "{text} --text {text}": "path must be a folder or the name of a model, got .*text.txt",
    "{bytes}": "a model needs --text: a file to read",
    "--text /nowhere": "--text /nowhere is not a file",
    "--revision v2": "--revision is for models of the Hub, got 'v2' with no model; leave it out",
    "{bytes} --text {text} --revision v2": "--revision is for models of the Hub, got 'v2' with '.*bytes'; leave it out",
    "--text {bytes}": "--text .*bytes is not a file",
    # detected by the ranks
    "--window 64 --text-tokens 63": "gives 63 tokens .at most --text-tokens., fewer than one --window of 64",
    "--etp 3": "etp must divide dp . tp, got etp=3, dp=2, tp=2",
    "--ep 3": "ep.*=3",
    "--all2all local": "all2all='local' with experts='auto' cannot run here",
    "{empty} --text {text} --dp 2": "empty holds no config.json",
    "{broken} --text {text} --dp 2": "broken/config.json is nothing that transformers can read",
    "{small} --text {text} --dp 2": "--text has token 226, but the model knows 64",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_sentence(flags, users):
    (users / "empty").mkdir(exist_ok=True)
    (users / "broken").mkdir(exist_ok=True)
    (users / "broken" / "config.json").write_text("{")
    paths = {name: users / name for name in ("bytes", "empty", "broken", "small")} | {"text": users / "text.txt"}
    result = invoke("run", *flags.format_map(paths).split())
    assert result.exit_code == 2, result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("run: starting")]
    assert len(lines) == 1, result.output
    assert re.match(f"error: .*{BAD[flags]}", lines[0])


def test_unparsable_flags():
    assert invoke("run", "--dp", "two").exit_code == 2
    assert invoke("run", "--dpp", 2).exit_code == 2
    assert invoke("walk").exit_code == 2


@pytest.mark.parametrize(
    ("given", "world", "found"),
    [
        ({"tp": 2}, 4, (2, 2)),
        ({"tp": 3}, 4, None),
        ({"tp": 3, "dp": 2}, 4, (2, 3)),
        ({"dp": 2}, 4, (2, 2)),
        ({}, 3, (3, 1)),
    ],
)
def test_ranks_are_shared_out_evenly(given, world, found):
    """Ranks are divided into dp and tp evenly, and a tp that does not divide them is refused.

    If both are given, the layout itself refuses what does not fit.
    """
    if found is None:
        with pytest.raises(ConfigError, match="tp=3 must divide the number of ranks, got 4; give --dp and --tp"):
            resolve_options(RunOptions(**given), world)
    else:
        resolved = resolve_options(RunOptions(**given), world)
        assert (resolved.dp, resolved.tp) == found


@pytest.mark.parametrize("files", [[32], [16, 17]], ids=["at the limit", "above it"])
def test_files_above_32_gib_have_no_reference_unless_it_is_asked_for(files, tmp_path):
    for number, size in enumerate(files):
        with (tmp_path / f"{number}.safetensors").open("wb") as file:
            file.truncate(size << 30)  # a sparse file
    sentence = "its weights have 33 GiB, all of them in one process; --reference runs it all the same"
    assert _too_large(tmp_path) == (sentence if sum(files) > 32 else None)
