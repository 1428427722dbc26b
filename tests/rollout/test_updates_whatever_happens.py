"""A leader's queues and blocks under every kind of event, in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.rollout.cells import turn
from tests.rollout.one_side import OneSide

from interlace.rollout.kv_versions import Reuse
from interlace.rollout.messages import UpdateMode

MODES: tuple[UpdateMode, ...] = ("keep", "retract", "abort", "same")
FAR = 3
"""No hold is for a version that is further ahead."""


class Leader(RuleBasedStateMachine):
    """Tokens, versions and ages are checked with each result, blocks after each step."""

    @initialize(
        blocks=st.integers(10, 24),
        chunk=st.integers(1, 12),
        running=st.integers(1, 4),
        reuse=st.sampled_from(("current", "stale")),
        max_staleness=st.sampled_from((None, 0, 1)),
        seed=st.integers(0, 3),
    )
    def begin(self, reuse: Reuse, **options: Any) -> None:
        self.side = OneSide(reuse=reuse, **options)
        self.submitted = 0
        self.paused = False

    @rule(
        length=st.integers(1, 24),
        num=st.integers(1, 10),
        shared=st.booleans(),
        hold=st.none() | st.tuples(st.integers(0, 6), st.integers(1, FAR)),
    )
    def submit(self, length: int, num: int, shared: bool, hold: tuple[int, int] | None) -> None:
        number = self.submitted
        first = 0 if shared else 10 + number % 20
        holds = [] if hold is None else [(hold[0], self.side.version + hold[1])]
        self.side.submit(turn(number, [first, *range(1, length)], num, holds=holds))
        self.submitted += 1

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.side.step()

    @rule(mode=st.sampled_from(MODES), ahead=st.integers(1, 2))
    def update(self, mode: UpdateMode, ahead: int) -> None:
        self.side.update(mode, self.side.version + ahead)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.submitted:
            self.side.abort(data.draw(st.integers(0, self.submitted - 1)))

    @rule()
    def drop(self) -> None:
        """Nobody in the chunk that is in flight is wanted: the next step drops it."""
        for rows in self.side.scheduler._flights.get("prefill", ()):
            self.side.abort(rows.sequence.request.trajectory)
        self.side.step()

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        (self.side.scheduler.pause if self.paused else self.side.scheduler.resume)()

    @invariant()
    def each_hold_is_told_once(self) -> None:
        if hasattr(self, "side"):
            told = [(held.trajectory, held.version) for held in self.side.held]
            assert len(set(told)) == len(told)

    def teardown(self) -> None:
        if not hasattr(self, "side"):
            return
        side, scheduler = self.side, self.side.scheduler
        scheduler.resume()
        self.run_out()
        for sequence in scheduler._everyone():
            assert sequence.is_held(side.version), "it stands still for no reason"
        side.update("keep", side.version + FAR)
        self.run_out()
        assert sorted(r.trajectory for r in side.results) == list(range(self.submitted))
        blocks = scheduler.blocks
        assert blocks.num_available == blocks.num_blocks
        assert scheduler.propose(rank=0, hashes=()).idle

    def run_out(self) -> None:
        for _ in range(1000):
            if not (self.side.step() or self.side.step()):
                return
        raise AssertionError("no end after 1000 steps")


class TestALeaderLosesNothing(Leader.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

    pytestmark = pytest.mark.slow
