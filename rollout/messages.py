"""What passes between the collector and the ranks: typed, checked on arrival, no pickle."""

from __future__ import annotations

import msgspec

from interlace.comm.journal import StepRecord, TicketRecord
from interlace.comm.verdict import Diagnosis
from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams

from .shipment import Shipment


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """Generate one turn behind `token_ids`."""

    trajectory: int
    turn: int
    token_ids: list[int]
    """The whole context; what is cached of it is the rank's business."""
    seed: int
    experts_from: int
    """The ledger already holds the experts of positions below this one."""
    sampling: SamplingParams


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End the running turn of a trajectory; its result says `aborted`."""

    trajectory: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """No more commands will come: finish what runs, then leave the loop together."""


class TurnResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """One finished turn."""

    trajectory: int
    turn: int
    token_ids: list[int]
    """Sampled tokens, the stop token included."""
    logprobs_raw: list[float]
    """log softmax of the model's logits at each sampled token (float32 values)."""
    logprobs: list[float]
    """The same under the masked, filtered, renormalised distribution it was drawn from."""
    versions: list[int]
    kv_versions: list[int]
    """Oldest weight version of the keys and values each sampled token attended to."""
    experts: bytes
    """uint8 [positions, layers, top_k], from `experts_from` to the last forwarded position."""
    experts_shape: tuple[int, int, int]
    finish: str
    """stop, length, choice or aborted."""
    cached_tokens: int
    """Context tokens found in the prefix tree."""
    prefill_tokens: int
    """Context tokens computed for this turn."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A rank has loaded its weights and checked its kernels."""

    rank: int
    exact: bool
    """The self-test found every kernel independent of the batch around a row."""
    max_context: int
    """Tokens a trajectory may have."""
    pool_tokens: int
    """Tokens the KV pool holds."""
    vocab_size: int
    stop_token_ids: list[int]
    """Tokens that end a turn according to the checkpoint."""
    transport: str
    """What moves bytes between the ranks: window, gloo, nccl or local."""
    transport_why: str
    """Why it does, in one line."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The last word of a rank that left its loop in order."""

    rank: int
    cpu_s: float
    """CPU seconds of the rank's process since it was ready; ranks that share one count once."""
    steps: list[StepRecord]
    tickets: list[TicketRecord]


class RankFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """The last word of a rank that raised."""

    rank: int
    error: str
    """Type and message, one line."""
    traceback: str
    diagnosis: Diagnosis | None = None
    """Of all ranks, where the rank had a board."""

    @property
    def text(self) -> str:
        """What happened to which rank, one line."""
        return self.diagnosis.text if self.diagnosis else f"rank {self.rank}: {self.error}"


Command = TurnRequest | Abort | Stop
Event = RankReady | TurnResult | RankReport | RankFailure

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader announces to its group: what goes over those of its paths that start."""

    batches: dict[str, Description]
    shipments: dict[str, Shipment]


decode_told = msgspec.msgpack.Decoder(Told).decode
