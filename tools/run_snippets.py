"""Run the Python and the commands of README.md, CONTRIBUTING.md and docs/, as they stand on the page.

    python tools/run_snippets.py [--cpu] [--nproc-per-node 2] [--at-once 1] [PAGE ...]

The Python blocks of a page form one program, run in order on torchrun's ranks. No block calls `torch.cuda.set_device`.
This tool supplies what a page leaves open: a small Qwen3-MoE where it names a checkpoint, a map, batches. Commands run
afterwards, in a folder per page with copies of examples/, launch/, docs/ and configs/.

A page marks its blocks:

- ```python title="use.py": a part of that file, which a later command runs, and not of the program.
- ```bash: commands, which must exit with 0.
- # needs 2 GPUs, as the first line: not run with fewer.
- # not run in CI: REASON, as the first line: not run by this tool.
- ```text title="output": lines that the commands before it print on a CPU, in any order.

Each block prints one line: ok, the error, or why it was not run. The exit status is 1 if a block fails.

Without GPUs, and with `--cpu`, the blocks that need no GPU run over gloo.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import snippets
from snippets import ROOT, Block

CHECKPOINTS = ("path/to/Qwen3-30B-A3B", "path/to/DeepSeek-V3")
FILES = (*CHECKPOINTS, "map.json")
OF_GPUS = r"torch\.cuda|quantization=|pipeline=|\.capture\(|max_tokens=|Wire\("  # need GPU kernels or transports
BATCHES = 4

# what a page describes in words before its first block
BEFORE = {
    "docs/reference/quantization.md": """
        import torch
        from ep_moe import EPContext, MoEConfig, MoELayer
        from ep_moe.integrations.transformers import load_pretrained
        context = EPContext.from_torchrun(max_tokens=4096)
        config = MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)
    """,
}
# paths that this tool does not create
NOT_RUN = {
    "trace.npz": "needs the trace of a model of 256 experts",
    "tuned.json": "needs the file that ep-moe tune writes for these ranks",
    "calibrated_wire": "needs a calibrated fp8 checkpoint",
    "Qwen/Qwen3-30B-A3B": "needs the Hugging Face Hub",
    "(2, 2, 2), mesh_dim_names": "needs 8 ranks",
}


def unsupported_reason(block: Block, gpus: bool) -> str | None:
    for word, reason in NOT_RUN.items():
        if word in block.source:
            return reason
    if "from peft" in block.source and importlib.util.find_spec("peft") is None:
        return "needs peft"
    if not gpus and re.search(OF_GPUS, without_guarded(block.source)):
        return "needs GPUs"
    return None


def without_guarded(source: str) -> str:
    """Return the source without statements under `if ... .type == "cuda":`, which do nothing on a CPU."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(".type == 'cuda'"):
            lines[node.lineno - 1 : node.body[-1].end_lineno] = [""] * (node.body[-1].end_lineno - node.lineno + 1)
    return "\n".join(lines)


def pages() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="from the root, default all")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=1, help="pages that run beside each other")
    parser.add_argument("--cpu", action="store_true", help="over gloo, though there are GPUs")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.on_ranks:
        return on_rank(asked.pages)
    gpus = 0 if asked.cpu else count_gpus()

    def failed(page: str) -> bool:  # a process and a folder per page: what one leaves does not reach the next
        with tempfile.TemporaryDirectory() as folder:
            return run_page(page, Path(folder), gpus, asked.nproc_per_node)

    with ThreadPoolExecutor(asked.at_once) as pool:
        return int(any(list(pool.map(failed, asked.pages or pages()))))


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run_page(page: str, folder: Path, gpus: int, nproc_per_node: int) -> bool:
    """Run a page. Return whether a block failed."""
    failed = False
    reasons = {block: unsupported_reason(block, gpus > 0) for block in program(page)}
    if reasons and all(reasons.values()):
        for block, reason in reasons.items():
            print(f"{block.name}: not run, {reason}", flush=True)
    elif reasons:
        ranks = ["--standalone", "--nproc-per-node", str(nproc_per_node)]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, __file__, "--on-ranks", page]
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun warns if it is unset
        variables = snippets.environment(folder, gpus) | own
        failed |= subprocess.run(command, cwd=folder, env=variables, check=False).returncode != 0
    found = snippets.blocks(page)
    if any(block.kind == "bash" for block in found):
        snippets.make_folder(folder)
    for block, became, wrong in snippets.run_commands(found, folder, gpus, snippets.commands_of_ci()):
        print(f"{block.name}: {became}", flush=True)
        failed |= wrong
    return failed


def program(page: str) -> list[Block]:
    return [block for block in snippets.blocks(page) if block.kind == "python" and not block.title]


def on_rank(asked: list[str]) -> int:
    import torch
    import torch.distributed as dist

    from ep_moe import EPContext

    gpus = torch.cuda.is_available()
    EPContext.from_torchrun().destroy()  # the default group, as the page's first line makes it
    gloo_group = dist.new_group(backend="gloo")
    if any(name in block.source for page in asked for block in program(page) for name in FILES):
        make_files(gloo_group)
    status = 0
    for page in asked:
        space: dict[str, Any] = {"__name__": "__main__"}
        failed = run("before the first block", BEFORE.get(page, ""), 1, space, gloo_group, quiet=True)
        space["batches"] = [torch.ones(1, 8, dtype=torch.int64, device=own_device()) for _ in range(BATCHES)]
        for block in program(page):
            reason = unsupported_reason(block, gpus) or ("an earlier block of this program failed" if failed else None)
            if reason is not None:
                say(gloo_group, f"{block.name}: not run, {reason}")
                continue
            partly = not gpus and without_guarded(block.source) != block.source.rstrip("\n")
            name = f"{block.name} (without its part for GPUs)" if partly else block.name
            failed |= run(name, block.source, block.line, space, gloo_group)
        status |= failed
    dist.barrier(group=gloo_group)
    sys.stdout.flush()
    os._exit(status)  # do not wait for contexts that a page leaves open


def run(name: str, source: str, line: int, space: dict[str, Any], gloo_group: Any, *, quiet: bool = False) -> bool:
    """Run a block. Return whether it failed on a rank."""
    import textwrap

    import torch.distributed as dist

    error = None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # print only the line of each block
            exec(compile("\n" * (line - 1) + textwrap.dedent(source), name, "exec"), space)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=gloo_group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
    if failed or not quiet:
        say(gloo_group, f"{name}: {failed[0] if failed else 'ok'}")
    return bool(failed)


def say(gloo_group: Any, text: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(text, flush=True)


def own_device() -> Any:
    from ep_moe.parallel.groups import local_device

    return local_device()


def make_files(gloo_group: Any) -> None:
    """Create the files that pages name, in the folder where they run."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from ep_moe import ExpertMap

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=256, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
            norm_topk_prob=True,
        )  # fmt: skip
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        for path in CHECKPOINTS:
            model.save_pretrained(path)
        ExpertMap.redundant(128, dist.get_world_size(), 2 * dist.get_world_size()).save("map.json")
    dist.barrier(group=gloo_group)


if __name__ == "__main__":
    raise SystemExit(main())
