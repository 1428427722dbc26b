"""What belongs to which part of a step, and the arithmetic and reading that it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from interlace.comm import agreement, driver
from interlace.comm.crossing import Crossing
from interlace.comm.window import WindowCommunicator
from interlace.comm.window_channel import ByteCommunicator
from interlace.moe import grouped_query, kernels, mixture, model, straight
from interlace.moe.attention_block import AttentionBlock
from interlace.moe.batch import Batch
from interlace.moe.config import ModelConfig
from interlace.moe.dispatch import AllToAllDispatcher
from interlace.moe.dispatch_fixed import FixedDispatcher
from interlace.moe.dispatch_gather import GatherDispatcher
from interlace.moe.ends import End
from interlace.moe.experts import apply_experts
from interlace.moe.linear import Linear
from interlace.moe.paged_attention import paged_attention
from interlace.moe.parts import GroupedQuery
from interlace.moe.straight import Straight
from interlace.rollout import group

from .stopwatch import REST, Stopwatch

PARTS = {
    "products": "#2d6cb5",
    "experts": "#7aa6d8",
    "block": "#24785a",
    "attention": "#3a9d78",
    "heads": "#9fd3bd",
    "routing": "#b59b2f",
    "norms, sums": "#e0cf86",
    "sampling": "#c2574a",
    "dispatch": "#8a5aa8",
    "exchange": "#c3a5d6",
    "waiting": "#d9dee4",
    "batch": "#e0a458",
    "scheduling": "#8b95a1",
    REST: "#4b5563",
}
"""Each with its colour, in the order in which they are shown. `block` is all of a layer up to its
experts, where that is one call: its products, heads, attention, norms and routing."""


class Work:
    """FLOPs and bytes of weights and keys, by part, of the passes that are counted."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.mixture is not None
        assert isinstance(config.attention, GroupedQuery)
        self._expert_size, self._attention = config.mixture.expert_size, config.attention
        self._vocab_size = config.vocab_size
        heads = 2 * (config.attention.num_heads + config.attention.num_kv_heads)
        self._block_size = config.hidden_size * (
            heads * config.attention.head_dim + config.num_experts
        )
        self.on = self._in_one = False
        self.flops: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)

    def take(self) -> dict[str, dict[str, float]]:
        found = {"flops": dict(self.flops), "bytes": dict(self.bytes)}
        self.flops.clear()
        self.bytes.clear()
        return found

    def goes_straight(self, fits: bool) -> bool:
        """Whether a pass that could does: one that is counted goes call by call, and what it would
        have done in blocks is theirs."""
        self._in_one = fits
        return fits and not self.on

    def product(self, linear: Linear, x_TK: Any) -> None:
        size = x_TK.shape[1] * linear.num_outputs
        in_block = self._in_one and linear.num_outputs != self._vocab_size
        if len(x_TK):
            part = "block" if in_block else "products"
            self._add(part, 2.0 * len(x_TK) * size, 2.0 * size)

    def end(self, end: End) -> None:
        rows, width = end.shape
        if rows:
            size = width * self._vocab_size
            self._add("products", 2.0 * rows * size, 2.0 * size)

    def experts(self, experts: Any, x_ND: Any, counts_X: Any, **_: Any) -> None:
        size = 3 * x_ND.shape[1] * self._expert_size
        busy = sum(1 for count in counts_X if count)
        self._add("experts", 2.0 * sum(counts_X) * size, 2.0 * busy * size)

    def attend(self, q_THE: Any, pages: Any, layer: int, batch: Batch, *, scale: float) -> None:
        self._add("block" if self._in_one else "attention", *self._attended(batch))

    def block(
        self, block: AttentionBlock, x_TD: Any, rotation: Any, pages: Any, index: int, batch: Batch
    ) -> None:
        if len(x_TD):
            flops, num_bytes = self._attended(batch)
            size = float(self._block_size)
            self._add("block", 2 * len(x_TD) * size + flops, 2 * size + num_bytes)

    def _attended(self, batch: Batch) -> tuple[float, float]:
        """FLOPs and bytes of keys and values of one layer."""
        sizes = self._attention
        seen = float((batch.positions[: batch.num_rows] + 1).sum())
        context = float(batch.context_lens.sum())
        return (
            4 * seen * sizes.num_heads * sizes.head_dim,
            4 * context * sizes.num_kv_heads * sizes.head_dim,
        )

    def _add(self, part: str, flops: float, num_bytes: float) -> None:
        self.flops[part] += flops
        self.bytes[part] += num_bytes

    def counted(self, count: Callable[..., None], function: Callable[..., Any]) -> Any:
        """The same function; where passes are counted, so is what it does."""

        def counts(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                count(*args, **kwargs)
            return function(*args, **kwargs)

        return counts


def _spent(crossing: Crossing) -> dict[str, float]:
    """Seconds of straight passes so far: what is left of their time is looking out for messages."""
    names = ("block", "dispatch", "experts", "norms, sums")
    runs = [one.run for one in crossing.abreast or (crossing,) if one.run is not None]
    spent = [kernels.native.spent(run) for run in runs]
    return dict(zip(names, map(sum, zip(*spent, strict=True)), strict=True))


@contextmanager
def watched(watch: Stopwatch, work: Work) -> Iterator[None]:
    """Inside, the functions of a rank are timed and counted."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, new: Any) -> None:
            old = vars(owner)[name]
            stack.callback(setattr, owner, name, old)
            setattr(owner, name, new)

        def time(part: str, owner: Any, *names: str) -> None:
            for name in names:
                put(owner, name, watch.of(part, getattr(owner, name)))

        product = work.counted(work.product, Linear.__call__)
        apply = work.counted(work.experts, apply_experts)
        attend = work.counted(work.attend, paged_attention)
        block = work.counted(work.block, AttentionBlock.__call__)
        put(AttentionBlock, "__call__", watch.of("block", block))
        put(Linear, "__call__", watch.of("products", product))
        put(End, "__call__", watch.of("products", work.counted(work.end, End.__call__)))
        fits = Straight.fits
        put(Straight, "fits", lambda own, context: work.goes_straight(fits(own, context)))
        put(straight, "go_on", watch.of_parts("waiting", straight.go_on, _spent))
        put(mixture, "apply_experts", watch.of("experts", apply))
        put(grouped_query, "paged_attention", watch.of("attention", attend))
        time("heads", grouped_query, "turn_heads")
        time("routing", mixture, "route")
        time("norms, sums", model, "rms_norm", "add_and_norm", "add")
        time("norms, sums", mixture.MixtureLayer, "add_to")
        time("sampling", group, "sample")
        for dispatcher in (AllToAllDispatcher, FixedDispatcher, GatherDispatcher):
            for name in ("dispatch", "combine"):
                put(dispatcher, name, watch.of_steps("dispatch", vars(dispatcher)[name]))
        for name in ("build", "in_pages"):
            put(Batch, name, classmethod(watch.of("batch", vars(Batch)[name].__func__)))
        for communicator in (WindowCommunicator, ByteCommunicator):
            time("exchange", communicator, "post", "result")
            time("waiting", communicator, "poll")
        put(driver._Waits, "_wait", watch.of_waits("waiting", driver._Waits._wait))
        time("scheduling", group.Leader, "propose", "commit", "complete")
        time("scheduling", agreement, "plan", "check_hashes")
        put(group.Leader, "describe", watch.of_steps("scheduling", group.Leader.describe))
        yield
