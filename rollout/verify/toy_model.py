"""A model whose every byte on the wire says where it belongs, and whose tokens are exact. No torch.

A row on the wire is 16 bytes: a tag (epoch, version, path, stage, from, to, pass, row) and a value.
Whoever receives a row compares its tag with the one it must have, so a byte that belongs to another
path, layer, rank, pass, version or epoch is a `Violation` where it is read. The values are mixed
with keys kept in the sequence's KV blocks, so a block that was reused too early changes the tokens.
`expected` computes the tokens of a request alone: they may depend on nothing but the request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from interlace.comm.collectives import Collective, Exchange, Gather, perform, preemption_point
from interlace.moe.description import Description

from .violation import Violation

Strategy = Literal["all_to_all", "fixed", "gather"]
VOCABULARY = 61
STOP_TOKEN = 0
NUM_EXPERTS = 8
ROW_BYTES = 16
_MASK = (1 << 62) - 1
_PAD = 0xFFFF  # the row of a tag that pads


def mix(one: int, other: int) -> int:
    """Both in one number; no two neighbours give the same."""
    value = (one * 0x2545F4914F6CDD1D ^ other) * 0x5851F42D4C957F2D & _MASK
    return value ^ (value >> 29)


@dataclass(slots=True, kw_only=True)
class ToyWeights:
    """Weights as one number. An update is written in place, as it is for tensors."""

    version: int = 0


@dataclass(slots=True, kw_only=True)
class ToyContext:
    """One path on one rank: its groups, its strategy, and the rank's KV pool."""

    path: int
    rank: int
    tp: tuple[int, ...]
    """Ranks of the tensor-parallel group; the rank alone without one."""
    ep: tuple[int, ...]
    strategy: Strategy
    kv: list[list[int]]
    """[layer][block * block_size + offset]; shared by the paths, as the pool is."""
    block_size: int
    epoch: int = 0
    passes: int = 0
    """Forward passes begun on this path, counted alike on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOutput:
    """What a forward pass found; the same on every rank of a tensor-parallel group."""

    tokens: list[int]
    """One for every sampled row."""
    experts_TLK: NDArray[np.uint8]
    version: int
    """Weight version every row was computed under."""


class ToyModel:
    """Attention over blocks, heads over TP, experts over EP: all collectives of the real one."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    async def forward(
        self,
        weights: ToyWeights,
        context: ToyContext,
        description: Description,
        *,
        max_rows: int = 0,
    ) -> ToyOutput:
        """Write the rows' keys and draw a token for each sampled row."""
        going = _Pass(weights, context, description, max_rows)
        for layer in range(self.layers):
            going.attend(layer)
            if len(context.tp) > 1:
                payload = going.tagged(2 * layer, going.all_rows, context.rank)
                heads = await perform(Gather(role="tp", stage=f"{layer}.heads", payload=payload))
                going.join_heads(layer, heads)
            going.route()
            await preemption_point()
            if context.strategy == "all_to_all":
                await _all_to_all(going, layer)
            elif context.strategy == "fixed":
                await _fixed(going, layer)
            else:
                await _gathered(going, layer)
            if len(context.tp) > 1:
                payload = going.share(layer)
                shares = await perform(Gather(role="tp", stage=f"{layer}.rows", payload=payload))
                going.join_shares(layer, shares)
        return going.output(self.layers)


async def _all_to_all(going: _Pass, layer: int) -> None:
    """Exact counts first, then the rows."""
    counts, payload = going.by_owner(layer)
    told = going.told_counts(layer, counts)
    table = await perform(Gather(role="ep", stage=f"{layer}.counts", payload=told))
    recv = going.read_counts(layer, table)
    send, back = tuple(ROW_BYTES * n for n in counts), tuple(ROW_BYTES * n for n in recv)
    arrived = await perform(
        Exchange(role="ep", stage=f"{layer}.dispatch", payload=payload, send=send, recv=back)
    )
    answers = going.experts(layer, arrived, recv)
    returned = await perform(
        Exchange(role="ep", stage=f"{layer}.combine", payload=answers, send=back, recv=send)
    )
    going.combine(layer, returned, counts)


