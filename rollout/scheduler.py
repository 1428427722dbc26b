"""What one data-parallel group does next: its leader's queues, blocks and provisional results.

Life of a sequence: waiting -> in flight (one chunk of prefill; back to waiting while context is
left) -> running (one decode row a step) -> finished. Where other ranks prefill: waiting -> away
(its blocks reserved) -> running. What a forward pass produced is provisional until the next
exchange has agreed on the step; only `commit` makes it real.

A lease grows with its sequence. When blocks run out, the running sequence that came last is
preempted: it gives its blocks back, waits, and is prefilled again with what it has sampled so far.
Same tokens, same bits, as long as the weights have not changed since. That is the leader's own
decision: proposals are upper bounds, so a row that is not there changes no collective.

Weights change between two steps, when nothing is in flight (`updated`). What has begun to sample
goes on over its old keys and values, unless it shall not; what has not begins anew. So what a token
was computed from depends on nothing but how many tokens its turn had sampled at each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interlace.comm.proposal import Proposal
from interlace.moe.description import Description

from .block_manager import BlockManager
from .changed import Changed
from .kv_versions import KVVersions
from .messages import Held, TurnRequest, TurnResult, UpdateMode
from .rows import Rows, describe_rows
from .sequence import Sequence as Turn

_NextBlock = tuple[int, tuple[int, ...]]
"""Index of a block, and the context up to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One sampled token, as the scheduler needs it."""

    token: int
    logprob_raw: float
    logprob: float
    ends_choice: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Provisional:
    sequence: Turn
    drawn: Drawn
    version: int
    kv_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errand:
    """A turn that other ranks prefill."""

    next_block: _NextBlock | None
    """The first block that is computed for it there."""
    weights: int
    """With which they do."""


class Scheduler:
    """Decode first, prefill gets what is left; first come, first served.

    Knows no clock, no rank but its own group's, and no tensors.
    """

    def __init__(
        self,
        *,
        blocks: BlockManager,
        chunk_tokens: int,
        max_running: int,
        max_context: int,
        expert_shape: tuple[int, int],
        text_of: Callable[[Sequence[int]], str],
        kv: KVVersions | None = None,
    ) -> None:
        """`expert_shape` is (layers, top_k); `text_of` is asked only where stop strings are set.
        `kv`: by default keys and values have no bound of age, and only new turns need new ones."""
        self.blocks, self.kv = blocks, kv or KVVersions()
        self._chunk_tokens, self._max_running = chunk_tokens, max_running
        self._max_context, self._expert_shape = max_context, expert_shape
        self._text_of = text_of
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []
        self._flights: dict[str, list[Rows]] = {}
        self._away: dict[Turn, _Errand] = {}
        self._provisional: list[_Provisional] = []
        self._results: list[TurnResult] = []
        self._held: list[Held] = []
        self._waited, self._stopping, self._arrived = 0, False, 0
        self._paused = False
        self.num_preemptions = 0
        self.num_recomputed = 0
        """Rows prefilled of tokens which their trajectory had forwarded before."""

    # ---- intake

    def submit(
        self,
        request: TurnRequest,
        *,
        generated: Sequence[int] = (),
        num_forwarded: int | None = None,
    ) -> Turn:
        """Queue a turn. ValueError if its context leaves no room, or can never fit the pool.

        `generated`: what the turn has sampled so far, elsewhere; `num_forwarded`: the tokens
        forwarded there, by default those whose experts the request says are known.
        """
        sequence = Turn.of(
            request,
            max_context=self._max_context,
            expert_shape=self._expert_shape,
            generated=generated,
        )
        if num_forwarded is not None:
            sequence.num_forwarded = num_forwarded
        needed = self.blocks.blocks_for(len(sequence.experts))
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"trajectory {request.trajectory}: {len(sequence.experts)} tokens need {needed} "
                f"blocks, the pool has {self.blocks.num_blocks}"
            )
        sequence.arrival = self._arrived
        self._arrived += 1
        self._waiting.append(sequence)
        self._held += sequence.holds_reached(self.kv.version)
        return sequence

    def abort(self, trajectory: int) -> None:
        """End the trajectory's turn as `aborted`; one in flight ends when its chunk returns."""
        for sequence in self._everyone():
            if sequence.request.trajectory == trajectory:
                sequence.aborted = True

    @property
    def trajectories(self) -> list[int]:
        """Those whose turn has not ended."""
        return sorted({sequence.request.trajectory for sequence in self._everyone()})

    def pause(self) -> None:
        """Neither prefill nor decode until `resume`; a chunk in flight goes to its end."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self) -> None:
        """No more requests will come, and nobody who could end a pause."""
        self._stopping, self._paused = True, False

    # ---- the step

    def propose(self, *, rank: int, hashes: tuple[int, ...]) -> Proposal:
        """Upper bounds on provisional state, for the exchange."""
        waiting_tokens = self._admissible_tokens()
        self._waited = self._waited + 1 if waiting_tokens else 0
        in_flight = self._flights.get("prefill", ())
        return Proposal(
            rank=rank,
            leader=True,
            decode_rows=self._num_decoding,
            waiting_tokens=waiting_tokens,
            waiting_steps=self._waited,
            live_rows=sum(r.stop - r.start for r in in_flight if not r.sequence.aborted),
            idle=not any(True for _ in self._everyone()),
            stop=self._stopping,
            hashes=hashes,
        )

    def commit(self) -> list[TurnResult]:
        """The exchange agreed: results become real. Returns the turns that ended."""
        for item in self._provisional:
            self._append(item)
        self._provisional.clear()
        for sequence in [s for s in (*self._waiting, *self._running) if s.aborted]:
            self._finish(sequence, "aborted")
        self._make_way()
        results, self._results = self._results, []
        return results

    def held(self) -> list[Held]:
        """The holds that turns have come to, as far as it is agreed; each is told once."""
        held, self._held = self._held, []
        return held

    def updated(self, version: int, mode: UpdateMode) -> Changed:
        """The weights of `version` are in use from the next step on; nothing is in flight.

        "same": they are those there were. "keep": turns that have sampled go on, unless the bound
        of age forbids it, all others are prefilled anew. "retract": all are. "abort": all end.
        """
        assert not self._flights, f"in flight over an update: {sorted(self._flights)}"
        self.install(version, same=mode == "same")
        if mode == "same":
            return Changed()
        here = list(dict.fromkeys(s for s in self._everyone() if not s.aborted))
        if mode == "abort":
            for sequence in here:
                sequence.aborted = True
            return Changed(aborted=tuple(sorted(s.request.trajectory for s in here)))
        if mode == "retract":
            for sequence in here:
                if sequence.lease is not None or sequence.num_drawn:
                    sequence.oldest = self.kv.stamp
        outdated = [s for s in here if s not in self._away and self._is_outdated(s)]
        return Changed(dropped_tokens=sum(self._retract(sequence) for sequence in outdated))

    def install(self, version: int, *, same: bool) -> None:
        """From here on it is the version, whatever becomes of the turns that are there."""
        self.kv.install(version, same=same)
        self.blocks.oldest = self.kv.oldest_reused

    def describe_decode(self) -> Description:
        """One row for every running sequence that may sample, ordered by trajectory, after
        preempting some if blocks have run out."""
        decoding = self._able()[: self._max_running]
        for sequence in decoding:
            if sequence in self._running:
                self._ensure_room(sequence)
        rows = [
            Rows(sequence=s, start=len(s.token_ids) - 1, stop=len(s.token_ids))
            for s in sorted(decoding, key=lambda s: s.request.trajectory)
            if s in self._running
        ]
        self._flights["decode"] = rows
        return describe_rows(rows, ())

    def describe_prefill(self) -> Description:
        """The next chunk: sequences in order of arrival until `chunk_tokens` are reached.

        Once one finds no blocks, those behind it get none either, but whoever has a lease goes on.
        A sequence whose next whole block is being computed by an earlier one of the same chunk
        waits for it instead of computing it twice.
        """
        room, rows = self._chunk_tokens, []
        copies: list[tuple[int, int]] = []
        for sequence, _ in self._admitted():
            assert sequence.lease is not None
            copies += self.blocks.copies_of(sequence.lease)
            num = min(room, sequence.num_uncomputed)
            start = sequence.num_computed
            rows.append(Rows(sequence=sequence, start=start, stop=start + num))
            room -= num
            if room == 0:
                break
        self._flights["prefill"] = rows
        return describe_rows(rows, copies)

    def sampling_rows(self, work: str) -> list[Turn]:
        """The sequences a returned forward pass drew logits for, in the order of its rows."""
        return [rows.sequence for rows in self._flights[work] if rows.samples]

    def num_rows(self, work: str) -> int:
        """The rows this group has in a forward pass that is under way."""
        return sum(rows.stop - rows.start for rows in self._flights[work])

    def take(
        self, work: str, drawn: Sequence[Drawn], experts: NDArray[np.uint8], version: int
    ) -> None:
        """A forward pass returned: keep its experts, hold its samples until `commit`."""
        flight = self._flights.pop(work)
        samples = iter(drawn)
        at = 0
        for rows in flight:
            sequence, num = rows.sequence, rows.stop - rows.start
            sequence.compute(rows.start, experts[at : at + num], [self.kv.stamp] * num)
            at += num
            if work == "prefill":
                sequence.num_prefilled += num
                again = min(rows.stop, sequence.num_forwarded) - rows.start
                self.num_recomputed += max(0, again)
            sequence.num_forwarded = max(sequence.num_forwarded, rows.stop)
            if not rows.samples:
                self._waiting.append(sequence)
                continue
            token = next(samples)
            if sequence.aborted and sequence not in self._running:
                self._waiting.append(sequence)
                continue
            self._hold_back(sequence, token, version, self.kv.number(sequence.weights[0]))

    def depart(self) -> list[Turn]:
        """Those that other ranks shall prefill now, with blocks for their whole context reserved.

        In order of arrival, as long as there are places and blocks; a sequence whose next whole
        block is being computed for another waits for it.
        """
        departing = []
        for sequence, key in self._admitted():
            self._away[sequence] = _Errand(next_block=key, weights=self.kv.stamp)
            departing.append(sequence)
        return departing

    def away(self, trajectory: int) -> Turn | None:
        """The trajectory's turn, if other ranks prefill it."""
        return next((s for s in self._away if s.request.trajectory == trajectory), None)

    def arrive(self, result: TurnResult) -> None:
        """Other ranks have prefilled a turn, as one that ends with its next token: hold that until
        `commit`. All keys and values are in the blocks reserved, unless it was aborted: by us, or
        by them since the weights had changed before they had the token."""
        sequence = self.away(result.trajectory)
        assert sequence is not None, f"trajectory {result.trajectory} is not away"
        weights = self._away.pop(sequence).weights
        sequence.num_prefilled += result.prefill_tokens
        if result.finish == "aborted" or sequence.aborted:
            if not sequence.aborted:
                self._discard(sequence)
            self._waiting.append(sequence)
            return
        num = len(sequence.token_ids) - sequence.num_computed
        experts = np.frombuffer(result.experts, np.uint8).reshape(result.experts_shape)
        sequence.compute(sequence.num_computed, experts, [weights] * num)
        sequence.num_forwarded = sequence.num_computed
        if not sequence.generated:
            sequence.num_cached = result.cached_tokens
        drawn = Drawn(
            token=result.token_ids[-1],
            logprob_raw=result.logprobs_raw[-1],
            logprob=result.logprobs[-1],
            ends_choice=result.finish == "choice",
        )
        self._hold_back(sequence, drawn, result.versions[-1], result.kv_versions[-1])

    def drop_prefill(self) -> None:
        """The in-flight chunk was abandoned: nothing of it was computed."""
        for rows in self._flights.pop("prefill", ()):
            self._waiting.append(rows.sequence)

    @property
    def sampled(self) -> tuple[int, ...]:
        """Trajectories that were given a token which no exchange has agreed to yet."""
        return tuple(item.sequence.request.trajectory for item in self._provisional)

    # ---- inside

    def _hold_back(self, sequence: Turn, drawn: Drawn, version: int, kv_version: int) -> None:
        sequence.draw()
        self._provisional.append(
            _Provisional(sequence=sequence, drawn=drawn, version=version, kv_version=kv_version)
        )

    def _everyone(self) -> Iterable[Turn]:
        yield from self._waiting
        yield from self._running
        yield from self._away
        for rows in self._flights.get("prefill", ()):
            yield rows.sequence
        yield from self._joining

    def _may_go_on(self, sequence: Turn) -> bool:
        return not (self._paused or sequence.is_held(self.kv.version))

    def _wanted(self) -> list[Turn]:
        """Who waits, in order of arrival. An aborted turn ends at the next commit: a chunk that
        took it once more would be dropped again, in every step, before those behind it."""
        wanted = (s for s in self._waiting if not s.aborted and self._may_go_on(s))
        return sorted(wanted, key=_arrival)

    def _able(self) -> list[Turn]:
        """Who runs and may sample, in order of arrival. Those that are held have no place."""
        return sorted((s for s in self._running if self._may_go_on(s)), key=_arrival)

    def _admitted(self) -> Iterator[tuple[Turn, _NextBlock | None]]:
        """Who leaves the queue: those that find a place and blocks, or have some, in order of
        arrival; with the next whole block that is to be computed. No two share that."""
        places = self._max_running - len(self._able()) - len(self._away)
        coming = self._coming
        short = False
        for sequence in self._wanted():
            if places <= 0:
                break
            key = self._next_block(sequence)
            if sequence.lease is None and (short or key in coming):
                continue
            if not self._ensure_lease(sequence):
                short = True
                continue
            self._waiting.remove(sequence)
            if key is not None:
                coming.add(key)
            places -= 1
            yield sequence, key

    def _admissible_tokens(self) -> int:
        """Tokens that could be prefilled now; at least the first in the queue truly fits."""
        joining = self._num_joining
        in_flight = len(self._flights.get("prefill", ())) + len(self._away)
        places = self._max_running - len(self._able()) - joining - in_flight
        coming = self._coming
        tokens, short = 0, False
        for sequence in self._wanted():
            if places <= 0:
                break
            if sequence.lease is None:
                if coming and self._next_block(sequence) in coming:
                    continue
                # twice: by then the running ones may have taken what is spared for them now
                spare = 2 * (self._spare + joining)
                short = short or not self._can_lease(sequence, spare)
                if short:
                    continue
            tokens += sequence.num_uncomputed
            places -= 1
        return tokens

    @property
    def _joining(self) -> list[Turn]:
        """Those whose first token is provisional: they run from the next commit on, unless they
        have lost their blocks to an update since and wait."""
        drawn = (item.sequence for item in self._provisional)
        return [s for s in drawn if s.lease is not None and s not in self._running]

    @property
    def _num_joining(self) -> int:
        return len(self._joining)

    @property
    def _num_decoding(self) -> int:
        """At most so many decode rows in the next step."""
        joining = sum(map(self._may_go_on, self._joining))
        return min(self._max_running, len(self._able()) + joining)

    @property
    def _coming(self) -> set[_NextBlock]:
        """Blocks that other ranks compute."""
        blocks = (errand.next_block for errand in self._away.values())
        return {block for block in blocks if block is not None}

    @property
    def _spare(self) -> int:
        """Blocks to leave for running sequences: each may need one before a chunk has returned."""
        return len(self._able())

    def _can_lease(self, sequence: Turn, spare: int) -> bool:
        known = sequence.token_ids
        return self.blocks.can_lease(known, len(known) + 1, spare=spare, oldest=sequence.oldest)

    def _ensure_lease(self, sequence: Turn) -> bool:
        if sequence.lease is not None:
            return True
        known = sequence.token_ids
        spare, oldest = self._spare, sequence.oldest
        lease = self.blocks.lease(known, len(known) + 1, spare=spare, oldest=oldest)
        if lease is None:
            return False
        sequence.lease = lease
        if sequence.num_prefilled == 0:
            sequence.num_cached = lease.num_cached
        if lease.cached_experts:
            sequence.compute(0, np.concatenate(lease.cached_experts), lease.cached_weights)
        return True

    def _ensure_room(self, sequence: Turn) -> None:
        """Blocks for the row `sequence` decodes next, taken from who came last, if need be."""
        assert sequence.lease is not None
        while not self.blocks.grow(sequence.lease, len(sequence.token_ids)):
            last = max(self._running, key=self._gives_way)
            self._preempt(last)
            if last is sequence:
                return

    def _gives_way(self, sequence: Turn) -> tuple[bool, int]:
        """Who gives way is the greatest: who came last, but first those that can be computed again
        to the same bits, as weights of the past cannot."""
        repeats = sequence.weights[0] == self.kv.stamp and self._may_go_on(sequence)
        return repeats, sequence.arrival

    def _make_way(self) -> None:
        """Turns that are held keep their blocks as long as others can go on without them."""
        while self._is_stuck():
            self._preempt(max(self._running, key=self._gives_way))

    def _is_stuck(self) -> bool:
        """Nobody can go on, and somebody could if those that are held gave up their blocks."""
        if self._able() or self._away or self._flights.get("prefill") or not self._running:
            return False
        wanted = self._wanted()
        if not wanted or any(sequence.lease is not None for sequence in wanted):
            return False
        return not self._can_lease(wanted[0], spare=0)

    def _preempt(self, sequence: Turn) -> None:
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.forget()
        self._waiting.append(sequence)
        self.num_preemptions += 1

    def _is_outdated(self, sequence: Turn) -> bool:
        """Whether its keys and values are older than it may use them."""
        if not sequence.num_computed:
            return False
        oldest = max(self.kv.oldest, sequence.oldest)
        if sequence in self._waiting:  # has begun a prefill, which never sees two versions
            oldest = max(oldest, self.kv.oldest_reused)
        return sequence.weights[0] < oldest

    def _retract(self, sequence: Turn) -> int:
        """It waits for keys and values of the weights in use; the number of rows it has lost."""
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence not in self._waiting:
            self._waiting.append(sequence)
        return self._discard(sequence)

    def _discard(self, sequence: Turn) -> int:
        assert sequence.lease is not None
        self.blocks.discard(sequence.lease)
        sequence.lease = None
        return sequence.forget()

    def _give_back(self, sequence: Turn) -> None:
        if sequence.lease is not None:
            self.blocks.give_back(sequence.lease, sequence.content)
            sequence.lease = None

    def _next_block(self, sequence: Turn) -> _NextBlock | None:
        """Index and prefix of the first whole block that is not cached, or None."""
        context, size = sequence.token_ids, self.blocks.block_size
        match = self.blocks.match(context, len(context) - 1, oldest=sequence.oldest)
        index = len(match.nodes)
        end = (index + 1) * size
        return (index, tuple(context[:end])) if end < len(context) else None

    def _append(self, item: _Provisional) -> None:
        sequence, drawn = item.sequence, item.drawn
        sequence.token_ids.append(drawn.token)
        sequence.logprobs_raw.append(drawn.logprob_raw)
        sequence.logprobs.append(drawn.logprob)
        sequence.versions.append(item.version)
        sequence.kv_versions.append(item.kv_version)
        self._held += sequence.holds_reached(self.kv.version)
        if sequence.lease is not None and sequence not in self._running:
            if self._is_outdated(sequence):
                self._retract(sequence)
            else:
                self._running.append(sequence)
                self.blocks.publish(sequence.lease, sequence.content)
        finish = self._finish_of(sequence, drawn)
        if finish is not None:
            self._finish(sequence, finish)

    def _finish_of(self, sequence: Turn, drawn: Drawn) -> str | None:
        params = sequence.request.sampling
        if drawn.token in params.stop_token_ids:
            return "stop"
        if drawn.ends_choice:
            return "choice"
        if params.stop_strings:
            text = self._text_of(sequence.spoken)
            if any(string in text for string in params.stop_strings):
                return "stop"
        return "length" if len(sequence.generated) >= sequence.max_tokens else None

    def _finish(self, sequence: Turn, finish: str) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._give_back(sequence)
        self._results.append(sequence.result(finish))


def _arrival(sequence: Turn) -> int:
    return sequence.arrival
