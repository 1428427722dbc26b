"""A trajectory: one append-only ledger of tokens, its turns, and why it ended.

Shapes: T tokens of the ledger, L layers with experts, K experts chosen per token and layer.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Source(IntEnum):
    """Where a token of the ledger comes from."""

    PROMPT = 0
    SAMPLED = 1
    OBSERVATION = 2
    TEMPLATE = 3
    """Written by the chat template around prompts, turns and observations."""


class EndReason(StrEnum):
    """Why a trajectory ended."""

    TERMINATED = "terminated"
    """The environment reached a final state (or a single turn was answered)."""
    TRUNCATED = "truncated"
    """The environment cut the episode, or the turn limit was reached."""
    MAX_TOKENS = "max_tokens"
    """The token budget or the context was used up."""
    ENVIRONMENT_ERROR = "environment_error"
    ABORTED = "aborted"
    """Ended by a clock or by hand; such a trajectory is outside every digest."""


class Ledger:
    """Grows a trajectory's tokens; what is in it never changes and never moves.

    Misuse raises ValueError and leaves the ledger as it was.
    """

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._source = array("B")
        self._turn = array("h")
        self._logprob_raw = array("f")
        self._logprob = array("f")
        self._version = array("i")
        self._kv_version = array("i")
        self._experts: list[NDArray[np.uint8]] = []
        self._num_with_experts = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """A copy of the whole context."""
        return self._token_ids.tolist()

    @property
    def num_with_experts(self) -> int:
        """Positions 0 to this one (exclusive) have their experts recorded."""
        return self._num_with_experts

    def append_given(
        self, token_ids: Sequence[int], source: Source | Sequence[Source], turn: int
    ) -> None:
        """Append tokens nobody sampled: no log-probability (NaN), no version (-1).

        `source` is one for all tokens or one per token; `turn` is the turn they lead to.
        """
        num = len(token_ids)
        sources = [source] * num if isinstance(source, Source) else list(source)
        if len(sources) != num:
            raise ValueError(f"{num} tokens but {len(sources)} sources")
        if Source.SAMPLED in sources:
            raise ValueError("a given token cannot have source SAMPLED: use append_sampled")
        self._append(token_ids, sources, turn, [math.nan] * num, [math.nan] * num, None, None)

    def append_sampled(
        self,
        token_ids: Sequence[int],
        logprobs_raw: Sequence[float],
        logprobs: Sequence[float],
        versions: Sequence[int],
        kv_versions: Sequence[int],
        turn: int,
    ) -> None:
        """Append what the model sampled in one turn, bit for bit (log-probabilities float32)."""
        num = len(token_ids)
        for name, column in (
            ("logprobs_raw", logprobs_raw),
            ("logprobs", logprobs),
            ("versions", versions),
            ("kv_versions", kv_versions),
        ):
            if len(column) != num:
                raise ValueError(f"{num} sampled tokens but {len(column)} {name}")
        for name, values in (("logprobs_raw", logprobs_raw), ("logprobs", logprobs)):
            at = next((i for i, value in enumerate(values) if math.isnan(value)), None)
            if at is not None:
                raise ValueError(f"{name} of sampled token {at} of turn {turn} is NaN")
        sources = [Source.SAMPLED] * num
        self._append(token_ids, sources, turn, logprobs_raw, logprobs, versions, kv_versions)

    def set_experts(self, from_position: int, experts: NDArray[np.uint8]) -> None:
        """Record uint8 [n, L, K] for positions from `from_position`, which must be the next one."""
        if experts.ndim != 3 or experts.dtype != np.uint8:
            raise ValueError(
                f"experts must be uint8 [n, layers, top_k], not {experts.dtype} {experts.shape}"
            )
        if from_position != self._num_with_experts:
            raise ValueError(
                f"experts start at position {from_position} but those below "
                f"{self._num_with_experts} are recorded: neither overwrite nor gap"
            )
        if from_position + len(experts) > len(self):
            raise ValueError(
                f"experts reach position {from_position + len(experts)} of {len(self)} tokens"
            )
        if self._experts and self._experts[0].shape[1:] != experts.shape[1:]:
            raise ValueError(
                f"experts of shape {experts.shape[1:]} after {self._experts[0].shape[1:]}"
            )
        self._experts.append(experts.copy())
        self._num_with_experts += len(experts)

    def columns(self) -> dict[str, Any]:
        """The ledger fields of `Trajectory`, as copies."""
        shape = self._experts[0].shape[1:] if self._experts else (0, 0)
        experts = np.zeros((len(self), *shape), np.uint8)
        if self._experts:
            experts[: self._num_with_experts] = np.concatenate(self._experts)
        return {
            "token_ids": np.array(self._token_ids, np.int32),
            "source": np.array(self._source, np.uint8),
            "turn": np.array(self._turn, np.int16),
            "logprob_raw": np.array(self._logprob_raw, np.float32),
            "logprob": np.array(self._logprob, np.float32),
            "version": np.array(self._version, np.int32),
            "kv_version": np.array(self._kv_version, np.int32),
            "experts": experts,
            "experts_known": self._num_with_experts,
        }

    def _append(
        self,
        token_ids: Sequence[int],
        sources: Sequence[Source],
        turn: int,
        logprobs_raw: Sequence[float],
        logprobs: Sequence[float],
        versions: Sequence[int] | None,
        kv_versions: Sequence[int] | None,
    ) -> None:
        num = len(token_ids)
        if min(token_ids, default=0) < 0:
            raise ValueError(f"token ids must not be negative, found {min(token_ids)}")
        last = self._turn[-1] if self._turn else 0
        if not last <= turn < 1 << 15:
            raise ValueError(f"turn {turn} after turn {last}: turns only grow, up to 32767")
        none = [-1] * num
        try:
            grown: list[tuple[array[Any], array[Any]]] = [
                (self._token_ids, array("i", token_ids)),
                (self._source, array("B", sources)),
                (self._turn, array("h", [turn]) * num),
                (self._logprob_raw, array("f", logprobs_raw)),
                (self._logprob, array("f", logprobs)),
                (self._version, array("i", none if versions is None else versions)),
                (self._kv_version, array("i", none if kv_versions is None else kv_versions)),
            ]
        except OverflowError as error:
            raise ValueError(f"a number of turn {turn} does not fit the ledger: {error}") from error
        for column, tail in grown:
            column.extend(tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model and what the environment gave for it."""

    reward: float
    start: int
    """First sampled token of the turn in the ledger."""
    stop: int
    """One past the last sampled token."""
    finish: str
    """stop, length, choice or aborted."""
    valid_action: bool | None
    """Whether the environment could read the answer; None where nothing says."""
    text: str
    """The sampled tokens in words, for people; tokens are the truth."""
    cached_tokens: int
    """Context tokens whose keys and values were there already."""
    prefill_tokens: int
    """Context tokens computed for this turn."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be finite, found {self.reward}")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a turn's span must not be negative: {self.start} to {self.stop}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A finished episode: checked, immutable, and equal to another only bit for bit.

    Arrays become read-only. `info`, `prompt` and `answer` must be JSON values (ValueError).
    """

    trajectory_id: int
    task_id: str
    group_id: str | None
    env: str
    seed: int
    turns: tuple[Turn, ...]
    end_reason: EndReason
    info: Mapping[str, Any]
    token_ids: NDArray[np.int32]
    """[T]"""
    source: NDArray[np.uint8]
    """[T], a `Source`."""
    turn: NDArray[np.int16]
    """[T], the turn a token was sampled in or leads to."""
    logprob_raw: NDArray[np.float32]
    """[T], under the model's logits; NaN where not sampled."""
    logprob: NDArray[np.float32]
    """[T], under the distribution it was drawn from; NaN where not sampled."""
    version: NDArray[np.int32]
    """[T], weight version that sampled the token; -1 where not sampled."""
    kv_version: NDArray[np.int32]
    """[T], oldest version of the keys and values it attended to; -1 where not sampled."""
    experts: NDArray[np.uint8]
    """[T, L, K]; rows from `experts_known` on are zero and mean nothing."""
    experts_known: int
    """Positions with experts: usually T - 1, as the last sampled token was never forwarded."""
    prompt: Any = None
    """The task's prompt, where it had one."""
    answer: Any = None
    """The task's reference answer, for reward functions."""

    def __post_init__(self) -> None:
        num = len(self.token_ids)
        for name, dtype in _COLUMNS.items():
            column = getattr(self, name)
            if column.dtype != dtype or len(column) != num:
                raise ValueError(
                    f"{name} must be {np.dtype(dtype).name} [{num}], "
                    f"not {column.dtype} {list(column.shape)}"
                )
            column.flags.writeable = False
        if self.experts.ndim != 3 or not 0 <= self.experts_known <= num:
            raise ValueError(
                f"experts {list(self.experts.shape)} with {self.experts_known} known rows "
                f"do not fit {num} tokens"
            )
        end = 0
        for index, turn in enumerate(self.turns):
            if not end <= turn.start <= turn.stop <= num:
                raise ValueError(
                    f"turn {index} spans {turn.start} to {turn.stop} of {num} tokens, after {end}"
                )
            end = turn.stop
        for name in ("info", "prompt", "answer"):
            try:
                value = json.loads(json.dumps(getattr(self, name)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} is not a JSON value: {error}") from error
            object.__setattr__(self, name, value)

    @classmethod
    def from_ledger(cls, ledger: Ledger, **rest: Any) -> Trajectory:
        """Close a ledger; `rest` are the fields that are not its columns."""
        return cls(**ledger.columns(), **rest)

    @property
    def return_(self) -> float:
        """Sum of the turns' rewards, undiscounted."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[T], true where the token was sampled."""
        mask: NDArray[np.bool_] = self.source == Source.SAMPLED
        return mask

    @property
    def spans(self) -> tuple[slice, ...]:
        """The sampled tokens of each turn, as slices of the ledger."""
        return tuple(slice(turn.start, turn.stop) for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def exact(self) -> bool:
        """Whether every sampled token attended only to keys and values of its own weights.

        Only then would computing the trajectory again from its tokens give the same bits. Never
        where a rule was broken on purpose (`info` says which, as unsafe).
        """
        return "unsafe" not in self.info and bool((self.version == self.kv_version).all())

    @property
    def reproducible(self) -> bool:
        """Whether its end follows from seeds alone; not so if a clock, a crash or a hand ended it.

        Others are outside every digest.
        """
        by_chance = self.info.get("failure") in ("hung", "died")
        return self.end_reason is not EndReason.ABORTED and not by_chance

    def with_rewards(self, rewards: float | Sequence[float]) -> Trajectory:
        """The same trajectory rewarded anew: one reward per turn, or one number for the last turn.

        With one number all earlier turns get 0. ValueError if the count is not `num_turns`.
        """
        if isinstance(rewards, int | float | np.number):
            each = [0.0] * (self.num_turns - 1) + [float(rewards)]
        else:
            each = [float(reward) for reward in rewards]
        if len(each) != self.num_turns:
            raise ValueError(f"{len(each)} rewards for {self.num_turns} turns")
        turns = [
            replace(turn, reward=reward) for turn, reward in zip(self.turns, each, strict=True)
        ]
        return replace(self, turns=tuple(turns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return all(
            mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()
            if isinstance(mine, np.ndarray)
            else mine == theirs
            for mine, theirs in (
                (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
            )
        )

    __hash__ = None  # type: ignore[assignment]


_COLUMNS = {
    "token_ids": np.int32,
    "source": np.uint8,
    "turn": np.int16,
    "logprob_raw": np.float32,
    "logprob": np.float32,
    "version": np.int32,
    "kv_version": np.int32,
    "experts": np.uint8,
}