async def _fixed(going: _Pass, layer: int) -> None:
    """Room for the worst case towards every member; what is not needed is padding."""
    payload = going.with_room(layer)
    size = len(going.context.ep)
    room = (ROW_BYTES * going.room,) * size
    arrived = await perform(
        Exchange(role="ep", stage=f"{layer}.dispatch", payload=payload, send=room, recv=room)
    )
    answers = going.experts(layer, arrived, (going.room,) * size)
    returned = await perform(
        Exchange(role="ep", stage=f"{layer}.combine", payload=answers, send=room, recv=room)
    )
    going.combine(layer, returned, (going.room,) * size)


async def _gathered(going: _Pass, layer: int) -> None:
    """Everybody sees all rows, computes those of its own experts and sends back the outputs."""
    payload = going.to_all(layer)
    seen = await perform(Gather(role="ep", stage=f"{layer}.gather", payload=payload))
    room = (ROW_BYTES * going.room,) * len(going.context.ep)
    answers = going.own_experts(layer, seen)
    returned = await perform(
        Exchange(role="ep", stage=f"{layer}.outputs", payload=answers, send=room, recv=room)
    )
    going.choose_owner(layer, returned)


class _Pass:
    """The arithmetic between two awaits of one forward pass."""

    def __init__(
        self, weights: ToyWeights, context: ToyContext, description: Description, max_rows: int
    ) -> None:
        num = description.num_rows
        if num > max_rows:
            raise Violation(f"{num} rows where at most {max_rows} were agreed")
        self.weights, self.context = weights, context
        self.version = weights.version
        self.all_rows = range(num)
        self._base = (
            (context.epoch & 63) << 55
            | (self.version & 255) << 47
            | context.path << 45
            | (context.passes & 4095) << 16
        )
        context.passes += 1
        tp = len(context.tp)
        self.mine = range(context.tp.index(context.rank), num, tp)
        self.room = -(-max_rows // tp)
        self._sample_rows = description.sample_rows
        self._num = num
        self._routed: list[list[int]] = []
        size = context.block_size
        for source, target in description.block_copies:
            for plane in context.kv:
                first, to = source * size, target * size
                plane[to : to + size] = plane[first : first + size]
        self._tables: list[tuple[int, ...]] = []
        for index, table in enumerate(description.block_tables):
            rows = description.cu_seqlens_q[index + 1] - description.cu_seqlens_q[index]
            self._tables += [table] * rows
        self._positions = description.positions
        self.values = [mix(token, 7) for token in description.input_ids]

    # ---- tags

    def tag(self, stage: int, source: int, target: int) -> int:
        """All of a row's tag but its row. `source` computed or sent it, `target` is to have it."""
        return self._base | stage << 38 | source << 33 | target << 28

    def tagged(self, stage: int, rows: Sequence[int], target: int) -> bytes:
        """These rows of this rank's batch, in this order, on their way to `target`."""
        tag, values = self.tag(stage, self.context.rank, target), self.values
        flat: list[int] = []
        for row in rows:
            flat += (tag | row, values[row])
        return struct.pack(f"<{len(flat)}Q", *flat)

    def read(self, data: Any, stage: int, source: int, target: int) -> list[tuple[int, int]]:
        """(row, value) of every row, whose tags must say exactly this; padding is left in."""
        flat = struct.unpack(f"<{len(data) // 8}Q", data)
        want = self.tag(stage, source, target) >> 16
        for found in flat[::2]:
            if found >> 16 != want:
                raise Violation(
                    f"rank {self.context.rank} reads a row of {_words(found)} where one of "
                    f"{_words(want << 16)} belongs"
                )
        if self.weights.version != self.version:
            raise Violation(
                f"rank {self.context.rank}: a forward pass that began under version "
                f"{self.version} goes on under {self.weights.version}"
            )
        return [(flat[at] & 0xFFFF, flat[at + 1]) for at in range(0, len(flat), 2)]

    # ---- attention and its group

    def attend(self, layer: int) -> None:
        """Mix each row with two earlier ones of its sequence, through its block table."""
        plane, size, values = self.context.kv[layer], self.context.block_size, self.values
        for row, (table, position) in enumerate(zip(self._tables, self._positions, strict=True)):
            value = values[row]
            if position:
                at = position - 1
                value = mix(value, plane[table[at // size] * size + at % size])
                at = value % position
                value = mix(value, plane[table[at // size] * size + at % size])
            plane[table[position // size] * size + position % size] = value
            values[row] = value

    def join_heads(self, layer: int, heads: Sequence[Any]) -> None:
        """All ranks of the group hold the same rows; any difference is a mix-up."""
        values = self.values
        for peer, data in zip(self.context.tp, heads, strict=True):
            rows = self.read(data, 2 * layer, peer, peer)
            if [value for _, value in rows] != values:
                raise Violation(f"rank {self.context.rank}: rank {peer} has other keys or rows")
        self.values = [mix(value, layer) for value in values]

    def share(self, layer: int) -> bytes:
        payload = self.tagged(2 * layer + 1, self.mine, self.context.rank)
        return payload + self._padding(2 * layer + 1, self.context.rank, self._short_share)

    @property
    def _short_share(self) -> int:
        return -(-self._num // len(self.context.tp)) - len(self.mine)

    def join_shares(self, layer: int, shares: Sequence[Any]) -> None:
        for peer, data in zip(self.context.tp, shares, strict=True):
            for row, value in self.read(data, 2 * layer + 1, peer, peer):
                if row != _PAD:
                    self.values[row] = value

    # ---- experts

    def route(self) -> None:
        if len(self.context.tp) == 1:
            self.values = [mix(value, len(self._routed)) for value in self.values]
        self._routed.append([value % NUM_EXPERTS for value in self.values])

    def by_owner(self, layer: int) -> tuple[list[int], bytes]:
        """Rows for each member, and all of them, the first member's first."""
        split = self._split()
        parts = [
            self.tagged(64 + 2 * layer, rows, member)
            for member, rows in zip(self.context.ep, split, strict=True)
        ]
        return [len(rows) for rows in split], b"".join(parts)

    def _split(self) -> list[list[int]]:
        size, routed = len(self.context.ep), self._routed[-1]
        split: list[list[int]] = [[] for _ in range(size)]
        for row in self.mine:
            split[routed[row] % size].append(row)
        return split

    def told_counts(self, layer: int, counts: Sequence[int]) -> bytes:
        tag = self.tag(32 + layer, self.context.rank, 0)
        return struct.pack(f"<{len(counts) + 1}Q", tag, *counts)

    def read_counts(self, layer: int, table: Sequence[Any]) -> tuple[int, ...]:
        me, recv = self.context.ep.index(self.context.rank), []
        for peer, data in zip(self.context.ep, table, strict=True):
            self.read(bytes(data[:8]) + bytes(8), 32 + layer, peer, 0)
            (count,) = struct.unpack_from("<Q", data, 8 * (me + 1))
            recv.append(count)
        return tuple(recv)

    def with_room(self, layer: int) -> bytes:
        parts = []
        for member, rows in zip(self.context.ep, self._split(), strict=True):
            parts.append(self.tagged(64 + 2 * layer, rows, member))
            parts.append(self._padding(64 + 2 * layer, member, self.room - len(rows)))
        return b"".join(parts)

    def to_all(self, layer: int) -> bytes:
        """Rows of a gather have no target of their own: they name their sender."""
        payload = self.tagged(64 + 2 * layer, self.mine, self.context.rank)
        padding = self._padding(64 + 2 * layer, self.context.rank, self.room - len(self.mine))
        return payload + padding

    def experts(self, layer: int, arrived: Any, recv: Sequence[int]) -> bytes:
        """The answers to rows that came from the members, in the order they came."""
        flat: list[int] = []
        at = 0
        rank = self.context.rank
        for member, num in zip(self.context.ep, recv, strict=True):
            part = arrived[at : at + ROW_BYTES * num]
            at += ROW_BYTES * num
            tag = self.tag(65 + 2 * layer, rank, member)
            for row, value in self.read(part, 64 + 2 * layer, member, rank):
                flat += (tag | row, 0 if row == _PAD else _expert(layer, value))
        if at != len(arrived):
            raise Violation(f"rank {rank}: {len(arrived)} bytes arrived where {at} were told")
        return struct.pack(f"<{len(flat)}Q", *flat)

    def own_experts(self, layer: int, seen: Sequence[Any]) -> bytes:
        rank, size = self.context.rank, len(self.context.ep)
        me = self.context.ep.index(rank)
        flat: list[int] = []
        for member, data in zip(self.context.ep, seen, strict=True):
            tag = self.tag(65 + 2 * layer, rank, member)
            for row, value in self.read(data, 64 + 2 * layer, member, member):
                own = row != _PAD and value % NUM_EXPERTS % size == me
                flat += (tag | row, _expert(layer, value) if own else 0)
        return struct.pack(f"<{len(flat)}Q", *flat)

    def combine(self, layer: int, returned: Any, counts: Sequence[int]) -> None:
        """Every row must come back from its owner, once."""
        at, rank = 0, self.context.rank
        missing = set(self.mine)
        for member, num in zip(self.context.ep, counts, strict=True):
            part = returned[at : at + ROW_BYTES * num]
            at += ROW_BYTES * num
            for row, value in self.read(part, 65 + 2 * layer, member, rank):
                if row != _PAD:
                    missing.remove(row)
                    self.values[row] = value
        if missing:
            raise Violation(f"rank {rank}: rows {sorted(missing)} did not come back")

    def choose_owner(self, layer: int, returned: Any) -> None:
        at, rank, routed = 0, self.context.rank, self._routed[-1]
        size = len(self.context.ep)
        for index, member in enumerate(self.context.ep):
            part = returned[at : at + ROW_BYTES * self.room]
            at += ROW_BYTES * self.room
            for row, value in self.read(part, 65 + 2 * layer, member, rank):
                if row != _PAD and routed[row] % size == index:
                    self.values[row] = value

    def _padding(self, stage: int, target: int, num: int) -> bytes:
        return struct.pack("<QQ", self.tag(stage, self.context.rank, target) | _PAD, 0) * num

    def output(self, layers: int) -> ToyOutput:
        experts = np.array(self._routed, np.uint8).reshape(layers, -1).T[:, :, None]
        return ToyOutput(
            tokens=[self.values[row] % VOCABULARY for row in self._sample_rows],
            experts_TLK=experts,
            version=self.version,
        )


def _expert(layer: int, value: int) -> int:
    return mix(value, 1000 + layer * NUM_EXPERTS + value % NUM_EXPERTS)


def _words(tag: int) -> str:
    return (
        f"(epoch {tag >> 55} version {tag >> 47 & 255} path {tag >> 45 & 3} "
        f"stage {tag >> 38 & 127} from {tag >> 33 & 31} to {tag >> 28 & 31} "
        f"pass {tag >> 16 & 4095})"
    )


def toy_stub(context: ToyContext) -> Callable[[Collective, int], Any]:
    """Answers of groups in which nobody has rows, each as if its sender had sent it."""

    def answer(request: Collective, size: int) -> Any:
        if not isinstance(request, Gather):
            return b""
        if not request.stage.endswith("counts"):
            return [request.payload] * size
        rest = request.payload[8:]
        (tag,) = struct.unpack_from("<Q", request.payload)
        own = context.rank << 33
        return [struct.pack("<Q", tag ^ own ^ member << 33) + rest for member in context.ep]

    return answer


@dataclass(slots=True)
class Expected:
    """What one sequence must become, computed alone, token by token."""

    layers: int
    keys: list[list[int]] = field(default_factory=list)
    experts: bytearray = field(default_factory=bytearray)
    """Of every position forwarded, layer by layer."""

    def token(self, token: int) -> int:
        """Forward one token behind those before; the token drawn from its row."""
        if not self.keys:
            self.keys = [[] for _ in range(self.layers)]
        value = mix(token, 7)
        for layer, plane in enumerate(self.keys):
            if plane:
                value = mix(value, plane[-1])
                value = mix(value, plane[value % len(plane)])
            plane.append(value)
            value = mix(value, layer)
            self.experts.append(value % NUM_EXPERTS)
            value = _expert(layer, value)
        return value % VOCABULARY


def expected(layers: int, context: Sequence[int], max_tokens: int) -> tuple[list[int], bytes]:
    """The tokens sampled behind `context`, and the experts of every position forwarded."""
    alone = Expected(layers)
    for token in context:
        drawn = alone.token(token)
    tokens = [drawn]
    while len(tokens) < max_tokens and tokens[-1] != STOP_TOKEN:
        tokens.append(alone.token(tokens[-1]))
    return tokens, bytes(alone.experts)
