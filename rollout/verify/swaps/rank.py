"""One rank of four: takes injection after injection, with new communicators for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from interlace.comm.board import SharedBoard, board_bytes
from interlace.comm.communicator import Communicator
from interlace.comm.driver import run_blocking
from interlace.comm.errors import CommunicationError
from interlace.comm.sequencer import Sequencer
from interlace.comm.shared_memory import SharedMemory
from interlace.comm.unsafe import CommunicatorHashes
from interlace.comm.watchdog import Watchdog
from interlace.rollout.config import Launch
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.launch.transport import AMPLE, Groups
from interlace.rollout.messages import LeaderCommand
from interlace.rollout.verify.hazards.hazard import WrongDataError
from interlace.rollout.verify.hazards.small_model import SmallModel
from interlace.rollout.verify.hazards.small_rollout import Size, check_tokens, compose_small, turn

from .injection import MIXED_UP, Foretelling, Injection, Injector, Kind, MixedUp
from .two_strategies import TwoStrategies

WORLD = 4
SIZE = Size(world=WORLD, tp=2)
_NAME_BYTES = 64
_EXCHANGE_S = 20.0
"""On a busy machine. Where it is a hang that is looked for, a ticket's deadline is far shorter."""

Carrier = Literal["window", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A number of injections under one set of circumstances."""

    name: str
    carrier: Carrier
    kinds: tuple[Kind, ...] = ("order",)
    witness: bool = True
    """Without: the control, in which nobody looks at posts."""
    device_slots: int = 0
    timeout_s: float = 20.0
    global_hashes: bool = True
    """Without: each communicator's tickets are hashed without their place among all."""


ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="order, window", carrier="window"),
        Arm(name="order, gloo", carrier="gloo"),
        Arm(name="order, window and serial device", carrier="window", device_slots=1),
        Arm(name="mixed up, window", carrier="window", kinds=MIXED_UP),
        Arm(name="mixed up, gloo", carrier="gloo", kinds=MIXED_UP),
        Arm(name="no witness, window", carrier="window", witness=False),
        Arm(name="no witness, gloo", carrier="gloo", witness=False),
        Arm(
            name="no witness, serial device",
            carrier="window",
            witness=False,
            device_slots=1,
            timeout_s=2.0,
        ),
        Arm(
            name="no witness, mixed up, window",
            carrier="window",
            kinds=MIXED_UP,
            witness=False,
            timeout_s=1.0,
        ),
        Arm(name="in the sequencer, gloo", carrier="gloo", kinds=("in the sequencer",)),
        Arm(
            name="in the sequencer, serial device",
            carrier="window",
            kinds=("in the sequencer",),
            device_slots=1,
            timeout_s=2.0,
        ),
        Arm(
            name="in the sequencer, hashes per communicator, gloo",
            carrier="gloo",
            kinds=("in the sequencer",),
            global_hashes=False,
        ),
        Arm(
            name="in the sequencer, hashes per communicator, window",
            carrier="window",
            kinds=("in the sequencer",),
            global_hashes=False,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one run ended on one rank."""

    rank: int
    epoch: int
    injection: dict[str, Any]
    injected: dict[str, Any] | None
    """On the rank where it was done."""
    step: int
    """Steps this rank had completed."""
    error: str
    """Type and words of what the rank raised itself; empty if it ended in order."""
    verdict: str
    """What all ranks raise then, as their watchdogs have it."""
    seconds: float


class SwappingTransport(ProcessTransport):
    """Its communicators are reached through an injector."""

    def __init__(self, injector: Injector, *, witness: bool, **parts: Any) -> None:
        super().__init__(**parts)
        self._injector = injector
        if not witness:
            vars(self.posts)["admit"] = _admit_anything

    def communicator(
        self, path: str, role: str, groups: Groups, num_bytes: int = AMPLE
    ) -> Communicator:
        return MixedUp(super().communicator(path, role, groups, num_bytes), self._injector)


def _admit_anything(*post: object) -> None: ...


def join(rank: int, folder: str) -> Store:
    """Make the default process group, which outlives all epochs, over the store returned."""
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    return store


def run_once(rank: int, store: Store, arm: Arm, seed: int, epoch: int) -> Ended:
    """One run of a small rollout with an injection into it, over communicators of its own."""
    injection = Injection.draw(seed, epoch, WORLD, arm.kinds)
    injector = Injector(injection if rank == injection.rank else None)
    began_at = time.monotonic()
    launch = Launch(
        kind="torchrun",
        transport=arm.carrier,
        serial_device_slots=arm.device_slots,
        ticket_timeout_s=arm.timeout_s,
        exchange_timeout_s=arm.timeout_s,
        load_timeout_s=arm.timeout_s,
    )
    board = _board(rank)
    error, verdict, step = "", "", 0
    watchdog = Watchdog(board, report=lambda failure: None, exit_after_s=None)
    model = SmallModel if injection.one_strategy else TwoStrategies
    try:
        with (
            SwappingTransport(
                injector,
                witness=arm.witness,
                rank=rank,
                world=WORLD,
                store=store,
                launch=launch,
                epoch=epoch,
            ) as transport,
            watchdog,
        ):
            script = _script(rank)
            small = compose_small(
                transport,
                SIZE,
                script,
                model=model,
                healthy=model,
                sequencer=_sequencer(arm, injector),
                progress=board.record,
                epoch=epoch,
                timeout_s=_EXCHANGE_S,
            )
            try:
                run_blocking(
                    small.engine.run(),
                    park=time.sleep,
                    waiter=transport.waiter,
                    check=watchdog.check,
                    progress=board.record,
                )
                if rank % SIZE.tp == 0:
                    check_tokens(SIZE, script, small.results)
                board.record.left()
            except (CommunicationError, WrongDataError, RuntimeError, ValueError) as caught:
                error = f"{type(caught).__name__}: {caught}"
                verdict = str(watchdog.explain(caught))
                if arm.carrier == "gloo":
                    raise _Abandoned from caught
            finally:
                step = small.engine.state.step
    except _Abandoned:
        pass
    finally:
        board.close()
    return Ended(
        rank=rank,
        epoch=epoch,
        injection={name: getattr(injection, name) for name in Injection.__dataclass_fields__},
        injected=_as_dict(injector.injected),
        step=step,
        error=error,
        verdict=verdict,
        seconds=time.monotonic() - began_at,
    )


class _Abandoned(Exception):
    """Groups with collectives in flight are left as after a failure."""


def _as_dict(record: Any) -> dict[str, Any] | None:
    if record is None:
        return None
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def _sequencer(arm: Arm, injector: Injector) -> type[Sequencer]:
    kinds = (Foretelling,) if arm.global_hashes else (Foretelling, CommunicatorHashes)
    return type("Injected", kinds, {"injector": injector})


def _script(rank: int) -> Sequence[tuple[int, LeaderCommand]]:
    """Turns that keep arriving while others decode, for each of the two leaders."""
    if rank % SIZE.tp:
        return ()
    return [(3 * nth + rank // 2, turn(10 * rank + nth, 5 + nth % 4, 5)) for nth in range(4)]


def _board(rank: int) -> SharedBoard:
    """A new board for this epoch, made by rank 0."""
    size = board_bytes(WORLD)
    board, name = None, ""
    if rank == 0:
        memory = SharedMemory.create(size)
        board, name = SharedBoard(memory, rank=0, world=WORLD), memory.name
    told = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    told[: len(name)] = torch.tensor(list(name.encode()), dtype=torch.uint8)
    dist.broadcast(told, src=0)
    if board is None:
        name = bytes(told.tolist()).rstrip(b"\0").decode()
        board = SharedBoard(SharedMemory.open(name, size), rank=rank, world=WORLD)
    return board
