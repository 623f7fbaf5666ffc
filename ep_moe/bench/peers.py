"""Alternatives to this package on one host of Hopper GPUs, as peers for `bench.layer`.

- FlashInfer's dispatch, experts and combine, connected by hand
- NCCL collectives around FlashInfer's experts, or around Triton's `fused_moe`
- fused layers of FlashInfer and of DeepGEMM
- transformers' own expert parallelism

Each is called as its authors would call it. None of our adapters runs in between, no id is renumbered, and no row is
copied. Weights are those of our layers, in FlashInfer's layout or the canonical one. FlashInfer uses the tiles that our
tuner found, because the autotuner of 0.7.2 does not always end within minutes. Experts are placed in order, so logical
ids are physical ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.all2all.flashinfer_nvlink import communication
from ep_moe.bench import libraries
from ep_moe.config import MoEConfig
from ep_moe.context import EPContext
from ep_moe.errors import ConfigError
from ep_moe.experts.flashinfer import cutlass_op
from ep_moe.experts.flashinfer.call_scales import Inputs, TensorScales, round_rows
from ep_moe.experts.fused.base import FusedDispatchShape
from ep_moe.experts.fused.flashinfer_mega import FlashInferMega, FlashInferMegaBf16, FlashInferMegaFp8, Window
from ep_moe.layer import MoELayer
from ep_moe.parallel.collectives import all_gather_single, reduce_scatter_single
from ep_moe.types import Routing
from ep_moe.weights.layouts.base import WeightLayout

DTYPE = torch.bfloat16
CUTLASS = "flashinfer_cutlass"
Experts = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # (rows, global ids, weights, output)
BY_NAME = {"none": "bf16", "fp8_block": "fp8 128 x 128"}


@dataclass(frozen=True)
class Entry:
    """One line of the benchmark.

    weights: "bf16" or "fp8"
    rows: format of rows on the wire, out / back
    call: runs a layer call; returns its result [T, H]
    close: frees its own resources; collective
    graph: the call can be captured in a CUDA graph; others are timed eagerly
    """

    owner: str
    name: str
    scheme: str
    weights: str
    rows: str
    call: Callable[[], Tensor]
    close: Callable[[], Any] = lambda: None
    graph: bool = True


@dataclass(frozen=True)
class Source:
    """A layer whose weights a peer reads, and the tiles that the kernel's tuner found."""

    layer: MoELayer
    tiles: list[int]


class Rounding:
    """Rounds a sender's rows to E4M3 with the single scale of the checkpoint (fp8 per tensor)."""

    def __init__(self, source: Source, x: Tensor) -> None:
        weights: Any = source.layer.experts.weights
        names = cutlass_op.scale_names("fp8_static")
        self._w13, self._w2, first, second = (weights.get_parameter(name) for name in names)
        self._inputs = Inputs(first, second, dynamic=False)
        self._rows = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        each = torch.empty_like(self._w13)  # float32 [L]
        self._scales = TensorScales(each, each.clone(), each.clone(), torch.empty_like(each[0]))

    @property
    def quant_scales(self) -> list[Tensor]:
        """The `quant_scales` argument of `cutlass_fused_moe`. Each call writes them."""
        scales = self._scales
        return [scales.alpha1, scales.quant2, scales.alpha2, scales.input_scale]

    def __call__(self, x: Tensor) -> Tensor:
        round_rows(x, self._w13, self._w2, self._inputs, self._rows, self._scales)
        return self._rows


class DefaultMegaFp8(FlashInferMegaFp8):
    """FlashInfer's own defaults: E4M3 rows out, and back too, summed over a rank's routes first."""

    @classmethod
    def settings(cls, dispatch_shape: FusedDispatchShape) -> dict[str, Any]:
        return {}


