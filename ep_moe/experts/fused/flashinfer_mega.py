"""FlashInfer's mega kernels for Hopper: dispatch, experts and combine in one round on the current stream.

Rows are pushed into peers' memory over NVLink, computed there, and pushed back. The host does not wait.

Buffers have room for all routes of all ranks on each rank (`capacity_factor` 1), so no route is dropped. Layers of
equal shape in a context share the buffers. Physical ids are the kernel's expert ids: both are owner * slots_per_rank +
local.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ep_moe import registry
from ep_moe.all2all.capabilities import one_host_problem
from ep_moe.config import MoEConfig
from ep_moe.errors import BackendUnavailable, InputError
from ep_moe.experts.base import ExpertsOptions
from ep_moe.experts.fused.base import FusedCapabilities, FusedDispatchShape, FusedExperts, Routed
from ep_moe.parallel.layout import RankLayout
from ep_moe.parallel.rank_group import RankGroup
from ep_moe.placement.expert_map import ExpertMap
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.runtime.gpus import GPU
from ep_moe.types import Activation, PhysicalRouting, capturing
from ep_moe.weights.layouts.base import MegaBf16, WeightLayout

TOP_KS = (1, 2, 4, 6, 8)  # for which FlashInfer compiles its kernels; for other K, rows are padded with ids -1
# most elements of a bf16 product's output, less those of the last tile (MAX_OUTPUT_ELEMENTS, 0.7.2.post1)
ELEMENTS = (1 << 32) - (1 << 24)
TOKENS = 65535  # most tokens of a rank: the second grid dimension of the kernel that sums a bf16 round
INNER = 16384  # most columns for which the fp8 kernel's activation has shared memory
SETUP_S = 600.0  # time for compilation at first use

_COMMON = FusedCapabilities(
    travels=True,
    routes=False,
    any_map=True,
    static=True,
    schemes=frozenset(),  # set by each kernel
    activations=frozenset({Activation.SWIGLU}),
    dtypes=frozenset({torch.bfloat16}),
    biases=False,
    etp=True,
    cuda_graph=True,
    host_sync=False,
    deterministic=True,
    hidden_unit=128,
    inner_unit=128,
    min_ranks=2,
    max_ranks=32,
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
)


class FlashInferMega(FusedExperts):
    """The base class of both mega kernels."""

    _places: tuple[int, ...] | None = None
    _held: Any = None

    def connect(self) -> None:
        """Create FlashInfer's buffers for all layers of this shape, in the first call. Collective."""
        device = self.weights.device
        if capturing(device):
            return
        self.pool(lambda: Window(type(self), self.dispatch_shape, self.rank_group, device, self._bundle()))

    def compute(self, x: Tensor, routed: Routed) -> Tensor:
        assert isinstance(routed, PhysicalRouting)
        window: Window = self.pool(self._too_late)
        # the kernel skips id -1, but an id out of range would end the process
        valid = (routed.ids >= 0) & (routed.ids < self.dispatch_shape.num_physical)
        ids, weights = torch.where(valid, routed.ids, -1).int(), routed.weights.detach()
        wide = _top_k(self.dispatch_shape.top_k) - self.dispatch_shape.top_k
        if wide:
            ids, weights = pad(ids, (0, wide), value=-1), pad(weights, (0, wide))
        x = x.detach().contiguous()
        if x.data_ptr() % 16:  # the kernel reads rows 16 bytes at a time
            x = x.clone()
        return window.run(self._bundle(), x, ids.contiguous(), weights.contiguous())

    def _too_late(self) -> Any:
        raise InputError(f"{self.name} makes its buffers in the first call: run the layer once before a capture")

    def _bundle(self) -> Any:
        """Return FlashInfer's object for the stored weights.

        It is the same object as long as the weights keep their addresses, because FlashInfer validates each new one.
        """
        stored = dict(self.weights.stored_tensors().items())
        places = tuple(tensor.data_ptr() for tensor in stored.values())
        if places != self._places:
            self._places, self._held = places, self.bundle({name: t.detach() for name, t in stored.items()})
        return self._held

    @abstractmethod
    def bundle(self, stored: dict[str, Tensor]) -> Any:
        """Return FlashInfer's object for the stored weights, which it references without a copy."""

    @classmethod
    @abstractmethod
    def settings(cls, dispatch_shape: FusedDispatchShape) -> dict[str, Any]:
        """Return the settings of FlashInfer's configuration that are specific to this kernel."""

    @classmethod
    def available(cls) -> str | None:
        return registry.without_flashinfer()

    @classmethod
    def unsupported_platform(cls, layout: RankLayout, device: torch.device | GPU) -> str | None:
        return super().unsupported_platform(layout, device) or one_host_problem(cls.name, layout)

    @classmethod
    def unsupported_reason(
        cls,
        config: MoEConfig,
        layout: RankLayout,
        dtype: torch.dtype,
        scheme: Scheme = PLAIN,
        *,
        expert_map: ExpertMap | None = None,
        max_tokens: int | None = None,
        options: ExpertsOptions | None = None,
    ) -> str | None:
        rest: dict[str, Any] = {"expert_map": expert_map, "max_tokens": max_tokens, "options": options}
        reason = super().unsupported_reason(config, layout, dtype, scheme, **rest)
        if reason is not None or max_tokens is None:
            return reason
        if config.top_k > TOP_KS[-1]:
            return f"top_k must be at most {TOP_KS[-1]}, got {config.top_k}"
        return cls.size_problem(config, layout, max_tokens)

    @classmethod
    @abstractmethod
    def size_problem(cls, config: MoEConfig, layout: RankLayout, max_tokens: int) -> str | None:
        """Return which size is too large for this kernel, or None."""


