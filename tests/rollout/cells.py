"""A cache made of numbers, and a leader's group that computes with it.

What a position leaves in the cache is a number that depends on its token, on the weights that
compute it and on all numbers before it, read from the blocks themselves; the next token follows
from the last of them. A block that is missing, misplaced, overwritten or of other weights makes
other tokens. Beside each number stands which weights wrote it: the truth about a sampled token.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from interlace.moe.description import Description
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.group import Side
from interlace.rollout.kv_versions import KVVersions
from interlace.rollout.messages import TurnRequest, TurnResult
from interlace.rollout.scheduler import Scheduler
from interlace.rollout.sequence import Drawn

SIZE = 4
STOP = 7
VOCABULARY = 40


def mix(token: int, before: Sequence[int], weights: int = 0) -> int:
    return zlib.crc32(np.array([token + (weights << 32), *before], np.int64).tobytes())


def routed(token: int, weights: int) -> int:
    """The expert of a token: each set of weights chooses another one."""
    return (token + 50 * weights) % 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A turn as it must be."""

    tokens: list[int]
    weights: list[int]
    """That sampled each token."""
    oldest: list[int]
    """That computed the oldest of what it attends to."""
    experts: list[int]
    """Of all tokens but the last: from the pass after which they were first sampled from."""


def played(
    tokens: Sequence[int],
    num: int,
    *,
    weights: int = 0,
    changes: Mapping[int, int] | None = None,
    retract: bool = False,
    stop: Sequence[int] = (STOP,),
) -> Played:
    """A turn alone, without a cache. `changes`: sampled tokens -> weights in use from there on;
    with `retract` all is computed again there."""
    cells: list[int] = []
    experts: list[int] = []
    context = list(tokens)
    computed = weights
    for token in context:
        cells.append(mix(token, cells, weights))
        experts.append(routed(token, weights))
    sampled: list[int] = []
    by: list[int] = []
    oldest: list[int] = []
    while True:
        sampled.append(cells[-1] % VOCABULARY)
        by.append(weights)
        oldest.append(computed)
        if sampled[-1] in stop or len(sampled) == num:
            return Played(tokens=sampled, weights=by, oldest=oldest, experts=experts)
        new = (changes or {}).get(len(sampled), weights)
        if retract and new != weights:
            cells, computed = [], new
            for token in [*context, *sampled[:-1]]:
                cells.append(mix(token, cells, new))
        weights = new
        cells.append(mix(sampled[-1], cells, weights))
        experts.append(routed(sampled[-1], weights))


def expected(tokens: Sequence[int], num: int) -> list[int]:
    """The next tokens, without a cache."""
    return played(tokens, num).tokens