class Peers:
    """Makes the peers for one batch. x: bf16 [T, H]; routing: [T, K]; sources: by kernel and scheme"""

    def __init__(
        self,
        context: EPContext,
        config: MoEConfig,
        x: Tensor,
        routing: Routing,
        sources: Mapping[tuple[str, str], Source],
    ) -> None:
        self.rank_group, self.device, self.config = context.rank_groups["ep"], context.device, config
        self.x = x
        self.ids, self.weights = routing.ids.int().contiguous(), routing.weights.contiguous()
        self._sources = sources
        self._scratch: Tensor | None = None
        self._libraries: dict[bool, Any] = {}

    def recipes(self) -> dict[str, Callable[[], Entry]]:
        """Return by name a collective function that makes each peer. They are separate, because some may fail.

        Raises:
            ConfigError: No peer is run on such experts.
        """
        libraries.require_plain_swiglu(self.config, "peers")
        hand, nccl = "FlashInfer one-sided + CUTLASS", "NCCL AG/RS + CUTLASS"
        made: dict[str, Callable[..., Entry]] = {
            f"{hand}, bf16": partial(self.hand_made, hand, "none"),
            f"{hand}, fp8 per tensor": partial(self.hand_made, hand, "fp8_static"),
            f"{hand}, fp8 per tensor, answers too": partial(self.hand_made, hand, "fp8_static", rounds_back=True),
            f"{hand}, fp8 128 x 128": partial(self.hand_made, hand, "fp8_block"),
            "FlashInfer mega bf16": partial(self.mega, "FlashInfer mega", FlashInferMegaBf16, "none", "bf16 / bf16"),
            "FlashInfer mega fp8": partial(self.mega, "FlashInfer mega", DefaultMegaFp8, "fp8_block", "fp8 / fp8"),
            f"{nccl}, bf16": partial(self.gathered, nccl, nullcontext),
            f"{nccl}, bf16, grouped": partial(self.gathered, f"{nccl}, grouped", self._grouped),
            "DeepGEMM mega fp8": self.deepgemm,
            "transformers all_to_all": self.transformers,
        }
        for library in libraries.FUSED_MOE:
            for scheme, called in BY_NAME.items():
                name = f"NCCL AG/RS + {library} fused_moe"
                made[f"{name}, {called}"] = partial(self.gathered, name, self._grouped, scheme, library)
        return made

    def hand_made(self, name: str, scheme: str, *, rounds_back: bool = False) -> Entry:
        """Return FlashInfer's dispatch by one-sided writes, its experts and its combine.

        Experts write directly into the buffer that combine reads. With fp8 per tensor the sender rounds its rows, once.
        rounds_back: FlashInfer rounds results to E4M3 for combine
        """
        rounding = Rounding(self._source(CUTLASS, scheme), self.x) if scheme in cutlass_op.PRE_ROUNDED else None
        experts = self._experts(scheme, self.rank_group.size * len(self.x), rounding, all2all=True)
        library, tokens = self._communication(rounds_back), len(self.x)

        def call() -> Tensor:
            x = self.x if rounding is None else rounding(self.x)
            arrived = library.dispatch(x, self.ids, self.weights, hidden_states_scale=None, max_tokens_per_rank=tokens)
            out = library.get_combine_input_buffer(DTYPE)
            experts(arrived.hidden_states, arrived.topk_ids, arrived.topk_weights, out)
            combined: Tensor = library.combine(out)
            return combined

        rows = f"{'bf16' if rounding is None else 'fp8'} / {'fp8' if rounds_back else 'bf16'}"
        return Entry("peer", name, scheme, "bf16" if scheme == "none" else "fp8", rows, call)

    def gathered(
        self,
        name: str,
        together: Callable[[], AbstractContextManager[Any]],
        scheme: str = "none",
        library: str | None = None,
    ) -> Entry:
        """Return an all-gather of rows, each rank's own experts on all rows, and a reduce-scatter of the results.

        library: the library whose `fused_moe` computes; None for FlashInfer's CUTLASS
        """
        own = (self.x, self.ids, self.weights)
        whole = [tensor.new_empty(self.rank_group.size * len(tensor), *tensor.shape[1:]) for tensor in own]
        out = torch.empty_like(self.x)
        if library is None:
            experts = self._into(self._experts(scheme, len(whole[0]), None, all2all=False), torch.empty_like(whole[0]))
        else:
            experts = libraries.FUSED_MOE[library](self._rank_experts(scheme))

        def call() -> Tensor:
            with together():
                # as bytes, because gloo coalesces only tensors of one dtype
                for all_ranks, mine in zip(whole, own, strict=True):
                    all_gather_single(all_ranks.view(torch.uint8), mine.view(torch.uint8), group=self.rank_group.group)
            reduce_scatter_single(out, experts(*whole), group=self.rank_group.group)
            return out

        return Entry("peer", name, scheme, "bf16" if scheme == "none" else "fp8", "bf16 / bf16", call)

    def deepgemm(self) -> Entry:
        """Return DeepGEMM's fused layer for Hopper, which sends E4M3 rows out."""
        scheme, group = "fp8_block", self.rank_group.group
        step = libraries.deepgemm_mega(self._rank_experts(scheme), self.config, group, len(self.x))
        call = partial(step, self.x, self.ids, self.weights)
        return Entry("peer", "DeepGEMM mega", scheme, "fp8", "fp8 / bf16", call)

    def transformers(self) -> Entry:
        """Return transformers' expert parallelism, which sends a row once for each of its experts."""
        rank_experts = self._rank_experts("none")
        w13, w2 = (nn.Parameter(w, requires_grad=False) for w in (rank_experts.w13, rank_experts.w2))
        step = libraries.transformers_all_to_all(w13, w2, self.config, self.device)
        call = partial(step, self.x, self.ids, self.weights)
        name = "transformers all_to_all, eager"
        return Entry("peer", name, "none", "bf16", "bf16 / bf16", call, graph=False)

    def mega(self, name: str, kind: type[FlashInferMega], scheme: str, rows: str) -> Entry:
        """Return one of FlashInfer's fused kernels, with buffers of its own and ids that are ready."""
        experts: Any = self._source(kind.name, scheme).layer.experts
        bundle = experts.bundle({key: tensor.detach() for key, tensor in experts.weights.named_parameters()})
        window = Window(kind, experts.dispatch_shape, self.rank_group, self.device, bundle)
        call = partial(window.run, bundle, self.x, self.ids, self.weights)
        return Entry("peer", name, scheme, "bf16" if scheme == "none" else "fp8", rows, call, window.destroy)

    def close(self) -> None:
        """Free the shared resources, after the entries are closed. Collective."""
        for library in self._libraries.values():
            library.destroy()
        self._libraries, self._scratch = {}, None

    # --- parts -------------------------------------------------------------------------------------------------

    def _source(self, kernel: str, scheme: str) -> Source:
        if (kernel, scheme) not in self._sources:
            raise ConfigError(
                f"it reads the weights of a layer of {kernel} in {scheme}, and there is none: name {kernel}"
            )
        return self._sources[kernel, scheme]

    def _rank_experts(self, scheme: str) -> libraries.RankExperts:
        """Return this rank's experts of a layer whose weights are in the canonical layout."""
        for source in self._sources.values():
            held = source.layer.expert_weights
            if held.scheme.name == scheme and type(held.weight_layout) is WeightLayout:
                stored = {name: tensor.detach() for name, tensor in held.stored_tensors().items()}
                slots = torch.full((self.config.num_experts,), -1, dtype=torch.int32, device=self.device)
                first = held.num_slots * self.rank_group.rank
                slots[first : first + held.num_slots] = torch.arange(held.num_slots, device=self.device)
                return libraries.RankExperts(slots=slots, **stored)
        raise ConfigError(
            f"it reads canonical weights of a layer in {scheme}, and there is none: name bf16_triton, fp8_block_triton"
        )

    def _into(self, experts: Experts, out: Tensor) -> libraries.Step:
        """Return experts that write the result of every call to one tensor."""

        def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            experts(x, ids, weights, out)
            return out

        return call

    def _communication(self, rounds_back: bool) -> Any:
        """Return FlashInfer's communicator. The hand-made peers share it, because they run one call at a time."""
        if rounds_back not in self._libraries:
            group = {
                "world_size": self.rank_group.size,
                "rank": self.rank_group.rank,
                "device": self.device.index,
                "process_group": self.rank_group.group,
            }
            params = {
                "num_experts": self.config.num_experts,
                "top_k": self.config.top_k,
                "max_tokens_per_rank": len(self.x),
                "hidden_size": self.config.hidden_size,
                "dtype": DTYPE,
            }
            alone = {"extra_payload_bytes_per_token": 0, "use_low_precision_combine": rounds_back}
            self._libraries[rounds_back] = communication(group, params, alone)
        return self._libraries[rounds_back]

    def _grouped(self) -> AbstractContextManager[Any]:
        """Return a context manager that coalesces the three gathers into one launch of NCCL."""
        return dist.distributed_c10d._coalescing_manager(self.rank_group.group)

    def _experts(self, scheme: str, rows: int, rounding: Rounding | None, *, all2all: bool) -> Experts:
        """Return `cutlass_fused_moe` of this rank's experts, with global ids.

        The kernel skips -1 and the ids of other ranks (`start_expert`, `end_expert` in cutlass_fused_moe_kernels.cuh).
        all2all: rows without a local expert are not zeroed, because no kernel reads them
        """
        from flashinfer.fused_moe import cutlass_fused_moe, cutlass_fused_moe_workspace_size

        source, config = self._source(CUTLASS, scheme), self.config
        kernel: Any = source.layer.experts
        runner, weights = kernel.runner, kernel.weights
        share = {"ep_size": self.rank_group.size, "ep_rank": self.rank_group.rank}
        size = cutlass_fused_moe_workspace_size(
            rows,
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            x_dtype=runner.input,
            weight_dtype=runner.weight,
            output_dtype=runner.output,
            device=self.device,
            **share,
            **runner.flags,
        )
        # each call reads `self._scratch`, and graphs are captured after all peers are made: a larger one serves all
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        scales = [weights.get_parameter(part) for part in ("w13_scale", "w2_scale")] if scheme == "fp8_block" else []
        if rounding is not None:
            scales = rounding.quant_scales

        def call(x: Tensor, ids: Tensor, routing_weights: Tensor, out: Tensor) -> None:
            cutlass_fused_moe(
                x,
                ids,
                routing_weights,
                weights.get_parameter("w13"),
                weights.get_parameter("w2"),
                DTYPE,
                scales,
                output=out,
                enable_alltoall=all2all,
                profile_ids=cutlass_op.tactic_for(source.tiles, rows),
                workspace_buffer=self._scratch,
                **share,
                **runner.flags,
            )

        return call
