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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interlace.comm.proposal import Proposal
from interlace.moe.description import Description

from .admission import Admission, Errand, NextBlock
from .block_manager import BlockManager
from .changed import Changed
from .holdings import Holdings
from .kv_versions import KVVersions
from .messages import Held, TurnRequest, TurnResult, UpdateMode
from .rows import Rows, describe_rows
from .sequence import Drawn
from .sequence import Sequence as Turn
from .waiting import Waiting


class _Provisional(NamedTuple):
    sequence: Turn
    drawn: Drawn
    version: int
    kv_version: int


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
        self._turns_of: dict[int, list[Turn]] = {}
        """Trajectory -> its turns that have not ended, as a rule one."""
        self._waiting = Waiting(
            block_size=blocks.block_size, is_held=lambda turn: turn.is_held(self.kv.version)
        )
        self._admission = Admission(blocks=blocks, max_running=max_running, waiting=self._waiting)
        self._away = self._admission.away
        self._holdings = Holdings(
            blocks=blocks, kv=self.kv, waiting=self._waiting, may_go_on=self._may_go_on
        )
        self._running = self._holdings.running
        self._flights: dict[str, list[Rows]] = {}
        self._provisional: list[_Provisional] = []
        self._results: list[TurnResult] = []
        self._held: list[Held] = []
        self._waited, self._stopping, self._arrived = 0, False, 0
        self._paused = False
        self.num_recomputed = 0
        """Rows prefilled of tokens which their trajectory had forwarded before."""

    @property
    def num_preemptions(self) -> int:
        return self._holdings.num_preemptions

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
        needed = self.blocks.blocks_for(sequence.most_tokens)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"trajectory {request.trajectory}: {sequence.most_tokens} tokens need {needed} "
                f"blocks, the pool has {self.blocks.num_blocks}"
            )
        sequence.arrival = self._arrived
        self._arrived += 1
        self._turns_of.setdefault(request.trajectory, []).append(sequence)
        self._waiting.add(sequence)
        self._held += sequence.holds_reached(self.kv.version)
        return sequence

    def abort(self, trajectory: int) -> None:
        """End the trajectory's turn as `aborted`; one in flight ends when its chunk returns."""
        for sequence in self._turns_of.get(trajectory, ()):
            self._abort(sequence)

    @property
    def trajectories(self) -> list[int]:
        """Those whose turn has not ended."""
        return sorted(self._turns_of)

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
        joining, in_flight = self._joining, self._flights.get("prefill", ())
        running = len(self._holdings.able())
        waiting_tokens = 0
        if not self._paused:
            waiting_tokens = self._admission.num_tokens(
                running=running, joining=len(joining), in_flight=len(in_flight)
            )
        self._waited = self._waited + 1 if waiting_tokens else 0
        running += sum(map(self._may_go_on, joining))
        return Proposal(
            rank=rank,
            leader=True,
            decode_rows=min(self._max_running, running),
            waiting_tokens=waiting_tokens,
            waiting_steps=self._waited,
            live_rows=sum(r.stop - r.start for r in in_flight if not r.sequence.aborted),
            idle=not self._turns_of,
            stop=self._stopping,
            hashes=hashes,
        )

    def commit(self) -> list[TurnResult]:
        """The exchange agreed: results become real. Returns the turns that ended."""
        for item in self._provisional:
            self._append(item)
        self._provisional.clear()
        for sequence in self._waiting.aborted + [s for s in self._running if s.aborted]:
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
                self._abort(sequence)
            return Changed(aborted=tuple(sorted(s.request.trajectory for s in here)))
        if mode == "retract":
            for sequence in here:
                if sequence.lease is not None or sequence.num_drawn:
                    sequence.oldest = self.kv.stamp
                    if sequence in self._waiting:
                        self._waiting.changed(sequence)
        outdated = [s for s in here if s not in self._away and self._holdings.is_outdated(s)]
        return Changed(dropped_tokens=sum(map(self._holdings.retract, outdated)))

    def install(self, version: int, *, same: bool) -> None:
        """From here on it is the version, whatever becomes of the turns that are there."""
        self.kv.install(version, same=same)
        self.blocks.oldest = self.kv.oldest_reused
        self._waiting.release()

    def describe_decode(self) -> Description:
        """A row for each that runs and may sample, by trajectory, after making room for it."""
        decoding = self._holdings.able()[: self._max_running]
        for sequence in decoding:
            if sequence in self._running:
                self._holdings.ensure_room(sequence)
        rows = [
            Rows(s, len(s.token_ids) - 1, len(s.token_ids))
            for s in sorted(decoding, key=lambda s: s.request.trajectory)
            if s in self._running
        ]
        self._flights["decode"] = rows
        return describe_rows(rows, ())

    def describe_prefill(self) -> Description:
        """The next chunk: whoever is admitted, until `chunk_tokens` are reached."""
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
        at, stamp = 0, self.kv.stamp
        for rows in flight:
            sequence, num = rows.sequence, rows.stop - rows.start
            if num == 1 and rows.start == sequence.num_computed > 0:
                sequence.compute_next(experts[at], stamp)
            else:
                sequence.compute(rows.start, experts[at : at + num], [stamp] * num)
            at += num
            if work == "prefill":
                sequence.num_prefilled += num
                again = min(rows.stop, sequence.num_forwarded) - rows.start
                self.num_recomputed += max(0, again)
            if rows.stop > sequence.num_forwarded:
                sequence.num_forwarded = rows.stop
            if not rows.samples:
                self._waiting.add(sequence)
                continue
            token = next(samples)
            if sequence.aborted and sequence not in self._running:
                self._waiting.add(sequence)
                continue
            self._hold_back(sequence, token, version, self.kv.number(sequence.weights[0]))

    def depart(self) -> list[Turn]:
        """Those that others shall prefill now, with blocks reserved for their whole context."""
        departing = {
            sequence: Errand(next_block=block, weights=self.kv.stamp)
            for sequence, block in self._admitted()
        }
        self._away.update(departing)
        return list(departing)

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
                self._holdings.discard(sequence)
            self._waiting.add(sequence)
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
            self._waiting.add(rows.sequence)

    @property
    def sampled(self) -> tuple[int, ...]:
        """Trajectories that were given a token which no exchange has agreed to yet."""
        return tuple([item.sequence.request.trajectory for item in self._provisional])

    # ---- inside

    def _hold_back(self, sequence: Turn, drawn: Drawn, version: int, kv_version: int) -> None:
        sequence.draw()
        self._provisional.append(_Provisional(sequence, drawn, version, kv_version))

    def _abort(self, sequence: Turn) -> None:
        sequence.aborted = True
        if sequence in self._waiting:
            self._waiting.changed(sequence)

    def _everyone(self) -> Iterator[Turn]:
        yield from self._waiting
        yield from self._running
        yield from self._away
        for rows in self._flights.get("prefill", ()):
            yield rows.sequence
        yield from self._joining

    def _may_go_on(self, sequence: Turn) -> bool:
        return not (self._paused or sequence.is_held(self.kv.version))

    def _admitted(self) -> Iterator[tuple[Turn, NextBlock | None]]:
        running = len(self._holdings.able())
        return iter(()) if self._paused else self._admission.admitted(running=running)

    @property
    def _joining(self) -> list[Turn]:
        """Those whose first token is provisional: they run from the next commit on, unless they
        have lost their blocks to an update since and wait."""
        running = self._running
        drawn = [item.sequence for item in self._provisional]
        return [s for s in drawn if s not in running and s.lease is not None]

    def _make_way(self) -> None:
        """Turns that are held keep their blocks as long as others can go on without them; once
        nobody can, and somebody could with their blocks, they give them up."""
        if self._paused or self._away or self._flights.get("prefill"):
            return
        while self._running and not self._holdings.any_able and self._admission.is_stuck():
            self._holdings.preempt()

    def _append(self, item: _Provisional) -> None:
        sequence = item.sequence
        sequence.append(item.drawn, version=item.version, kv_version=item.kv_version)
        self._held += sequence.holds_reached(self.kv.version)
        if sequence.lease is not None and sequence not in self._running:
            self._holdings.run(sequence)
        finish = sequence.finish(item.drawn, self._text_of)
        if finish is not None:
            self._finish(sequence, finish)

    def _finish(self, sequence: Turn, finish: str) -> None:
        self._running.pop(sequence, None)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        trajectory = sequence.request.trajectory
        self._turns_of[trajectory].remove(sequence)
        if not self._turns_of[trajectory]:
            del self._turns_of[trajectory]
        self._holdings.give_back(sequence)
        self._results.append(sequence.result(finish))
