"""`ep-moe run` and `ep-moe doctor` from end to end."""

import contextlib
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ep_moe import registry
from ep_moe.checkpoint.source import SINGLE
from ep_moe.cli import perplexity
from ep_moe.cli import run as run_module
from ep_moe.cli.app import app
from ep_moe.cli.run import DEMO, RunOptions, run
from ep_moe.parallel.groups import TorchrunEnv
from ep_moe.parallel.local_launch import run_local_ranks
from tests.fixtures.checkpoint_files import quiet, tiny_model
from tests.fixtures.programs import ON_CPU, TORCHRUN, ran
from tests.fixtures.transformers_models import tiny_transformers_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(TorchrunEnv.present(), reason="starts ranks of its own")

EXPERTS, TOP_K, MOE_LAYERS = 16, 2, 3  # of the demo
REBALANCED = {"window": 128, "text_tokens": 2048, "batch": 2, "redundant": 4, "eplb": True}
PRINTED = 1e-5  # half a unit of the fifth digit, to which perplexities are printed and compared


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


@functools.cache
@torch.no_grad()
def routed(folder, text, window):
    """Of the untouched model: log likelihoods [windows, window - 1] and each layer's routes [windows, window, K]."""
    windows = torch.tensor(list(text)).view(-1, window)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda router, _, outputs: ids.append(outputs[2].view(*windows.shape, -1)))
            experts = module.weight.shape[0]
    logits = model(input_ids=windows).logits[:, :-1].double().log_softmax(-1)
    return logits.gather(-1, windows[:, 1:].unsqueeze(-1)).squeeze(-1), ids, experts


def single_process(folder, text, window, tokens):
    """Perplexity and loads [layer][expert] over the first tokens of a text."""
    likelihood, ids, experts = routed(folder, bytes(text), window)
    count = tokens // window
    loads = [torch.bincount(layer[:count].flatten(), minlength=experts).tolist() for layer in ids]
    return math.exp(-likelihood[:count].mean()), loads


# --- the demo ----------------------------------------------------------------------------------------------------


@functools.cache
def rebalanced(**options):
    """The report of a run, for two tests."""
    return run(RunOptions(**REBALANCED | options))


def test_demo_rebalanced(monkeypatch):
    """The words of the command and its report; `test_rebalanced` has the numbers of the same run."""
    asked = []
    monkeypatch.setattr("ep_moe.cli.app.run_model", lambda options: asked.append(options) or rebalanced())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in REBALANCED.items() if name != "eplb"]
    result = invoke("run", "--eplb", *flags)
    assert {name: getattr(asked[0], name) for name in REBALANCED} == REBALANCED
    assert result.exit_code == 0, result.output
    before, after = re.search(r"balancedness +([\d.]+) before, ([\d.]+) after", result.output).groups()
    assert float(after) > float(before)
    first, second = re.findall(r"(?:ep_moe|perplexity) +([\d.]+)\n", result.output)
    assert first == second
    assert re.search(r"moved +[\d.]+ MiB between ranks, within \d+ forwards\n", result.output)


@pytest.mark.parametrize("kind", ["olmoe", "glm4_moe", "jamba"])
def test_a_model_with_its_own_router(kind, tmp_path):
    """Families of which only the experts are ours."""
    quiet()
    tiny_transformers_model(kind).save_pretrained(tmp_path / kind)
    text = tmp_path / "text.txt"
    text.write_bytes((DEMO / "heldout.txt").read_bytes()[:512])
    options = ("--text", text, "--dtype", "float32", "--window", 64, "--redundant", 4)
    result = invoke("run", tmp_path / kind, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"ep_moe +[\d.]+\n +transformers +[\d.]+ +\(one process; equal", result.output)