def turn(
    trajectory: int,
    tokens: Sequence[int],
    num: int,
    *,
    known: int = 0,
    holds: Sequence[tuple[int, int]] = (),
) -> TurnRequest:
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=list(tokens),
        seed=0,
        experts_from=known,
        sampling=SamplingParams(max_tokens=num, stop_token_ids=(STOP,)),
        holds=list(holds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a token was really computed from."""

    token: int
    version: int
    kv_version: int


class Group:
    """One leader with its scheduler and a cache of its own."""

    def __init__(
        self,
        *,
        blocks: int,
        chunk: int = 8,
        running: int = 4,
        kv: KVVersions | None = None,
        truth: dict[tuple[int, int], Truth] | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            blocks=BlockManager(num_blocks=blocks, block_size=SIZE),
            chunk_tokens=chunk,
            max_running=running,
            max_context=200,
            expert_shape=(1, 1),
            text_of=lambda _: "",
            kv=kv,
        )
        self.cells = np.zeros((blocks, SIZE), np.int64)
        self.written_by = np.zeros((blocks, SIZE), np.int64)
        self.side: Side
        self.flights: dict[str, tuple[Description, list[Drawn], int]] = {}
        """Kind of work -> its rows, what was drawn, and the steps it still takes."""
        self.truth = {} if truth is None else truth
        """(trajectory, position) -> the last token that was drawn there."""
        self.num_blocks_sent = 0
        self.version = self.weights = 0
        self.numbers = {0: 0}
        """Weights -> the newest version that had them."""

    def forward(self, work: str, rows: Description, num_steps: int) -> None:
        """Write at once; whoever reads too early is found by what he reads."""
        for source, target in rows.block_copies:
            self.copy(source, self, target)
        drawn: list[Drawn] = []
        bounds = rows.cu_seqlens_q
        flight = self.scheduler._flights[work]
        assert sum(item.stop - item.start for item in flight) == rows.num_rows
        for item, table, start, stop in zip(
            flight, rows.block_tables, bounds, bounds[1:], strict=False
        ):
            where = list(table)
            for row in range(start, stop):
                at = rows.positions[row]
                before = self.cells[where].reshape(-1)[:at].tolist()
                place = table[at // SIZE], at % SIZE
                self.cells[place] = mix(rows.input_ids[row], before, self.weights)
                self.written_by[place] = self.weights
            if item.samples:
                drawn.append(self._draw(item.sequence.request.trajectory, item.stop, where))
                self._check_chain(item.sequence.token_ids, where)
        self.flights[work] = rows, drawn, num_steps

    def _draw(self, trajectory: int, num: int, table: list[int]) -> Drawn:
        token = int(self.cells[table].reshape(-1)[num - 1]) % VOCABULARY
        oldest = int(self.written_by[table].reshape(-1)[:num].min())
        self.truth[trajectory, num] = Truth(
            token=token, version=self.version, kv_version=self.numbers[oldest]
        )
        return Drawn(token=token, logprob_raw=-token, logprob=-token / 2, ends_choice=False)

    def _check_chain(self, tokens: Sequence[int], table: list[int]) -> None:
        """Each number was computed from those that stand before it now, none from others."""
        cells = self.cells[table].reshape(-1)[: len(tokens)].tolist()
        weights = self.written_by[table].reshape(-1)[: len(tokens)].tolist()
        for at, token in enumerate(tokens):
            assert cells[at] == mix(token, cells[:at], weights[at]), f"position {at} of {tokens}"

    def land(self, work: str) -> None:
        rows, drawn, num_steps = self.flights.pop(work)
        if num_steps > 1:
            self.flights[work] = rows, drawn, num_steps - 1
            return
        experts = [routed(token, self.weights) for token in rows.input_ids]
        self.scheduler.take(
            work, drawn, np.array(experts, np.uint8).reshape(-1, 1, 1), self.version
        )

    def end_flights(self) -> None:
        """As the step of an update does."""
        for work in list(self.flights):
            while work in self.flights:
                self.land(work)

    def install(self, version: int, *, same: bool) -> None:
        """What a rank computes with from here on; its leader is told by somebody else."""
        if not same:
            self.weights = version
        self.numbers[self.weights] = self.version = version

    def copy(self, block: int, other: Group, into: int) -> None:
        other.cells[into] = self.cells[block]
        other.written_by[into] = self.written_by[block]


def check(request: TurnRequest, result: TurnResult) -> None:
    """The tokens, and that each forwarded token has its own experts, where weights are the same
    throughout."""
    wanted = expected(request.token_ids, request.sampling.max_tokens)
    assert result.token_ids == wanted[: len(result.token_ids)]
    assert result.finish == "aborted" or result.token_ids == wanted
    assert result.logprobs == [-token / 2 for token in result.token_ids]
    forwarded = [*request.token_ids, *result.token_ids]
    experts = np.frombuffer(result.experts, np.uint8).tolist()
    start = request.experts_from
    assert experts == forwarded[start : start + len(experts)]
    if result.finish != "aborted":
        assert start + len(experts) == len(forwarded) - 1


def check_truth(
    request: TurnRequest, result: TurnResult, truth: Mapping[tuple[int, int], Truth]
) -> None:
    """Each token is the one that was drawn there, with the versions that it was drawn from."""
    first = len(request.token_ids)
    for nth, told in enumerate(
        zip(result.token_ids, result.versions, result.kv_versions, strict=True)
    ):
        real = truth[request.trajectory, first + nth]
        assert told == (real.token, real.version, real.kv_version), f"token {nth}: {real}"
    assert result.versions == sorted(result.versions)
    for num, version in request.holds:
        early = [old for nth, old in enumerate(result.versions) if nth >= num and old < version]
        assert not early, f"held at {num} until version {version}, sampled by {early}"


def check_age(result: TurnResult, firsts: Iterable[int], bound: int | None) -> None:
    """No token attends to weights that have been replaced more often than `bound`. `firsts`: the
    versions that brought new weights."""
    if bound is None:
        return
    changes = sorted(firsts)
    for new, old in zip(result.versions, result.kv_versions, strict=True):
        assert bisect_right(changes, new) - bisect_right(changes, old) <= bound


def check_replay(request: TurnRequest, result: TurnResult, *, retract: bool = False) -> None:
    """The turn is what it would be alone, if weights had changed behind the same tokens."""
    versions, num = result.versions, len(result.token_ids)
    if not num:
        return
    changes = {nth: versions[nth] for nth in range(1, num) if versions[nth] != versions[nth - 1]}
    alone = played(
        request.token_ids,
        request.sampling.max_tokens,
        weights=versions[0],
        changes=changes,
        retract=retract,
        stop=request.sampling.stop_token_ids,
    )
    assert result.token_ids == alone.tokens[:num]
    assert result.kv_versions == alone.oldest[:num]
    experts = np.frombuffer(result.experts, np.uint8).tolist()
    start = request.experts_from
    assert experts == alone.experts[start : start + len(experts)]
    assert result.finish == "aborted" or start + len(experts) == len(request.token_ids) + num - 1
