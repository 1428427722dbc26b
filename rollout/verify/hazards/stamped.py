"""Ranks that step through shipped plans; every message says what it is, and is checked by hand.

Agreement, plan, sequencer and transport are the shipped ones; forward passes only gather, in the
program of their path. What a test would find in a wrong number a stamp says in words.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from interlace.comm.agreement import agree
from interlace.comm.collectives import Forward, Gather, perform
from interlace.comm.communicator import Communicator
from interlace.comm.journal import Journal
from interlace.comm.path import Op, Path
from interlace.comm.plan import Mode, PlanConfig, PlanState, StepPlan
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer
from interlace.comm.testing import LocalWorld
from interlace.comm.waiter import SleepWaiter
from interlace.comm.window_channel import ByteCommunicator, WindowChannel
from interlace.comm.window_layout import window_bytes
from interlace.comm.window_reference import Window

from .hazard import WrongDataError

SLOTS, CAPACITY = 2, 256
NUM_OURS = 6
"""Schedules a case of ours runs in: each is a run of several steps."""

BUSY: Mapping[str, Any] = {
    "decode_rows": 2,
    "waiting_tokens": 8,
    "waiting_steps": 1,
    "live_rows": 8,
    "idle": False,
}
"""What a rank proposes that decodes and has more to prefill."""

Numbers = Callable[[int, int], Mapping[str, Any]]
"""(step, rank) -> what the rank proposes."""


def always(**numbers: Any) -> Numbers:
    """Every rank proposes the same in every step: busy, but for what is given."""
    return lambda step, rank: {**BUSY, **numbers}


def gathering(
    name: str,
    groups: Mapping[str, tuple[tuple[int, ...], ...]],
    *,
    work: str,
    num_layers: int = 3,
) -> Path:
    """A path whose program gathers over each of its groups in every layer; decode is whole."""
    program = tuple(
        Op(kind="Gather", role=role, stage=f"{layer}.{role}")
        for layer in range(num_layers)
        for role in groups
    )
    return Path(name=name, groups=groups, program=program, whole=work == "decode", work=(work,))


def two_paths(ranks: int = 2, *, num_layers: int = 3) -> tuple[Path, ...]:
    """Decode and prefill over all ranks."""
    groups = {"ep": (tuple(range(ranks)),)}
    return tuple(
        gathering(name, groups, work=name, num_layers=num_layers) for name in ("decode", "prefill")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Which forward pass of a path a message belongs to."""

    nth: int
    version: int

    def message(self, path: str, index: int, rank: int) -> bytes:
        """Its size changes from one collective to the next."""
        key = f"{path} {self.nth} {self.version} {index} {rank}".encode()
        return struct.pack("<I", zlib.crc32(key)) * (1 + (self.nth + index) % 7)


async def stamped(path: Path, rank: int, stamp: Stamp) -> None:
    """One forward pass. WrongDataError for an answer that is another collective's."""
    for index, op in enumerate(path.program):
        payload = stamp.message(path.name, index, rank)
        answers = await perform(Gather(role=op.role, stage=op.stage, payload=payload))
        members = path.group_of(op.role, rank)
        for member, answer in zip(members, answers, strict=True):
            if bytes(answer) != stamp.message(path.name, index, member):
                raise WrongDataError(
                    f"rank {rank}: {path.name} {op.stage} of pass {stamp.nth} reads "
                    f"{bytes(answer).hex()} from rank {member}, who sent another message"
                )


MakeForward = Callable[[Path, int, Stamp], Forward]
"""(path, rank, stamp) -> the forward pass."""
Install = Callable[[int, int, int], None]
"""(step, rank, version that the plan says to install, or 0), after each step."""