def test_demo_on_four_ranks():
    result = invoke("run")
    assert result.exit_code == 0, result.output
    assert "demo: 4 ranks (dp 2, tp 2; ep 4, etp 1), gloo on cpu" in result.output
    assert "perplexity over 16384 tokens" in result.output
    both = re.search(r"ep_moe +([\d.]+)\n +transformers +([\d.]+) +\(one process; equal", result.output)
    ours, theirs = both.groups()
    assert ours == theirs
    assert len(ours.replace(".", "")) == 5
    assert 1 < float(ours) < 256  # bytes, better than guessing
    for line in (r"layer 2( +\d+){4} +[01]\.\d{3}\n", r"expert 15( +\d+){3}\n", r"combine +[\d.]+ +\d+ +\d+%\n"):
        assert re.search(line, result.output), line


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp": 4, "text_tokens": 384},  # three windows: dp rank 3 has none
        {"dp": 4, "text_tokens": 640, "batch": 1},  # five windows: dp rank 0 steps twice
        {"etp": 2},
        {"dp": 4, "ep": 2, "all2all": "allgather", "text_tokens": 640, "etp": 2},
        {"tp": 4, "ep": 2},
        {"dp": 1, "tp": 1},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_report_is_that_of_one_process(options):
    options = {"window": 128, "text_tokens": 1024, **options}
    report = run(RunOptions(**options))
    tokens = options["text_tokens"]
    text = (DEMO / "heldout.txt").read_bytes()[:1024]
    perplexity, loads = single_process(DEMO, text, options["window"], tokens)
    assert report.tokens == tokens
    assert report.exact
    assert report.agrees
    assert report.perplexity == pytest.approx(perplexity, rel=PRINTED)
    assert report.reference == pytest.approx(perplexity, rel=PRINTED)
    assert report.expert_load == loads
    assert [sum(load) for load in loads] == [tokens * TOP_K] * MOE_LAYERS
    # the linear map: each EP rank has the next experts
    world = options.get("dp", 1) * options.get("tp", 1) if {"dp", "tp"} & options.keys() else 4
    ep = options.get("ep") or world // options.get("etp", 1)
    each = EXPERTS // ep
    assert report.rank_load == [[sum(load[r * each : (r + 1) * each]) for r in range(ep)] for load in loads]
    assert report.balancedness == [pytest.approx(sum(load) / ep / max(load)) for load in report.rank_load]
    windows, dp = tokens // options["window"], options.get("dp") or world // options.get("tp", 2)
    assert report.forwards == math.ceil(math.ceil(windows / dp) / options.get("batch", 8)) * MOE_LAYERS
    assert list(report.stages) == ["route", "place", "dispatch", "experts", "combine", "gather"]
    assert all(ms >= 0 for ms in report.stages.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"dp": 4, "tp": 1, "redundant": 0}, {"etp": 2}, {"dp": 4, "ep": 2}, {"dp": 1, "tp": 1, "redundant": 0}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_rebalanced(options):
    report = rebalanced(**options)
    options = REBALANCED | options
    found = report.rebalanced
    assert report.agrees, "before, after and in the untouched model"
    assert f"{found.perplexity:#.5g}" == f"{report.perplexity:#.5g}"
    alone = len(report.rank_load[0]) == 1
    # with redundant experts it reckons with equal shares of their replicas
    assert found.before == pytest.approx(critical_path(report.rank_load), abs=0.01 if options["redundant"] else 1e-9)
    # an expert that is alone can be no lighter than it is
    hottest = [0 if options["redundant"] else max(load) for load in report.expert_load]
    mean = [sum(load) / len(load) for load in report.rank_load]
    bound = sum(mean) / sum(map(max, mean, hottest))
    assert 0.95 * bound < found.after <= bound + 1e-9
    assert found.after > found.before or alone
    assert (found.sent_bytes > 0) is not alone
    assert found.usual_ms > 0
    assert not alone or found.forwards < 10 * 8, "it waits for what will not come"  # 8 forwards read the text


def critical_path(loads: list[list[int]]) -> float:
    return sum(sum(load) / len(load) for load in loads) / sum(map(max, loads))


def planted(**kwargs):
    """run_on_rank with a reference that is wrong in the fourth digit."""
    honest = run_module.reference_perplexity
    run_module.reference_perplexity = lambda *args: 1.001 * honest(*args)
    return run_module.run_on_rank(**kwargs)


def test_a_difference_is_exit_code_1(monkeypatch):
    def ranks(target, *args, **kwargs):
        assert target == "ep_moe.cli.run:run_on_rank"
        return run_local_ranks("tests.unit.cli.test_run:planted", *args, **kwargs)

    monkeypatch.setattr(run_module, "run_local_ranks", ranks)
    result = invoke("run", "--text-tokens", 512)
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output
    # in bfloat16, or quantized, nothing is promised
    for flags in (("--dtype", "bfloat16"), ("--quantization", "fp8_dynamic")):
        result = invoke("run", "--text-tokens", 512, *flags)
        assert result.exit_code == 0, result.output
        assert "DIFFERENT" not in result.output


def without_memory(**kwargs):
    """run_on_rank where the untouched model does not fit."""

    def reference(*_):
        raise torch.OutOfMemoryError("no room for the whole model")

    run_module.reference_perplexity = reference
    return run_module.run_on_rank(**kwargs)


def test_a_reference_that_cannot_run_is_one_sentence(monkeypatch):
    def ranks(target, *args, **kwargs):
        return run_local_ranks("tests.unit.cli.test_run:without_memory", *args, **kwargs)

    monkeypatch.setattr(run_module, "run_local_ranks", ranks)
    result = invoke("run", "--text-tokens", 512, "--dp", 2)
    assert result.exit_code == 2
    assert re.fullmatch(
        "run: starting 2 ranks on this machine\nerror: .*pass --no-reference: no room for the whole model\n",
        result.output,
    )


