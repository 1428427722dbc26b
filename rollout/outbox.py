"""What a leader has for other groups, in the order in which it was handed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .prefix_tree import Node
from .shipment import Parcel, Shipment

MOST_BLOCKS = 64
"""Blocks a group sends in one transfer; it begins and ends within a step, and so must be short."""
MOST_LETTER_BYTES = 1 << 20
"""Bytes of the letters in one transfer; one letter always goes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """Blocks for another group, and a letter that goes with the last of them."""

    to: int
    letter: bytes | None = None
    """None: there are more blocks to come."""
    blocks: list[int] = field(default_factory=list)
    """Of this group. They may neither change nor change hands until the delivery is made."""
    into: list[int] = field(default_factory=list)
    """Of the other."""
    num_sent: int = 0
    nodes: list[Node] = field(default_factory=list)
    """Locked for the sake of these blocks."""


class Outbox:
    """Deliveries under way. A transfer takes what there is room for."""

    def __init__(
        self, *, most_blocks: int = MOST_BLOCKS, most_letter_bytes: int = MOST_LETTER_BYTES
    ) -> None:
        self._most_blocks, self._most_letter_bytes = most_blocks, most_letter_bytes
        self._open: list[Delivery] = []
        self._made: list[Delivery] = []

    @property
    def is_empty(self) -> bool:
        return not self._open and not self._made

    @property
    def num_rows(self) -> int:
        """Blocks and letters that could go now."""
        blocks = sum(len(delivery.blocks) - delivery.num_sent for delivery in self._open)
        return blocks + sum(delivery.letter is not None for delivery in self._open)

    def add(self, delivery: Delivery) -> None:
        self._open.append(delivery)

    def pack(self, block_copies: Iterable[tuple[int, int]] = ()) -> Shipment:
        """What goes in the transfer that starts now."""
        letters: dict[int, list[bytes]] = {}
        pairs: dict[int, list[tuple[int, int]]] = {}
        room, letter_room = self._most_blocks, self._most_letter_bytes
        for delivery in list(self._open):
            first = delivery.num_sent
            last = min(first + room, len(delivery.blocks))
            going = zip(delivery.blocks[first:last], delivery.into[first:last], strict=True)
            pairs.setdefault(delivery.to, []).extend(going)
            delivery.num_sent = last
            room -= last - first
            if delivery.letter is None or last < len(delivery.blocks) or letter_room <= 0:
                continue
            letters.setdefault(delivery.to, []).append(delivery.letter)
            letter_room -= len(delivery.letter)
            self._open.remove(delivery)
            self._made.append(delivery)
        return Shipment(
            parcels=tuple(
                Parcel(
                    to=to,
                    letters=tuple(letters.get(to, ())),
                    blocks=tuple(block for block, _ in pairs[to]),
                    into=tuple(block for _, block in pairs[to]),
                )
                for to in sorted(pairs)
                if pairs[to] or to in letters
            ),
            block_copies=tuple(block_copies),
        )

    def made(self) -> list[Delivery]:
        """The transfer has ended: deliveries that went out with it completely."""
        made, self._made = self._made, []
        return made
