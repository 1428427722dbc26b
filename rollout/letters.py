"""What leaders of groups that prefill and of groups that decode write to one another.

A turn lives with a leader that decodes, the home of its trajectory. It sends a `Job`, and an
`Abort` if the turn is not wanted any more; the leader that prefills asks for what it has `Missing`,
gets it `Supplied`, and answers every job once: with the `TurnResult` of a turn of one more token,
aborted if home has asked for that or if the weights have changed before the token was sampled.
"""

from __future__ import annotations

import msgspec

from .messages import Abort, TurnRequest, TurnResult


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Prefill a context and sample what follows it."""

    request: TurnRequest
    """Ends with one more token; `experts_from` is the number of tokens whose KV home holds."""
    generated: list[int]
    """What the turn has sampled before; its KV had to be given up."""
    num_forwarded: int
    """Tokens that the trajectory has forwarded before."""
    blocks: list[int]
    """Home's blocks for the context, from the first one on that is not complete there."""
    weights: int
    """First version with the weights that computed what home holds, and that are to be used. A job
    for weights that have gone goes back aborted, and home sends another."""

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids, *self.generated]

    @property
    def num_held(self) -> int:
        """Leading tokens whose KV home holds."""
        return self.request.experts_from


class Missing(msgspec.Struct, frozen=True, kw_only=True, tag="missing"):
    """Blocks that home holds and the group that prefills does not."""

    trajectory: int
    first: int
    """Absolute index of the first one; the others follow."""
    blocks: list[int]
    """Where they go."""


class Supplied(msgspec.Struct, frozen=True, kw_only=True, tag="supplied"):
    """They have come with this letter or before."""

    trajectory: int
    experts: bytes
    """uint8 [positions, layers, top_k], from the first missing block to the last token held."""


Letter = Job | Abort | Missing | Supplied | TurnResult

encode_letter = msgspec.msgpack.Encoder().encode
decode_letter = msgspec.msgpack.Decoder(Letter).decode