def test_rows_rounded_on_the_wire(tmp_path):
    """Of a tuned file, which says how rows travel, and by the flag: perplexities differ then, and may."""
    found = run(RunOptions(text_tokens=512, wire="fp8_block"))
    assert not found.exact
    assert found.perplexity != found.reference
    assert found.perplexity == pytest.approx(found.reference, rel=0.05)
    out = tmp_path / "tuned.json"
    made = invoke("tune", "demo", "--tokens", 2048, "--wire", "fp8_block", "--out", out)
    assert made.exit_code == 0, made.output
    used = invoke("run", "--text-tokens", 512, "--wire", "fp8_block", "--tuned", out)
    assert used.exit_code == 0, used.output


def test_a_calibrated_checkpoint_with_rows_under_its_scale(tmp_path):
    """The demo's experts in E4M3, as the Model Optimizer writes them."""
    tensors = {
        name: tensor for file in Path(str(DEMO)).glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for name in [name for name in tensors if ".experts." in name]:
        scale = tensors[name].float().abs().max() / 448
        tensors |= {name: (tensors[name].float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.05)
    (tmp_path / "fp8").mkdir()
    shutil.copy(DEMO / "config.json", tmp_path / "fp8")
    save_file(tensors, tmp_path / "fp8" / SINGLE)
    asked = {"model": str(tmp_path / "fp8"), "text": str(DEMO / "heldout.txt"), "text_tokens": 512, "reference": False}
    found = run(RunOptions(**asked, quantization="fp8_static", wire="fp8_tensor", dtype="float32"))
    plain = run(RunOptions(text_tokens=512, reference=False))
    assert found.perplexity != plain.perplexity
    assert found.perplexity == pytest.approx(plain.perplexity, rel=0.05)
    result = invoke("run", "--text-tokens", 512, "--wire", "fp8_tensor")
    assert result.exit_code == 2
    assert re.search(
        r"error: .*has no input scales of experts: it was not calibrated; choose another wire", result.output
    )


def test_without_reference():
    result = invoke("run", "--text-tokens", 512, "--no-reference", "--dp", 2)
    assert result.exit_code == 0, result.output
    assert re.search(r"ep_moe +[\d.]+\n", result.output)
    assert "transformers" not in result.output
    assert "demo: 2 ranks (dp 2, tp 1; ep 2, etp 1)" in result.output


def test_a_large_reference_is_left_out(monkeypatch):
    """Of a model that one process could not hold; unless it is asked for."""
    monkeypatch.setattr(run_module, "_REFERENCE_BYTES", 1000)
    monkeypatch.setattr(run_module, "run_local_ranks", here)
    result = invoke("run", "--text-tokens", 512, "--dp", 1)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"transformers +not run: its weights have \d+ GiB, all of them in one process; --reference", result.output
    )
    assert "equal to" in invoke("run", "--text-tokens", 512, "--dp", 1, "--reference").output


def test_the_reference_keeps_no_graph(monkeypatch):
    modes = []
    monkeypatch.setattr(perplexity, "_nll", lambda *_: modes.append(torch.is_grad_enabled()) or (0.0, 1))
    windows = torch.zeros(2, 8, dtype=torch.int64)
    perplexity.reference_perplexity(Path(str(DEMO)), windows, 1, torch.float32, torch.device("cpu"))
    assert modes == [False, False]


def here(target, world, arguments, **_):
    """In this process, whose settings a test has changed."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return [run_module.run_on_rank(**arguments)]
    finally:
        torch.distributed.destroy_process_group()


# --- the user's model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """A folder with a byte-level model, one with a small vocabulary, one with a tokenizer, and a text."""
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
    "--text {bytes}": "--text .*bytes is not a file",
    # found by the ranks
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


# --- the rest of the command line --------------------------------------------------------------------------------


def test_doctor_names_every_backend():
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert re.search(rf"torch +{re.escape(torch.__version__)}", result.output)
    assert re.search(rf"transformers +{re.escape(transformers.__version__)}", result.output)
    for kind in ("dispatchers", "experts"):
        for name in registry.targets(kind):
            reason = registry.unsupported_reason(kind, name) or "available"
            assert re.search(rf"{kind} +{name} +{re.escape(reason.split()[0])}", result.output), name


def test_explain_prints_the_table_of_a_model():
    result = invoke("explain", "qwen3-30b-a3b", "--dp", 4, "--max-tokens", 256, "--all")
    assert result.exit_code == 0, result.output
    pairs = {(a, b) for a in registry.targets("dispatchers") for b in registry.targets("experts")}
    pairs |= {("inside", name) for name in registry.targets("fused")}
    lines = [line.split() for line in result.output.splitlines() if line]
    assert {tuple(line[1:3]) for line in lines} == pairs
    (chosen,) = (line for line in lines if line[0] == "chosen")
    assert chosen[1:3] == ["allgather", "reference"]
    result = invoke("explain", "qwen3-30b-a3b", "--dp", 16, "--all2all", "torch_a2a", "--dtype", "float32")
    assert re.search(r"chosen +torch_a2a +reference +trains +top_k=8 < ep=16", result.output)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("nothing", "error: no bundled config is named 'nothing'; there are deepseek-v3"),
        ("demo --dp 3 --ep 2", "error: ep . etp must divide dp . tp"),
        ("demo --dtype int8", "error: dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ("demo --quantization x", "error: quantization must be one of none, .* got 'x'"),
        (
            "demo --wire fp4",
            r"error: Wire\.dispatch must be one of plain, fp8_block, fp8_row, fp8_tensor, mxfp8",
        ),
        ("demo --all2all x", "error: no backend among dispatchers is named 'x'"),
        ("demo --dp 2000000", "error: dp . tp must be at most 1000000 ranks, got 2000000"),
        (
            "demo --dp 99999999999999999999",
            "error: ParallelConfig.dp must be an integer of at most 2147483647",
        ),
        ("demo --max-tokens 0", "error: max_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_explain_refuses_in_one_sentence(flags, sentence):
    result = invoke("explain", *flags.split())
    assert result.exit_code == 2, result.output
    assert re.match(sentence, result.output), result.output


def test_explain_says_by_its_exit_code_that_nothing_can_run():
    result = invoke("explain", "demo", "--quantization", "fp8_block")
    assert result.exit_code == 1
    assert "multiple of 128" in result.output


def command(*args):
    root = Path(__file__).parents[3]
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=100, cwd=root, check=False)


def started(*args, processes, folder):
    """A command, once it has so many processes, and they.

    folder: for its temporary files
    """
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-m", "ep_moe", *args],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    begins = time.monotonic()
    while len(session(process.pid)) < processes:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < begins + 60
        time.sleep(0.05)
    time.sleep(0.5)
    return process, session(process.pid)


def session(leader):
    """Processes of a session, those that ended left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("how", "when"),
    [("SIGINT", "ranks"), ("SIGTERM", "ranks"), ("SIGKILL", "ranks"), ("SIGINT", "imports"), ("SIGKILL", "imports")],
)
def test_ranks_end_with_the_command(how, when, tmp_path):
    """And so does the fork server, which imports for seconds before it looks. With ranks: itself, the resource tracker,
    the fork server, its guard and the ranks."""
    args = ("run", "--text-tokens", "16384", "--no-reference", "--window", "32", "--batch", "1", "--quiet")
    count = 4 + (run_module.LAPTOP_RANKS if when == "ranks" else 0)
    process, members = started(*args, processes=count, folder=tmp_path)
    number = getattr(signal, how)
    if how == "SIGINT":
        for member in members:  # as a terminal does
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)
    else:
        process.send_signal(number)
    process.wait(timeout=30)
    begins = time.monotonic()
    while left := session(process.pid):
        assert time.monotonic() < begins + 4, f"{how}: {left} live on"
        time.sleep(0.05)
    output = process.stdout.read()
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[how], output
    # gloo itself says, line by line, that a peer ended to which it was still connecting
    said = [line for line in output.splitlines() if line.strip() and "gloo" not in line.lower()]
    assert said == (["interrupted"] if how == "SIGINT" else [])  # nor a word of leaked semaphores
    if (how, when) != ("SIGKILL", "imports"):  # there was nothing else to remove them
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith(("store", "stack"))]


def test_torchruns_ranks_end_at_once_by_sigterm(monkeypatch):
    """A handler of Python's would wait for the collective that the rank waits in."""
    found = []
    for present in (True, False):
        monkeypatch.setattr(TorchrunEnv, "present", lambda present=present: present)
        monkeypatch.setattr("ep_moe.cli.app.run_model", lambda _: found.append(signal.getsignal(signal.SIGTERM)))
        assert invoke("run").exit_code == 0
    assert found[0] is signal.SIG_DFL
    assert found[1] is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_module_form():
    result = command("-m", "ep_moe", "--help")
    assert result.returncode == 0, result.stderr
    assert re.search(r"run +Run a model", result.stdout)
    assert re.search(r"doctor +Print versions", result.stdout)


def test_torchrun_form():
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
    code, out, err = ran(*torchrun, "-m", "ep_moe", "run", "--text-tokens", "512", env=os.environ | ON_CPU)
    assert code == 0, err
    assert out.count("perplexity over 512 tokens") == 1
    assert out.count("2 ranks (dp 1, tp 2; ep 2, etp 1)") == 1
    assert "equal to 5 digits" in out
