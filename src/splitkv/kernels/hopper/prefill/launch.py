"""The host side that kernels for whole sequences on Hopper share: descriptors, and the launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.core.kv import Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import box_rows
from splitkv.kernels import prefill
from splitkv.kernels.combine import Final
from splitkv.kernels.hopper.prefill.records import Lengths, ScalePointers
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.kernels.host.relaunch import (
    Sequences,
    TensorMaps,
    bind_to_descriptors,
    in_clusters,
    observed,
    tile_of,
)
from splitkv.kernels.host.sequence_sizes import bounds_of, lse_strides, scale_and_softcap
from splitkv.kernels.host.sequences import (
    SequenceLauncher,
    SequenceSplits,
    combine_launch,
    result_shapes,
)

PANEL_BYTES = 128  # of the columns in TMA's widest swizzle
DESCRIPTORS = ("q_desc", "q_rest_desc", "k_desc", "k_rest_desc", "v_desc", "out_desc")
PER_CALL = (
    *DESCRIPTORS,
    *("final", "partial", "count_ptr", "lengths", "sink_ptr", "scale_ptrs", "scale", "softcap"),
)
"""The arguments of these kernels that change from call to call, in the order of `Sequences`."""


class BoundKernel(NamedTuple):
    """A kernel for whole sequences bound to one plan and one memory layout.

    kernel         gives the jit function
    grid           programs along each axis
    fixed          the arguments that never change, by name
    num_warps      of the first role; the others are the kernel's own
    descriptors    of operands and out: TMA descriptors by name, or None
    splits         SequenceSplits
    cluster_size   programs that are a cluster, 0: none are; exchange_bytes: of shared memory of
                   each, for what they exchange
    """

    kernel: Callable[[], Any]
    grid: tuple[int, int, int]
    fixed: dict[str, Any]
    num_warps: int
    descriptors: Callable[[Operands, Tensor], dict[str, TensorDescriptor | None]]
    splits: SequenceSplits
    cluster_size: int = 0
    exchange_bytes: int = 0


class Box(NamedTuple):
    """The box that TMA copies at once: tokens and heads of all columns, or of `dim` of them.

    panel_bytes   of the columns in one swizzle
    length        tokens that a sequence has of those that there is room for; None: all
    """

    tokens: int
    heads: int
    dim: int
    panel_bytes: int = PANEL_BYTES
    length: int | None = None


def box_descriptor(x: Any, box: Box) -> TensorDescriptor:
    """x [(batch,) tokens, heads, dim] as TMA is to see it, in boxes [1, tokens, heads, dim]."""
    shape, strides, size = list(x.shape), list(x.stride()), x.element_size()
    if len(shape) == 3:
        shape, strides = [1, *shape], [shape[-1], *strides]
    elif box.length is not None:
        shape[1] = max(1, box.length)
    # along a single element there are no steps, and torch may say anything
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, strides, strict=True)]
    swizzle = min(box.panel_bytes, box.dim * size)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=4)
    return TensorDescriptor(
        x, shape, [*strides[:3], 1], [1, box.tokens, box.heads, box.dim], layout
    )


def descriptors_of(
    plan: Plan, q_box: Box, out_box: Box, *, ordered_values: bool = False
) -> Callable[[Operands, Tensor], dict[str, TensorDescriptor | None]]:
    """A function of operands and out that gives the descriptors of a plan.

    ordered_values   V is in order, where K is in pages
    """
    problem, tile_n = plan.problem, plan.config.tile_n
    main, rest = problem.head_dim_v, problem.head_dim - problem.head_dim_v
    tokens = box_rows(problem, tile_n)
    paged = isinstance(problem.place, Paged)
    length = None if paged else problem.seqlen_k

    def made(x: Operands, out: Tensor) -> dict[str, TensorDescriptor | None]:
        widest = PANEL_BYTES // x.k.element_size() if paged else max(main, rest)
        keys = Box(tokens, 1, min(main, widest), length=length)
        values = Box(tile_n, 1, main) if ordered_values else keys
        keys_rest = Box(tokens, 1, min(rest, widest), length=length)
        return {
            "q_desc": box_descriptor(x.q, q_box),
            "q_rest_desc": box_descriptor(x.q, q_box._replace(dim=rest)) if rest else None,
            "k_desc": box_descriptor(x.k, keys),
            "k_rest_desc": box_descriptor(x.k, keys_rest) if rest else None,
            "v_desc": box_descriptor(x.v, values),
            "out_desc": box_descriptor(out, out_box),
        }

    return made


class ItemTiling(NamedTuple):
    """The row tiles of a launch: of a lane, lanes, lanes that go together, and, of all lanes, row
    tiles and the further splits of their keys."""

    tiles: int
    lanes: int
    width: int
    items: int


def hopper_size_arguments(
    plan: Plan, operands: Operands, tiling: ItemTiling, splits: SequenceSplits, packed_heads: int
) -> dict[str, Any]:
    """The sizes and strides that all these kernels take, by name."""
    problem, table, lse = plan.problem, operands.page_table, lse_strides(operands.q)
    left, right, sink_tokens = bounds_of(problem)
    out = prefill.strides_of_out(problem, operands)
    return {
        "left": left,
        "right": right,
        "sink_tokens": sink_tokens,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "batch": problem.batch,
        "total_q": operands.q.shape[:-2].numel(),
        "lane_heads": problem.num_heads // packed_heads,
        "stride_lse_b": lse.b,
        "stride_lse_h": lse.h,
        "stride_table": table.stride(0) if table is not None else 0,
        "tiles": tiling.tiles,
        "lanes": tiling.lanes,
        "width": tiling.width,
        "items": tiling.items,
        "num_splits": splits.num_splits,
        "split_tiles": splits.split_tiles,
        "max_tokens": splits.max_tokens,
        "stride_ob": out.b,
        "stride_ot": out.t,
        "stride_oh": out.h,
    }


def page_size(problem: Problem) -> int:
    """Keys a page; 1 where they are not in pages."""
    return problem.place.page_size if isinstance(problem.place, Paged) else 1


def launches_early(splits: SequenceSplits, operands: Operands) -> bool:
    """Whether `combine` is launched before the kernel that makes partials has ended."""
    return bool(splits.rows and operands.q.is_cuda and not splits.in_kernel)


class HopperLauncher(SequenceLauncher):
    """A kernel for whole sequences on Hopper and `combine` bound to one plan and one memory layout.

    The first call goes through Triton, and what it compiled is kept: `again` launches that with
    addresses, unless one is not a multiple of 16, which is another specialisation.
    """

    def __init__(
        self,
        plan: Plan,
        operands: Operands,
        bound: BoundKernel,
        refit: Callable[[Plan, Operands], Plan],
    ) -> None:
        self.plan, self.problem, self.device = plan, plan.problem, plan.device
        self.bound, self.refit = bound, refit
        self.results = result_shapes(plan.problem, operands.q)
        self.any_address: prefill.PrefillLauncher | None = None
        self.again: Sequences | None = None
        out = prefill.strides_of_out(plan.problem, operands)
        total, early = operands.q.shape[:-2].numel(), launches_early(bound.splits, operands)
        self.combine = combine_launch(plan, bound.splits, total, out, early)

    def __call__(self, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        return prefill.attention(self, operands)

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), through Triton or with what it compiled before."""
        x = operands
        scale, softcap = scale_and_softcap(x)
        others = x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.page_table, x.sink_logits
        scales = x.q_scale, x.k_scale, x.v_scale
        if self.again is not None:
            done = self.again.call(x.q, x.k, x.v, x.out, *others, *scales, scale, softcap)
            if done is not None:
                return done
        given = (t for t in (x.q, x.k, x.v, x.out) if t is not None)
        if any(tensor.data_ptr() & 15 for tensor in given):
            return self.without_tma(operands).forward(operands, seed)
        final, merge = self.results.allocate(x), None
        partial, count = self.bound.splits.partials(x.q)
        descriptors = self.bound.descriptors(x, final.out_ptr)
        arguments = {
            **descriptors,
            "final": final,
            "partial": partial,
            "count_ptr": count,
            "lengths": Lengths(x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.page_table),
            "sink_ptr": x.sink_logits,
            "scale_ptrs": ScalePointers(x.q_scale, x.k_scale, x.v_scale),
            "scale": scale,
            "softcap": softcap,
            **self.bound.fixed,
        }
        made = self.start(arguments)
        if self.combine is not None and partial is not None:
            merge = self.combine.launch(partial, final, x)
        some = (tensor for tensor in (*others, *scales) if tensor is not None)
        if made is not None and not any(tensor.data_ptr() & 15 for tensor in some):
            self.again = self.keep(made, merge, descriptors, final)
        return final.out_ptr, final.lse_ptr

    def start(self, arguments: dict[str, Any]) -> Any:
        """Launches the kernel through Triton; the compiled kernel."""
        bound, kernel = self.bound, self.bound.kernel()
        options = {"num_warps": bound.num_warps, "enable_fp_fusion": True}
        given = in_order(kernel, arguments)
        if not bound.cluster_size:
            return kernel[bound.grid](*given, **options)
        made = kernel.warmup(*given, grid=bound.grid, **options)
        if made is None:  # whoever looks at what is compiled has declined it
            return None
        clustered = in_clusters(made, bound.cluster_size, bound.exchange_bytes)
        clustered[bound.grid](*given)
        return clustered

    def keep(
        self,
        compiled: Any,
        merge: Any,
        descriptors: dict[str, TensorDescriptor | None],
        final: Final,
    ) -> Sequences | None:
        """Returns a function that launches the compiled kernels again; None: Triton has to, every
        time."""
        if observed():
            return None
        given = [made for made in descriptors.values() if made is not None]
        tiles = (tile_of(compiled, n) for n in range(len(given)))
        made = (TensorMaps(tile, x.shape, x.strides) for tile, x in zip(tiles, given, strict=True))
        each = [None if descriptors[name] is None else next(made) for name in DESCRIPTORS]
        bound, out = self.bound, final.out_ptr
        tail = tail_in_order(bound.kernel(), PER_CALL, bound.fixed)
        launch = bind_to_descriptors(compiled, bound.grid, tail, each)
        if launch is None:
            return None
        rows = bound.splits.rows
        return Sequences(
            launch,
            None if self.combine is None or merge is None else self.combine.relaunch(merge),
            *(out.device, out.dtype, self.results.out, self.results.lse),
            *(rows * self.problem.head_dim_v, rows),
        )

    def without_tma(self, operands: Operands) -> prefill.PrefillLauncher:
        """The kernel for any GPU, by the plan for addresses that this one does not fit."""
        if self.any_address is None:
            other = self.refit(self.plan, operands)
            self.any_address = prefill.in_place_of(self.plan, other, operands)
        return self.any_address
