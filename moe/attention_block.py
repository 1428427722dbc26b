"""A layer from its residual to its rows' experts, in one call of our kernels.

It is what no collective interrupts where heads are not split: norm, projections, heads, attention,
output projection, residual, norm, router. Each part is the kernel that also runs by itself, on the
same numbers in the same order, so the bits are those of the parts one by one (`Model.compute`).

Shapes: T rows, D hidden, K experts a row goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import kernels
from .apart import through
from .batch import Batch
from .experts import Expert
from .grouped_query import GroupedQueryAttention
from .latent import LatentAttention
from .linear import Linear
from .mixture import MixtureLayer
from .pages import Pages
from .router import Routing, is_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """What the call needs of one layer: addresses and sizes, found once. Lives beside the weights,
    which own the memory."""

    item_size: int
    top_k: int
    of_layer: tuple[float, ...]
    """The call's last arguments."""

    @classmethod
    def of(
        cls,
        *,
        input_norm_D: torch.Tensor,
        attention: GroupedQueryAttention | LatentAttention,
        output: Linear,
        post_norm_D: torch.Tensor,
        mixture: MixtureLayer | Expert,
        factor: float,
    ) -> AttentionBlock | None:
        """Of a layer with these parts; None where one is not our kernels' or more than they do.

        What attention adds to the residual is multiplied with `factor`.
        """
        if isinstance(attention, LatentAttention) or isinstance(mixture, Expert):
            return None
        router, sizes = mixture.sizes.router, attention.sizes
        qkv, o, choice = attention.qkv.own, output.own, mixture.router.own
        norms = (input_norm_D, post_norm_D)
        if (
            qkv is None
            or o is None
            or choice is None
            or not (qkv.dtype == o.dtype == choice.dtype)
            or not all(kernels.can_read(norm) and norm.dtype == qkv.dtype for norm in norms)
            or attention.bias is not None
            or attention.row_norms is not None
            or qkv.num_outputs != (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
            or not is_plain(router, mixture.router_bias_X)
            or router.precise
        ):
            return None
        head_norm = attention.head_norm_AE
        return cls(
            item_size=qkv.dtype.itemsize,
            top_k=router.top_k,
            of_layer=(
                qkv.num_inputs,
                input_norm_D.data_ptr(),
                qkv.address,
                0 if head_norm is None else head_norm.data_ptr(),
                sizes.num_heads,
                sizes.num_kv_heads,
                sizes.head_dim,
                sizes.scale,
                o.address,
                post_norm_D.data_ptr(),
                choice.address,
                choice.num_outputs,
                router.top_k,
                router.normalise,
                router.scale,
                factor,
                attention.rms_eps,
            ),
        )

    def __call__(
        self,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        index: int,
        batch: Batch,
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """The residual with attention added, its norm, and where that goes; keys and values are in
        their pages afterwards. All heads are this rank's, and all rows are real."""
        found, given = self._call(x_TD.contiguous(), rotation, pages, index, batch)
        kernels.native.attention_block(*given)
        return found

    async def preemptibly(
        self,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        index: int,
        batch: Batch,
        *,
        owner: object,
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """The same, standing aside in the middle where another path waits. `owner`: of the
        weights."""
        x_TD = x_TD.contiguous()
        found, given = self._call(x_TD, rotation, pages, index, batch)
        owners = owner, found, x_TD, rotation, pages, batch
        await through(kernels.native.attention_block_apart(*(*given, owners)))
        return found

    def _call(
        self,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        index: int,
        batch: Batch,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, Routing], tuple[Any, ...]]:
        """What comes out, and what the call is given."""
        num_rows = x_TD.shape[0]
        sum_TD, out_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        topk_TK = torch.empty((num_rows, self.top_k), dtype=torch.int64)
        weight_TK = torch.empty((num_rows, self.top_k), dtype=torch.float32)
        cos_T1E, sin_T1E = rotation
        given = (
            self.item_size,
            sum_TD.data_ptr(),
            out_TD.data_ptr(),
            topk_TK.data_ptr(),
            weight_TK.data_ptr(),
            x_TD.data_ptr(),
            num_rows,
            cos_T1E.data_ptr(),
            sin_T1E.data_ptr(),
            batch.slot_mapping.data_ptr(),
            pages.address(index),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.cu_seqlens_q.data_ptr(),
            batch.positions.data_ptr(),
            len(batch.context_lens),
            *self.of_layer,
        )
        return (sum_TD, out_TD, Routing(topk_TK=topk_TK, weight_TK=weight_TK)), given