class FlashInferMegaBf16(FlashInferMega):
    """Matrix products in bf16 with float32 sums. For combine each rank sends one bf16 row per token, rounded once."""

    name = "flashinfer_mega_bf16"
    tested_machines = "2 and 4 H200, 2 H100, one host; on CPU, gloo, over an emulation"
    weight_layout: ClassVar[type[WeightLayout]] = MegaBf16
    capabilities = dataclasses.replace(_COMMON, schemes=frozenset({"none"}), hidden_unit=256)

    def bundle(self, stored: dict[str, Tensor]) -> Any:
        sizes = (
            self.dispatch_shape.slots_per_rank,
            self.dispatch_shape.hidden_size,
            self.dispatch_shape.intermediate_size,
        )
        return library(self.name).weights(stored["w13"], stored["w2"], *sizes)

    @classmethod
    def settings(cls, dispatch_shape: FusedDispatchShape) -> dict[str, Any]:
        assert dispatch_shape.max_tokens is not None
        # FlashInfer's own rule for few tokens; set here because FlashInfer would read an environment variable first
        return {"combine_wire": "per_route" if dispatch_shape.max_tokens <= 8 else "prereduced"}

    @classmethod
    def size_problem(cls, config: MoEConfig, layout: RankLayout, max_tokens: int) -> str | None:
        if max_tokens > TOKENS:
            return f"it serves at most {TOKENS} tokens per rank, got max_tokens={max_tokens}"
        each = layout.ep * _top_k(config.top_k) * max(config.hidden_size, config.intermediate_size // layout.etp)
        if max_tokens * each <= ELEMENTS:
            return None
        return (
            f"it has room for every route of all ranks and counts elements in 32 bits: at most {ELEMENTS // each} "
            f"tokens per rank with these sizes, got max_tokens={max_tokens}"
        )

    @classmethod
    def buffer_bytes(cls, dispatch_shape: FusedDispatchShape) -> int:
        tokens, routes, rows = _sizes(dispatch_shape)
        hidden, inner, wide = dispatch_shape.hidden_size, dispatch_shape.intermediate_size, _top_k(dispatch_shape.top_k)
        assert dispatch_shape.max_tokens is not None
        window = 2 * tokens * hidden + 16 * routes + 2 * dispatch_shape.max_tokens * wide * hidden
        return window + rows * (4 * hidden + 2 * inner + 20) + 4 * tokens * (wide + 2)


class FlashInferMegaFp8(FlashInferMega):
    """Matrix products by DeepGEMM in E4M3, with weight scales per 128 x 128 block.

    Rows are rounded per 128 columns before they travel, and again between the products. For combine each route has its
    own bf16 row: in E4M3, FlashInfer's default, results would keep 4 bits of mantissa. A NaN in a row is lost:
    FlashInfer rounds it to -448 times the scale.
    """

    name = "flashinfer_mega_fp8"
    tested_machines = "2 and 4 H200, 2 H100, one host; on CPU, gloo, over an emulation"
    capabilities = dataclasses.replace(_COMMON, schemes=frozenset({"fp8_block"}))

    def bundle(self, stored: dict[str, Tensor]) -> Any:
        return library(self.name).weights(*(stored[name] for name in ("w13", "w13_scale", "w2", "w2_scale")))

    @classmethod
    def settings(cls, dispatch_shape: FusedDispatchShape) -> dict[str, Any]:
        return {"payload_dtype": "fp8", "combine_dtype": "bf16", "grouped_combine": False}

    @classmethod
    def size_problem(cls, config: MoEConfig, layout: RankLayout, max_tokens: int) -> str | None:
        if (inner := config.intermediate_size // layout.etp) > INNER:
            return f"intermediate_size / etp must be at most {INNER}, got {inner}"
        return None

    @classmethod
    def buffer_bytes(cls, dispatch_shape: FusedDispatchShape) -> int:
        tokens, routes, rows = _sizes(dispatch_shape)
        hidden, inner, wide = dispatch_shape.hidden_size, dispatch_shape.intermediate_size, _top_k(dispatch_shape.top_k)
        assert dispatch_shape.max_tokens is not None
        window = tokens * (hidden + hidden // 32) + 16 * routes + 2 * dispatch_shape.max_tokens * wide * hidden
        scales = (hidden + inner) // 32 * (routes + 31 * dispatch_shape.slots_per_rank)
        return window + rows * (3 * hidden + 5 * inner + 20) + scales


def _sizes(dispatch_shape: FusedDispatchShape) -> tuple[int, int, int]:
    """Return the tokens and routes of all ranks, and the rows for which the products have buffers."""
    assert dispatch_shape.max_tokens is not None
    tokens = dispatch_shape.num_ranks * dispatch_shape.max_tokens
    routes = tokens * _top_k(dispatch_shape.top_k)
    return tokens, routes, -(-routes // 128) * 128


def _top_k(top_k: int) -> int:
    return next((size for size in TOP_KS if size >= top_k), top_k)


class Window:
    """FlashInfer's kernel and its buffers, for one `DispatchShape` on one EP group.

    One round runs in it at a time. It is created and destroyed collectively.
    """

    def __init__(
        self,
        kind: type[FlashInferMega],
        dispatch_shape: FusedDispatchShape,
        rank_group: RankGroup,
        device: torch.device,
        bundle: Any,
    ) -> None:
        self.capabilities = kind.capabilities
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        own = self._own = library(kind.name)
        self._bootstrap = own.bootstrap(
            world_size=rank_group.size,
            rank=rank_group.rank,
            auto_bootstrap=False,
            device=device.index,
            process_group=rank_group.group,
        )
        self._fleet = own.fleet(
            num_experts=dispatch_shape.num_physical,
            max_tokens_per_rank=dispatch_shape.max_tokens,
            token_hidden_size=dispatch_shape.hidden_size,
        )
        config = own.config(
            intermediate_size=dispatch_shape.intermediate_size,
            top_k=_top_k(dispatch_shape.top_k),
            capacity_factor=1.0,
            dedup_dispatch=True,
            allow_unverified_p2p=True,  # checked by `one_host_problem` and FlashInfer's probes
            init_timeout_s=max(SETUP_S, 2 * rank_group.flight_recorder.deadline_s + 60),
            **kind.settings(dispatch_shape),
        )
        try:
            with self._current():
                self._kernel = own.kernel(config)
                self._kernel.bind_ep_bootstrap(self._bootstrap)
                self._kernel.validate_init(self._bootstrap, self._fleet)
                self._kernel.validate_transformed_weights(bundle, self._bootstrap, self._fleet)
                self._buffers = self._kernel.prepare_workspace(self._bootstrap, self._fleet)
        except (RuntimeError, ValueError) as error:  # FlashInfer checks this on all ranks, so all raise
            raise BackendUnavailable(f"{kind.name} cannot run here: {error}; choose other experts") from error

    def run(self, bundle: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run one round with a layer's weights. ids: int32, weights: float32, [T, K], K padded to one of `TOP_KS`"""
        out = torch.empty_like(x)
        self._follow()
        with self._current():
            self._kernel.validate_transformed_weights(bundle, self._bootstrap, self._fleet)
            tensors = self._own.tensors(hidden_states=x, topk_ids=ids, topk_weights=weights)
            self._kernel.stage_inputs(tensors, self._buffers, quantize_input=True)
            self._kernel.compute(self._buffers, bundle, output=out)
        return out

    def destroy(self) -> None:
        with self._current():
            self._kernel.destroy(self._buffers)
        self._buffers = None

    def _follow(self) -> None:
        """Wait for a last round that ran on another stream, which FlashInfer requires of its caller.

        Not needed in a capture, which begins with a synchronized device. Its user orders the replays.
        """
        if self._device.type != "cuda" or capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            self._stream.synchronize()
        self._stream = stream

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def library(name: str) -> Any:
    """Return FlashInfer's classes for a kernel: kernel, config, weights, bootstrap, fleet, tensors."""
    from flashinfer import moe_ep

    backend: Any
    weights: Any
    if name == FlashInferMegaBf16.name:
        from flashinfer.moe_ep.backends.mega.kernel.sm90.bf16_bf16_bf16_push_cake import Sm90CakeBf16MegaKernelBackend
        from flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe import Sm90CakeBf16Weights

        backend, weights = Sm90CakeBf16MegaKernelBackend, Sm90CakeBf16Weights
        config = moe_ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig
    else:
        from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_fp8_bf16_push_cuda import Sm90PushFp8MegaKernelBackend
        from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe import Sm90PushWeights

        backend, weights = Sm90PushFp8MegaKernelBackend, Sm90PushWeights
        config = moe_ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig

    class Kernel(backend):  # type: ignore[misc]
        """FlashInfer's kernel without shared buffers.

        FlashInfer would share buffers of one process group within the process, so two contexts would use the same.
        """

        def _workspace_pool_key(self, fleet_params: Any) -> None:
            return None

    return SimpleNamespace(
        kernel=Kernel,
        config=config,
        weights=weights,
        bootstrap=moe_ep.BootstrapConfig,
        fleet=moe_ep.FleetParams,
        tensors=moe_ep.MoEEpTensors,
    )
