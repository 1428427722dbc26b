"""One seed: many ranks of the shipped engine in one process, and what must be true of the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from interlace.comm.communicator import Communicator
from interlace.comm.interleaving import Poison
from interlace.comm.journal import Journal
from interlace.comm.plan import PlanConfig
from interlace.comm.sequencer import Sequencer
from interlace.comm.testing import LocalWorld
from interlace.comm.virtual_clock import VirtualClock
from interlace.moe.context import PathContext
from interlace.moe.model import Model
from interlace.moe.sampling_params import SamplingParams
from interlace.moe.weights import Weights
from interlace.rollout.block_manager import BlockManager
from interlace.rollout.engine import Engine
from interlace.rollout.inbox import Inbox
from interlace.rollout.messages import Abort, Event, Stop, TurnRequest, TurnResult
from interlace.rollout.scheduler import Scheduler

from .memory import Delay, SimulatedWindows
from .ranks import Book, OnTicket, ToyFollower, ToyLeader, ToyUpdates, Watch
from .scenario import Scenario, Turn
from .toy_model import STOP_TOKEN, ToyModel, ToyWeights
from .violation import Violation

Ends = Mapping[tuple[str, str], Communicator]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Which classes a simulated rank is made of. The defaults are what is shipped; a mutant puts
    one of its own in their place."""

    engine: type[Engine] = Engine
    sequencer: type[Sequencer] = Sequencer
    scheduler: type[Scheduler] = Scheduler
    leader: type[ToyLeader] = ToyLeader
    follower: type[ToyFollower] = ToyFollower
    updates: type[ToyUpdates] = ToyUpdates
    model: type[ToyModel] = ToyModel
    config: Callable[[PlanConfig], PlanConfig] = lambda config: config
    communicators: Callable[[Simulation, int, Ends], Ends] = lambda _, __, ends: ends
    control: Callable[[Simulation, int, Communicator], Communicator] = lambda _, __, end: end
    verify: bool = True
    """Whether headers are compared."""
    any_epoch: bool = False
    """Whether a window takes messages of other epochs for its own."""


@dataclass(slots=True)
class _Trajectory:
    """A trajectory as its environment sees it: one turn after the other."""

    turns: tuple[Turn, ...]
    nth: int = 0
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False