class StampedRank:
    """One rank: propose, agree, walk."""

    def __init__(
        self,
        rank: int,
        config: PlanConfig,
        communicators: Mapping[tuple[str, str], Communicator],
        control: Communicator,
    ) -> None:
        self.plans: list[StepPlan] = []
        self._rank, self._config, self._control = rank, config, control
        self._paths = {path.name: path for path in config.paths if rank in path.members}
        self._sequencer = Sequencer(
            rank=rank,
            paths=config.paths,
            communicators=communicators,
            around=lambda path: nullcontext(),
            clock=itertools.count().__next__,
            journal=Journal(),
        )

    async def run(
        self, numbers: Numbers, num_steps: int, forward: MakeForward, install: Install
    ) -> None:
        """`num_steps` steps, or until the ranks agree to stop."""
        state, sequencer = PlanState(), self._sequencer
        num_started = dict.fromkeys(self._paths, 0)
        try:
            while state.step < num_steps:
                proposal = Proposal(
                    rank=self._rank,
                    leader=True,
                    hashes=sequencer.hashes,
                    **numbers(state.step, self._rank),
                )
                agreed = await agree(self._control, state, proposal, self._config, sequencer.keys)
                plan = agreed.plan
                self.plans.append(plan)
                if plan.stop:
                    return
                started = {}
                for name in plan.start:
                    if name in self._paths:
                        stamp = Stamp(nth=num_started[name], version=plan.version)
                        started[name] = forward(self._paths[name], self._rank, stamp)
                        num_started[name] += 1
                await sequencer.walk(plan, started)
                install(plan.step, self._rank, plan.update)
                state = plan.after
        finally:
            sequencer.close()


def run_stamped(
    *,
    numbers: Numbers | None = None,
    ranks: int = 2,
    paths: Sequence[Path] | None = None,
    mode: Mode = "multiplexed",
    num_steps: int = 8,
    seed: int = 0,
    window: bool = False,
    forward: MakeForward = stamped,
    install: Install = lambda step, rank, version: None,
    **world: Any,
) -> list[StepPlan]:
    """Run all ranks in one schedule and return the plans they agreed on.

    `window` moves messages through windows in memory; otherwise `world` says how the LocalWorld
    does it. Raises WrongDataError for a wrong message or a slot written over, DeadlockError if
    nothing can move.
    """
    config = PlanConfig(paths=tuple(paths or two_paths(ranks)), mode=mode, slots=SLOTS)
    local = LocalWorld(
        ranks, split=_rows, concat=_rows, copy=lambda part: part, seed=seed, slots=SLOTS, **world
    )
    ends = _windows(config.paths) if window else _locals(config.paths, local)
    members = [
        StampedRank(
            rank,
            config,
            {(name, role): end for (name, role, who), end in ends.items() if who == rank},
            local.communicator("control", range(ranks), rank),
        )
        for rank in range(ranks)
    ]
    local.run([rank.run(numbers or always(), num_steps, forward, install) for rank in members])
    if local.violations:
        raise WrongDataError(local.violations[0])
    return members[0].plans


Ends = dict[tuple[str, str, int], Communicator]
"""(path, role, rank) -> that rank's end."""


def _locals(paths: Sequence[Path], local: LocalWorld) -> Ends:
    return {
        (path.name, role, rank): local.communicator((path.name, role), members, rank)
        for path in paths
        for role, partition in path.groups.items()
        for members in partition
        for rank in members
    }


def _windows(paths: Sequence[Path]) -> Ends:
    ends: Ends = {}
    for path in paths:
        for role, partition in path.groups.items():
            for members in partition:
                size = window_bytes(len(members), SLOTS, CAPACITY)
                memories = [bytearray(size) for _ in members]
                for rank in members:
                    ends[path.name, role, rank] = window_end(
                        path.name, role, members, rank, memories
                    )
    return ends


def window_end(
    path: str, role: str, members: Sequence[int], rank: int, memories: Sequence[bytearray]
) -> ByteCommunicator:
    """This rank's end of a window in memory, as it is shipped but for its language."""
    window = Window(
        memories,
        list(members).index(rank),
        SLOTS,
        CAPACITY,
        zlib.crc32(path.encode()),
        zlib.crc32(role.encode()),
        clock=_no_time,
    )
    channel = WindowChannel(
        window,
        path=path,
        role=role,
        members=members,
        rank=rank,
        slots=SLOTS,
        capacity=CAPACITY,
        timeout_s=0.0,
        waiter=_Waiter(),
        clock=_no_time,
    )
    return ByteCommunicator(channel)


class _Waiter(SleepWaiter):
    """Never asked to wait: the world takes a result only once it is there."""

    def due(self, at_ns: int) -> None: ...


def _no_time() -> int:
    return 0


def _rows(*_: Any) -> Any:
    raise AssertionError("stamped forward passes only gather")
