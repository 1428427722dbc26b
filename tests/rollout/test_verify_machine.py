"""A machine of hypothesis drives agreement, plan, sequencer and window by small moves.

Where the simulation draws whole scenarios, this looks for the shortest script that breaks a promise
and shrinks it: one move a line.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from interlace.comm.collectives import Finish
from interlace.comm.interleaving import NOTHING, answer, first_ready
from interlace.rollout.messages import Abort, Stop
from interlace.rollout.verify.mutants import CommitsEarly
from interlace.rollout.verify.properties import check, one_order, one_plan
from interlace.rollout.verify.scenario import Scenario, Turn
from interlace.rollout.verify.simulation import Simulation, Wiring
from interlace.rollout.verify.violation import Violation

RANKS, MOST_TURNS, MOST_VERSIONS = 2, 4, 3
RANK = st.integers(0, RANKS - 1)


def world(window: bool) -> Scenario:
    """Two ranks, each its own leader; nothing happens but what the machine makes happen."""
    return Scenario(
        seed=0,
        world=RANKS,
        tp=1,
        layers=1,
        mode="multiplexed",
        strategies=("fixed", "all_to_all"),
        halves=False,
        slots=2,
        serial_slots=0 if window else 1,
        window=window,
        chunk_tokens=4,
        chunk_steps=3,
        start_tokens=1,
        max_running=3,
        num_blocks=24,
        block_size=2,
        speeds=(1,) * RANKS,
        delays=(),
        turns=(),
        aborts=(),
        updates=(),
    )


class Machine(RuleBasedStateMachine):
    """Moves: a turn arrives, is aborted, a version is held, a rank goes on, a message is late."""

    window = True
    wiring = Wiring()

    def __init__(self) -> None:
        super().__init__()
        self.late: list[int] = []
        self.run = Simulation(
            world(self.window),
            self.wiring,
            delay=lambda sender, receiver: self.late.pop() if self.late else 0,
        )
        self.ranks = [engine.run() for engine in self.run.engines]
        self.asked: dict[int, Any] = dict.fromkeys(range(RANKS))
        self.num_turns, self.held, self.broken = 0, [0] * RANKS, False

    @precondition(lambda self: self.num_turns < MOST_TURNS)
    @rule(leader=RANK, num=st.integers(1, 6), max_tokens=st.integers(1, 4))
    def arrive(self, leader: int, num: int, max_tokens: int) -> None:
        turn = Turn(
            leader=leader,
            trajectory=self.num_turns,
            at=0,
            prompt=tuple(range(1, num + 1)),
            max_tokens=max_tokens,
        )
        self.run.ask(turn)
        self.num_turns += 1

    @precondition(lambda self: self.num_turns)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.integers(0, self.num_turns - 1))
        self.run.aborted.add(trajectory)
        for inbox in self.run.inboxes.values():
            inbox.put(Abort(trajectory=trajectory))

    @rule(rank=RANK)
    def hold_a_version(self, rank: int) -> None:
        self.held[rank] = min(self.held[rank] + 1, MOST_VERSIONS)
        self.run.updates[rank].newest = self.held[rank]

    @rule(ticks=st.integers(1, 30))
    def be_late(self, ticks: int) -> None:
        self.late.append(ticks)

    @rule(rank=RANK, num=st.integers(1, 12))
    def go_on(self, rank: int, num: int) -> None:
        for _ in range(num):
            self.step(rank)

    def step(self, rank: int) -> bool:
        """One resume, if the rank can go on."""
        self.run.clock.tick()
        ready = first_ready(self.asked[rank]) if rank in self.asked else NOTHING
        if ready == NOTHING:
            return False
        request = self.asked.pop(rank)
        value = answer(request, ready) if isinstance(request, Finish) else None
        self.broken = True  # unless it comes back
        with suppress(StopIteration):
            self.asked[rank] = self.ranks[rank].send(value)
        self.broken = False
        return True

    @invariant()
    def plans_and_tickets_agree_as_far_as_they_go(self) -> None:
        shortest = min(map(len, self.run.book.tickets))
        first, *others = (tickets[:shortest] for tickets in self.run.book.tickets)
        assert all(tickets == first for tickets in others)

    def teardown(self) -> None:
        """Whatever was done: everything ends, and all of it right."""
        try:
            if self.broken:
                return
            for inbox in self.run.inboxes.values():
                inbox.put(Stop())
            self.late.clear()
            rounds = 0  # in a row in which nothing moved: what is late is there in the next
            while self.asked:
                moved = [self.step(rank) for rank in list(self.asked)]
                rounds = 0 if any(moved) or self.run.clock.jump() else rounds + 1
                assert rounds < 3, "nothing can move"
            one_order(self.run)
            one_plan(self.run)
            check(self.run)
        finally:
            for rank in self.ranks:
                rank.close()


class MachineOnASerialDevice(Machine):
    window = False


class MachineThatCommitsEarly(Machine):
    wiring = Wiring(leader=CommitsEarly)


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestOverTheWindow = pytest.mark.slow(Machine.TestCase)
TestOverTheWindow.settings = SETTINGS
TestOnASerialDevice = pytest.mark.slow(MachineOnASerialDevice.TestCase)
TestOnASerialDevice.settings = SETTINGS


@pytest.mark.slow
def test_the_machine_finds_a_commit_before_agreement() -> None:
    once = settings(SETTINGS, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(Violation, match="before all ranks have agreed"):
        run_state_machine_as_test(MachineThatCommitsEarly, settings=once)