class Simulation:
    """All ranks of one scenario, ready to run once.

    With the `windows` of an earlier simulation they still hold what that one left in them.
    `delay(sender, receiver)` takes the place of the scenario's.
    """

    def __init__(
        self,
        scenario: Scenario,
        wiring: Wiring | None = None,
        *,
        on_ticket: OnTicket | None = None,
        on_posted: OnTicket | None = None,
        windows: SimulatedWindows | None = None,
        delay: Delay = None,
        epoch: int = 0,
    ) -> None:
        self.scenario, self.wiring = scenario, wiring or Wiring()
        self.clock = VirtualClock()
        draw = random.Random(scenario.seed ^ epoch << 40 ^ 0x5EED)
        delay = delay or _delay(scenario, draw)
        self.world = LocalWorld(
            scenario.world,
            split=_split,
            concat=b"".join,
            copy=bytes,
            seed=draw.getrandbits(48),
            slots=scenario.slots,
            serial_slots=0 if scenario.window else scenario.serial_slots,
            speeds=scenario.speeds,
            clock=self.clock,
            delay=delay,
            verify=self.wiring.verify,
        )
        self.windows = windows or SimulatedWindows(scenario.slots)
        self.windows.begin(self.clock, delay, epoch, any_epoch=self.wiring.any_epoch)
        self.epoch = epoch
        self.book = Book(scenario.world)
        self.config = self.wiring.config(scenario.plan_config())
        self.inboxes = {leader: Inbox() for leader in scenario.leaders}
        self.requests: list[TurnRequest] = []
        self.aborted = {trajectory for _, _, trajectory in scenario.aborts}
        """Trajectories for which an abort was or will be sent."""
        self._trajectories = [_Trajectory(turns) for turns in scenario.turns]
        self.schedulers: dict[int, Scheduler] = {}
        self.sequencers: list[Sequencer] = []
        self.updates: list[ToyUpdates] = []
        self._on = on_ticket, on_posted
        self.engines = [self._rank(rank) for rank in range(scenario.world)]
        self._put_off()

    def run(self, poison: Poison | None = None) -> None:
        """To the end; raises what a rank raises, or a DeadlockError."""
        self.world.run([engine.run() for engine in self.engines], poison=poison)

    @property
    def unasked(self) -> list[int]:
        """Trajectories some of whose turns were never asked for, though nobody aborted them."""
        return [
            nth
            for nth, it in enumerate(self._trajectories)
            if it.nth < len(it.turns) and not it.aborted
        ]

    @property
    def trace(self) -> bytes:
        """The rank of every resume."""
        running = self.world.running
        return bytes(running.trace) if running is not None else b""

    # ---- putting the ranks together

    def _rank(self, rank: int) -> Engine:
        scenario, wiring, paths = self.scenario, self.wiring, self.config.paths
        ends: Ends = {
            (path.name, role): self.end((path.name, role), path.group_of(role, rank), rank)
            for path in paths
            for role in sorted(path.groups)
        }
        weights = ToyWeights()
        cells = scenario.num_blocks * scenario.block_size
        kv = [[0] * cells for _ in range(scenario.layers)]
        contexts = {path.name: scenario.context(path.name, rank, kv, self.epoch) for path in paths}
        sequencer = wiring.sequencer(
            rank=rank,
            paths=paths,
            communicators=wiring.communicators(self, rank, ends),
            around=lambda _: nullcontext(),
            clock=self.clock,
            journal=Journal(),
            progress=Watch(self.book, rank, *self._on),
        )
        updates = wiring.updates(self.book, rank, weights)
        self.sequencers.append(sequencer)
        self.updates.append(updates)
        everybody = tuple(range(scenario.world))
        return wiring.engine(
            rank=rank,
            config=self.config,
            sequencer=sequencer,
            control=wiring.control(self, rank, self.end(("control", ""), everybody, rank)),
            model=cast(Model, wiring.model(scenario.layers)),
            weights=cast(Weights, weights),
            contexts=cast(Mapping[str, PathContext], contexts),
            part=self._part(rank),
            chunk_tokens=scenario.chunk_tokens,
            clock=self.clock,
            epoch=self.epoch,
            updates=updates,
        )

    def end(self, key: tuple[str, str], members: tuple[int, ...], rank: int) -> Communicator:
        """This rank's end of a communicator, over what the scenario says."""
        if self.scenario.window:
            return self.windows.end(key, members, rank)
        return self.world.communicator(key, members, rank)

    def _part(self, rank: int) -> ToyLeader | ToyFollower:
        scenario = self.scenario
        group = next(group for group in scenario.tp_groups() if rank in group)
        followers = self.end(("group", ""), group, rank) if len(group) > 1 else None
        if rank not in self.inboxes:
            return self.wiring.follower(book=self.book, rank=rank, leader=followers)
        scheduler = self.schedulers[rank] = self.wiring.scheduler(
            blocks=BlockManager(num_blocks=scenario.num_blocks, block_size=scenario.block_size),
            chunk_tokens=scenario.chunk_tokens,
            max_running=scenario.max_running,
            max_context=10_000,
            expert_shape=(scenario.layers, 1),
            text_of=lambda _: "",
        )
        return self.wiring.leader(
            book=self.book,
            rank=rank,
            paths={path.name: path for path in self.config.paths},
            scheduler=scheduler,
            inbox=self.inboxes[rank],
            emit=self._emitted,
            followers=followers,
        )

    # ---- what comes from outside

    def _put_off(self) -> None:
        clock = self.clock
        for trajectory in self._trajectories:
            clock.at(trajectory.turns[0].at, lambda it=trajectory: self._ask(it))  # type: ignore[misc]
        for tick, leader, number in self.scenario.aborts:
            clock.at(tick, lambda to=leader, it=number: self._abort(to, it))  # type: ignore[misc]
        for version, ticks in enumerate(self.scenario.updates, start=1):
            for rank, tick in enumerate(ticks):
                clock.at(tick, lambda to=rank, it=version: self._hold(to, it))  # type: ignore[misc]

    def ask(self, turn: Turn) -> None:
        """A turn that no scenario knew of is asked for now, as a trajectory of its own."""
        self._trajectories.append(_Trajectory((turn,)))
        self._ask(self._trajectories[-1])

    def _ask(self, trajectory: _Trajectory) -> None:
        turn = trajectory.turns[trajectory.nth]
        trajectory.tokens += turn.prompt
        request = TurnRequest(
            trajectory=turn.trajectory,
            turn=trajectory.nth,
            token_ids=list(trajectory.tokens),
            seed=0,
            experts_from=0,
            sampling=SamplingParams(max_tokens=turn.max_tokens, stop_token_ids=(STOP_TOKEN,)),
        )
        trajectory.nth += 1
        self.requests.append(request)
        self.inboxes[turn.leader].put(request)
        if not self.unasked:
            self._stop()

    def _abort(self, leader: int, number: int) -> None:
        self.inboxes[leader].put(Abort(trajectory=number))

    def _hold(self, rank: int, version: int) -> None:
        self.updates[rank].newest = max(self.updates[rank].newest, version)

    def _emitted(self, event: Event) -> None:
        if not isinstance(event, TurnResult):
            raise Violation(f"a rank told {event}")
        self.book.results.append(event)
        trajectory = self._trajectories[event.trajectory]
        trajectory.tokens += event.token_ids
        if event.finish == "aborted":
            trajectory.aborted = True
            if not self.unasked:
                self._stop()
        elif trajectory.nth < len(trajectory.turns):
            tick = self.clock.now + trajectory.turns[trajectory.nth].at
            self.clock.at(tick, lambda: self._ask(trajectory))

    def _stop(self) -> None:
        """Tell all leaders that no more will come; whoever asks by hand does so himself."""
        if not self.scenario.turns:
            return
        for rank, inbox in self.inboxes.items():
            self.clock.at(self.clock.now + 7 * (rank % 5), lambda to=inbox: to.put(Stop()))  # type: ignore[misc]


def _delay(scenario: Scenario, draw: random.Random) -> Callable[[int, int], int] | None:
    delays = scenario.delays
    if not delays:
        return None
    random_of, num = random.Random(draw.getrandbits(48)).random, len(delays)
    return lambda sender, receiver: delays[int(random_of() * num)]


def _split(payload: bytes, counts: Any) -> list[bytes]:
    parts, at = [], 0
    for count in counts:
        parts.append(payload[at : at + count])
        at += count
    return parts
