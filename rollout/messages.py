"""What passes between the collector and the ranks: typed, checked on arrival, no pickle."""

from __future__ import annotations

from typing import Literal

import msgspec

from interlace.comm.journal import StepRecord, TicketRecord
from interlace.comm.verdict import Diagnosis
from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams

from .shipment import Shipment

UpdateMode = Literal["keep", "retract", "abort", "same"]
"""What becomes of turns that run when weights change: they go on over their old keys and values,
these are computed again under the new weights, or the turns end with what they have. same: only the
number of the version changes, and so nothing happens to anybody."""


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
    num_resumed: int = 0
    """The last so many of `token_ids` were sampled by this turn, before it was interrupted: stop
    strings and choices go on behind them."""
    holds: list[tuple[int, int]] = []
    """(sampled tokens, version), both increasing: the turn samples no more than so many tokens, in
    this request, until that version of the weights is in use. With 0 it does not even prefill."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End the running turn of a trajectory; its result says `aborted`."""

    trajectory: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """No more commands will come: finish what runs, then leave the loop together."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Until `Resume` nothing is computed; turns that are there are held, or end as `aborted`."""

    mode: Literal["keep", "abort"]


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Go on after a `Pause`."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """A part of the weights of a version that is to be installed later. To all ranks."""

    attempt: int
    """Counts the updates that were begun; a rank's answers name theirs."""
    version: int
    bucket: memoryview
    """Some pieces of tensors, as `weights_sync.pieces` packs them; not copied on arrival."""
    index: int
    """Which of the parts this is, from 0."""
    total: int
    """How many there are; 0 as long as that is not known."""


class StageFolder(msgspec.Struct, frozen=True, kw_only=True, tag="stage_folder"):
    """The weights of a version lie in a folder in Hugging Face format. To all ranks."""

    attempt: int
    version: int
    folder: str


class StageGroup(msgspec.Struct, frozen=True, kw_only=True, tag="stage_group"):
    """A trainer broadcasts the weights of a version: join its process group. To all ranks."""

    attempt: int
    version: int
    host: str
    port: int
    """Of the trainer's store."""
    world: int
    """Members of the group: the trainer, which is the first, and all ranks behind it."""
    timeout_s: float


class StageSame(msgspec.Struct, frozen=True, kw_only=True, tag="stage_same"):
    """A version has the weights that are in use now. To all ranks."""

    attempt: int
    version: int


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """All ranks hold the version complete and checked: install it. To all ranks."""

    version: int
    mode: UpdateMode


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag="discard"):
    """Forget what has been staged of a version. To all ranks."""

    version: int


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


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """A trajectory has come to one of its turn's holds and samples nothing until that version is in
    use. Said once for each hold that is reached before its version, also if the turn ends there."""

    trajectory: int
    version: int


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """A rank is done with a part of the weights, so that the next one may be sent."""

    rank: int
    attempt: int
    index: int


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """A rank holds a version complete and checked, or has refused it."""

    rank: int
    attempt: int
    version: int
    digest: str
    """Of all tensors as received; empty if they were refused."""
    num_bytes: int
    """Bytes that the rank keeps."""
    seconds: float
    error: str | None = None
    """Why it was refused, in one line."""


class Installed(msgspec.Struct, frozen=True, kw_only=True, tag="installed"):
    """A rank uses a version, from the step behind `step` on."""

    rank: int
    version: int
    step: int
    stall_s: float
    """Longest time for which the rank's loop did nothing else because of the update."""
    dropped_tokens: int
    """Rows of keys and values to compute again; 0 from ranks that lead no group."""
    aborted: list[int]
    """Trajectories whose turn the update has ended."""


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


LeaderCommand = TurnRequest | Abort | Pause | Resume | Stop
"""What the leader of a group obeys."""
WeightsCommand = Stage | StageFolder | StageGroup | StageSame | Commit | Discard
"""What every rank obeys."""
Command = LeaderCommand | WeightsCommand
Event = RankReady | TurnResult | Held | Taken | Staged | Installed | RankReport | RankFailure

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader announces to its group: what goes over those of its paths that start."""

    batches: dict[str, Description]
    shipments: dict[str, Shipment]


decode_told = msgspec.msgpack.Decoder(Told).decode
