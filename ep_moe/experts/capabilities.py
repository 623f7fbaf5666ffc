"""The capabilities of expert kernels and fused kernels, and the options of users (`ExpertsOptions`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from ep_moe.checks import check_count, check_fields, set_counts, set_flags
from ep_moe.config import MoEConfig
from ep_moe.errors import ConfigError
from ep_moe.quant.schemes import PLAIN, Scheme
from ep_moe.renamed import renamed, renamed_field
from ep_moe.types import Activation, RowLayout, Weighting, dtype_name


@renamed_field("run_on", "tested_capabilities")
@dataclass(frozen=True, kw_only=True)
class KernelCapabilities:
    """What any kernel can do. The defaults promise nothing.

    Args:
        activations: Supported activations between the two expert matrices.
        dtypes: Supported dtypes of the layer.
        biases: Experts may have biases.
        etp: An expert's intermediate size may be split over ranks.
        cuda_graph: A CUDA graph can capture a call.
        host_sync: The host waits for the device in a call.
        deterministic: Equal inputs give equal bits, always or if `ExpertsOptions.deterministic` is set.
        exact: It supports `ExpertsOptions.exact`.
        differentiable: A call has a backward.
        float8: It supports `ExpertsOptions.float8`.
        schemes: Names of quantization schemes (`quant.schemes.SCHEMES`).
        spare_sms: It supports `ExpertsOptions.spare_sms`.
        min_compute_capability: Lowest compute capability of a GPU, such as (9, 0); None for any.
        max_compute_capability: Highest compute capability of a GPU; None for any.
        tested_capabilities: Compute capabilities of the GPUs on which it was tested, None for any. If "auto" chose the
            kernel, a layer on another GPU warns.
        devices: Device types.
        ahead_of: For kernels of other packages: names of kernels before which "auto" tries this one. If empty, "auto"
            tries it last.
    """

    activations: frozenset[Activation]
    dtypes: frozenset[torch.dtype]
    biases: bool = False
    etp: bool = False
    cuda_graph: bool = False
    host_sync: bool = True
    deterministic: bool = False
    exact: bool = False
    differentiable: bool = False
    float8: bool = False
    schemes: frozenset[str] = frozenset({PLAIN.name})
    spare_sms: bool = False
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    tested_capabilities: frozenset[tuple[int, int]] | None = None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    ahead_of: frozenset[str] = frozenset()

    run_on = renamed("run_on", "tested_capabilities")
    problem = renamed("problem", "unsupported_reason")

    def check(self) -> None:
        """Check the fields. The registry calls this on lookup, so one wrong class does not disable its whole module.

        Raises:
            ConfigError: A field has a wrong type or is out of range.
        """
        check_fields(self, KernelCapabilities)

    def unsupported_reason(
        self, config: MoEConfig, dtype: torch.dtype, etp: int, scheme: Scheme, options: ExpertsOptions | None
    ) -> str | None:
        """Say which property of a layer the capabilities do not cover.

        Args:
            config: The layer's configuration.
            dtype: Dtype of the layer.
            etp: Ranks that share an expert's intermediate size.
            scheme: Quantization scheme of the experts.
            options: How the kernel runs, None for the defaults.

        Returns:
            None if they cover the layer, else the reason.
        """
        if scheme.name not in self.schemes:
            return f"quantization {scheme.name} is not among {', '.join(sorted(self.schemes))}"
        if options is not None and options.deterministic and not self.deterministic:
            return "it is not deterministic"
        if options is not None and options.exact and (problem := self._inexact(etp)) is not None:
            return problem
        if options is not None and options.spare_sms and not self.spare_sms:
            return f"it cannot leave multiprocessors free (spare_sms={options.spare_sms})"
        if options is not None and options.recompute and not self.differentiable:
            return "it has no backward (recompute=True)"
        if options is not None and options.float8 and not self.float8:
            return "its backward multiplies only in the layer's dtype (float8=True)"
        if dtype not in self.dtypes:
            return f"dtype {dtype_name(dtype)} is not among {', '.join(sorted(map(dtype_name, self.dtypes)))}"
        if config.activation not in self.activations:
            known = ", ".join(sorted(activation.value for activation in self.activations))
            return f"activation {config.activation.value} is not among {known}"
        if config.expert_bias and not self.biases:
            return "it has no expert biases (expert_bias=True)"
        if etp > 1 and not self.etp:
            return f"it cannot cut experts over ranks (etp={etp})"
        return self._size_problem(config, dtype, etp, options)

    def _size_problem(
        self, config: MoEConfig, dtype: torch.dtype, etp: int, options: ExpertsOptions | None
    ) -> str | None:
        return None

    def _inexact(self, etp: int) -> str | None:
        if not self.exact:
            return "it does not promise that a row's result is independent of other rows (exact=True)"
        if etp > 1:
            return f"etp={etp} cuts a row's sum over ranks, which exact=True forbids; use etp=1"
        return None


@renamed_field("run_on", "tested_capabilities")
@dataclass(frozen=True, kw_only=True)
class ExpertsCapabilities(KernelCapabilities):
    """What an expert kernel can do; one constant per class. Takes the arguments of `KernelCapabilities` too.

    Args:
        layouts: Row layouts that it reads. For a RANK_MAJOR kernel, `as_rank_major` converts the others.
        weightings: Who multiplies by the routing weights.
        alignment_bytes: The bytes of a row of H and of I (its etp shard) must be a multiple of this.
        row_formats: Values of `Wire.dispatch` that it reads. Other rows are converted to the layer's dtype before.
        wire_ids: It reads `Received.wire_ids`. For other kernels they are converted to local ids before.
        peer_out: It writes to `Received.peer_out`, for RANK_MAJOR rows.
        per_route: It supports `Received.per_route`.
    """

    layouts: frozenset[RowLayout] = frozenset({RowLayout.RANK_MAJOR})
    weightings: frozenset[Weighting] = frozenset({Weighting.EXPERTS})
    alignment_bytes: int = 16
    row_formats: frozenset[str] = frozenset({"plain"})
    wire_ids: bool = False
    peer_out: bool = False
    per_route: bool = False

    def check(self) -> None:
        """Check the fields. The registry calls this on lookup, so one wrong class does not disable its whole module.

        Raises:
            ConfigError: A field has a wrong type or is out of range.
        """
        check_fields(self, ExpertsCapabilities)
        check_count("ExpertsCapabilities.alignment_bytes", self.alignment_bytes, at_least=1)

    def _size_problem(
        self, config: MoEConfig, dtype: torch.dtype, etp: int, options: ExpertsOptions | None
    ) -> str | None:
        # the narrowest dtype that the matrix products read
        read = torch.float8_e4m3fn if options is not None and options.float8 else dtype
        unit = self.alignment_bytes // gcd(self.alignment_bytes, read.itemsize)
        inner = config.intermediate_size // etp
        for name, size in (("hidden_size", config.hidden_size), ("intermediate_size / etp", inner)):
            if size % unit:
                return f"{name} must be a multiple of {unit} in {dtype_name(read)}, got {size}"
        return None


@renamed_field("run_on", "tested_capabilities")
@dataclass(frozen=True, kw_only=True)
class FusedCapabilities(KernelCapabilities):
    """What a fused kernel can do; one constant per class. Takes the arguments of `KernelCapabilities` too.

    Args:
        travels: The kernel includes dispatch and combine. If False, it serves one EP rank.
        routes: The kernel includes routing, from the logits of the layer's `Router`. Load is not counted, and experts
            have no placement.
        any_map: It supports any expert map with equally many slots on every rank, also with replicas. If False, it
            supports only the linear map.
        static: Its buffers are allocated once, for `EPContext(max_tokens=...)`.
        top_ks: Supported values of K, None for any.
        hidden_unit: H must be a multiple of this.
        inner_unit: I (its etp shard) must be a multiple of this.
        min_ranks: The fewest ranks of the EP group.
        max_ranks: The most ranks of the EP group, None for no limit.
    """

    travels: bool
    routes: bool
    any_map: bool
    static: bool
    top_ks: frozenset[int] | None = None
    hidden_unit: int = 1
    inner_unit: int = 1
    min_ranks: int = 1
    max_ranks: int | None = None
    devices: frozenset[str] = frozenset({"cuda"})

    def check(self) -> None:
        """Check the fields. The registry calls this on lookup, so one wrong class does not disable its whole module.

        Raises:
            ConfigError: A field has a wrong type or is out of range.
        """
        check_fields(self, FusedCapabilities)
        for name in ("hidden_unit", "inner_unit", "min_ranks", *(() if self.max_ranks is None else ("max_ranks",))):
            check_count(f"FusedCapabilities.{name}", getattr(self, name), at_least=1)


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """Options of a kernel.

    Args:
        deterministic: Equal inputs give equal bits.
        chunk_rows: The most received rows of one kernel call. More rows take several calls, which bounds scratch
            memory.
        spare_sms: Multiprocessors that long-running kernels leave free for an overlapped transport
            (`MoELayer(pipeline=)`).
        recompute: In training, save only a call's received rows, and recompute the experts' inner rows in backward.
            Unlike with `torch.utils.checkpoint` of the layer, rows are neither routed nor dispatched again.
        float8: In training, multiply in E4M3 in forward and for the gradients of rows. Each row and each output channel
            has a scale from its largest magnitude in that step. Gradients of the matrices are computed in bf16, and the
            stored matrices do not change dtype.
        exact: A token's output bits depend only on the token, the weights and the scheme: not on the batch, the ranks,
            the expert map, the transport, or how the layer is called (docs/how-to/exactness.md).

    Raises:
        ConfigError: A number is out of range, or float8 and exact are both set.
    """

    deterministic: bool = False
    chunk_rows: int = 16384
    spare_sms: int = 0
    recompute: bool = False
    float8: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        set_counts(self, spare_sms=0, chunk_rows=1)
        set_flags(self, "deterministic", "recompute", "float8", "exact")
        if self.float8 and self.exact:
            raise ConfigError(
                "ExpertsOptions.float8 is True, and exact=True promises the bits of calls without gradients, which "
                "multiply in the layer's dtype; set one of the two"
            )
