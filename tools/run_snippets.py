"""Run the Python of README.md and docs/ on ranks, as it stands on the page.

    python tools/run_snippets.py [--nproc-per-node 2] [PAGE ...]

starts torchrun. The blocks of a page are one program in their order; no block calls `torch.cuda.set_device`. What a
page leaves open is given here: a small Qwen3-MoE where it names a checkpoint, a map, batches. One line per block: ok,
the error of the first rank that has one, or why it was not run. The exit status is 1 where a block fails.

Without GPUs, and with `--cpu`, the blocks that need none are run over gloo.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ("path/to/Qwen3-30B-A3B", "path/to/DeepSeek-V3")
OF_GPUS = r"torch\.cuda|quantization=|pipeline=|\.capture\(|max_tokens=|Wire\("  # kernels, or transports, of GPUs
BATCHES = 4

# what stands on a page before its first block, in words
BEFORE = {
    "docs/reference/quantization.md": """
        import torch
        from ep_moe import EPContext, MoEConfig, MoELayer
        from ep_moe.integrations.transformers import load_pretrained
        context = EPContext.from_torchrun(max_tokens=4096)
        config = MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)
    """,
}
# what is not made here
NOT_RUN = {
    "trace.npz": "needs the trace of a model of 256 experts",
    "tuned.json": "needs the file that ep-moe tune writes for these ranks",
    "calibrated_wire": "needs a calibrated fp8 checkpoint",
    "Qwen/Qwen3-30B-A3B": "needs the Hugging Face Hub",
    "(2, 2, 2), mesh_dim_names": "needs 8 ranks",
}


@dataclass(frozen=True)
class Block:
    """line: of the page, where the code begins"""

    page: str
    line: int
    source: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def unsupported_reason(self, gpus: bool) -> str | None:
        for word, reason in NOT_RUN.items():
            if word in self.source:
                return reason
        if "from peft" in self.source and importlib.util.find_spec("peft") is None:
            return "needs peft"
        if not gpus and re.search(OF_GPUS, without_guarded(self.source)):
            return "needs GPUs"
        return None


def without_guarded(source: str) -> str:
    """Source without the statements behind `if ... .type == "cuda":`, which do nothing on a CPU."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(".type == 'cuda'"):
            lines[node.lineno - 1 : node.body[-1].end_lineno] = [""] * (node.body[-1].end_lineno - node.lineno + 1)
    return "\n".join(lines)


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(page, text[: found.start(1)].count("\n") + 1, found[1])
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if blocks(path.relative_to(ROOT).as_posix())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="from the root, default all")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="over gloo, though there are GPUs")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.on_ranks:
        return on_rank(asked.pages)
    status = 0
    for page in asked.pages or pages():  # a process for each: what one leaves is not the next one's
        with tempfile.TemporaryDirectory() as folder:
            ranks = ["--standalone", "--nproc-per-node", str(asked.nproc_per_node)]
            command = [sys.executable, "-m", "torch.distributed.run", *ranks, __file__, "--on-ranks", page]
            own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun warns otherwise
            own |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            if asked.cpu:
                own["CUDA_VISIBLE_DEVICES"] = ""
            status |= subprocess.run(command, cwd=folder, env=os.environ | own, check=False).returncode != 0
    return status


def on_rank(asked: list[str]) -> int:
    import torch
    import torch.distributed as dist

    from ep_moe import EPContext

    gpus = torch.cuda.is_available()
    EPContext.from_torchrun().destroy()  # the default group, as the page's first line makes it
    gloo_group = dist.new_group(backend="gloo")
    make_files(gloo_group)
    status = 0
    for page in asked:
        space: dict[str, Any] = {"__name__": "__main__"}
        failed = run("before the first block", BEFORE.get(page, ""), 1, space, gloo_group, quiet=True)
        space["batches"] = [torch.ones(1, 8, dtype=torch.int64, device=own_device()) for _ in range(BATCHES)]
        for block in blocks(page):
            unsupported_reason = block.unsupported_reason(gpus) or (
                "an earlier block of this program failed" if failed else None
            )
            if unsupported_reason is not None:
                say(gloo_group, f"{block.name}: not run, {unsupported_reason}")
                continue
            partly = not gpus and without_guarded(block.source) != block.source.rstrip("\n")
            name = f"{block.name} (without its part for GPUs)" if partly else block.name
            failed |= run(name, block.source, block.line, space, gloo_group)
        status |= failed
    dist.barrier(group=gloo_group)
    sys.stdout.flush()
    os._exit(status)  # contexts that a page leaves to its reader are not waited for


def run(name: str, source: str, line: int, space: dict[str, Any], gloo_group: Any, *, quiet: bool = False) -> bool:
    """Whether it failed on a rank."""
    import textwrap

    import torch.distributed as dist

    error = None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # a line for each block is all
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
    """What pages name, in the folder where they run."""
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
