"""Rows 4, 6 and 18, over gloo: other sizes, other kinds, and buffers that are used again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.collectives import Collective, Exchange, Gather
from interlace.comm.errors import BufferInFlightError, CommunicationError
from interlace.comm.torch_communicator import TorchCommunicator
from interlace.comm.workspace import Workspace
from interlace.moe.description import Description

from .bare import BareRank, run_bare
from .faulty_model import FaultyModel
from .gloo import join, run_over_gloo
from .hazard import Hazard, Outcome, Processes, RankEnd, WrongDataError, outcome_of
from .small_model import SmallModel
from .small_rollout import Script, turn

SHORT = timedelta(seconds=0.5)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LOPSIDED: Script = {0: [(0, turn(1, 6, 6)), (2, turn(2, 5, 4))], 1: [(0, turn(3, 3, 2))]}
"""Rank 1 has nothing to do for most of the time."""


def another_size(rank: int, size: int, folder: str) -> str:
    """Scheduling ahead leaves rank 1 without tokens, and it goes on to a smaller collective."""
    join(rank, size, folder)
    dtype = torch.int32 if rank else torch.int64
    dist.all_reduce(torch.ones(1, dtype=dtype))
    return "went on"


def killed(ends: Sequence[RankEnd]) -> Outcome:
    for rank, end in enumerate(ends):
        for line in end.stderr.splitlines():
            if end.status == -6 and "op.preamble.length <= op.nbytes" in line:
                what = line[line.index("op.preamble") :]
                evidence = f"rank {rank} ended by signal 6: {what}"
                return Outcome(kind="killed by the transport", evidence=evidence)
    return unexpected(ends)


class AsksForLess(FaultyModel):
    """Without rows it asks for another, smaller collective."""

    def fault(self, nth: int, request: Collective, description: Description) -> Collective | None:
        if description.num_rows:
            return request
        return Gather(role="ep", stage="any tokens?", payload=torch.zeros(1, dtype=torch.int32))


def less_is_refused(rank: int, size: int, folder: str) -> str:
    """Idle steps are right over gloo; another collective is refused before it is posted."""
    right = run_over_gloo(rank, size, f"{folder}/right", LOPSIDED)
    model = AsksForLess if rank else SmallModel
    try:
        run_over_gloo(rank, size, f"{folder}/faulty", LOPSIDED, model=model)
    except CommunicationError as error:
        return f"{right}; then {type(error).__name__}: {error}"
    raise WrongDataError("another collective went unseen")


def refused_alive(ends: Sequence[RankEnd]) -> Outcome:
    said = [end.said for end in ends]
    refused = "OrderError: rank 1: " in said[1] and "asks for Gather ep any tokens?" in said[1]
    if refused and all(end.status == 0 for end in ends) and "Error: " in said[0]:
        return Outcome(kind="right", evidence=f"{said[1]} (and no process died)")
    return unexpected(ends)


def another_kind(rank: int, size: int, folder: str) -> str:
    """The busy rank's graph scatters sums and gathers them; the idle rank's eager layer reduces."""
    join(rank, size, folder)
    group = dist.new_group(timeout=SHORT)
    for _ in range(2):
        if rank == 0:
            shard = torch.ones(4)
            dist.reduce_scatter_tensor(shard, torch.ones(4 * size), group=group)
            _all_gather(torch.empty(4 * size), shard, group=group)
        else:
            dist.all_reduce(torch.ones(4 * size), group=group)
    dist.barrier(group)
    return "went on"


def stuck(ends: Sequence[RankEnd]) -> Outcome:
    """Some rank waited until the deadline of the transport."""
    for rank, end in enumerate(ends):
        last = (end.stderr.splitlines() or [""])[-1]
        if end.status and "Timed out waiting" in last:
            what = last[last.index("Timed out") :]
            return Outcome(kind="timeout", evidence=f"rank {rank}: {what}")
    return unexpected(ends)


def one_program(rank: int, size: int, folder: str) -> str:
    """A rank that never has a row issues what the others issue."""
    script: Script = {0: [(0, turn(1, 6, 6)), (2, turn(2, 5, 4))]}
    return run_over_gloo(rank, size, folder, script)


def all_right(ends: Sequence[RankEnd]) -> Outcome:
    """Every rank came to its end, and all say the same."""
    if all(end.status == 0 for end in ends) and len({end.said for end in ends}) == 1:
        return Outcome(kind="right", evidence=f"over gloo: {ends[0].said}")
    return unexpected(ends)


def reused_input() -> Outcome:
    """The next step's input is written while the copy of this one's is still under way."""

    async def program(rank: BareRank) -> None:
        pinned, end = [0], rank.end("ep")
        for step in range(3):
            pinned[0] = 10 * step + rank.rank
            handle = end.post(Gather(role="ep", stage=f"step {step}", payload=pinned), None)
            pinned[0] = 10 * (step + 1) + rank.rank  # prepared ahead
            answer = await rank.finish("ep", f"step {step}", handle)
            if answer != [[10 * step], [10 * step + 1]]:
                raise WrongDataError(f"step {step} received the inputs {answer}")

    return outcome_of(lambda: str(run_bare(program)))


class ReusesItsInput(FaultyModel):
    """Sends from one buffer per path, for every collective anew."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._buffers: dict[str, torch.Tensor] = {}

    def fault(self, nth: int, request: Collective, description: Description) -> Collective | None:
        return request

    def replaced(self, path: str, request: Collective) -> Collective:
        rows = request.payload
        buffer = self._buffers.setdefault(path, torch.zeros(64, dtype=rows.dtype))[: len(rows)]
        buffer.copy_(rows)
        if isinstance(request, Gather):
            return Gather(role=request.role, stage=request.stage, payload=buffer)
        return Exchange(
            role=request.role,
            stage=request.stage,
            payload=buffer,
            send=request.send,
            recv=request.recv,
        )


def own_until_settled(rank: int, size: int, folder: str) -> str:
    """A forward pass is suspended while its payload travels; a slot in flight is not lent."""
    right = run_over_gloo(rank, size, f"{folder}/right", LOPSIDED, model=ReusesItsInput)
    join(rank, size, f"{folder}/slots")
    workspace = Workspace("decode", lambda num: torch.empty(num, dtype=torch.uint8))
    assert dist.group.WORLD is not None
    communicator = TorchCommunicator(
        dist.group.WORLD, role="ep", workspace=workspace, slots=2, timeout_s=5.0
    )
    requests = [
        Gather(role="ep", stage=f"{nth}", payload=torch.full((2,), 10 * nth + rank))
        for nth in range(3)
    ]
    handles = [communicator.post(request, None) for request in requests[:2]]
    try:
        communicator.post(requests[2], None)
    except BufferInFlightError as error:
        refused = str(error)
    else:
        raise WrongDataError("a slot was lent twice")
    for nth, handle in enumerate(handles):
        answer = torch.cat(communicator.result(handle)).tolist()
        if answer != [10 * nth] * 2 + [10 * nth + 1] * 2:
            raise WrongDataError(f"collective {nth} received {answer}")
    return f"one buffer for all inputs of a path: {right}; a third in two slots: {refused}"


def unexpected(ends: Sequence[RankEnd]) -> Outcome:
    """An outcome that no case expects, with all that the ranks left."""
    listed = [f"rank {n}: {e.status} {e.said} {e.stderr[-300:]}" for n, e in enumerate(ends)]
    return Outcome(kind="error", evidence="; ".join(listed))


HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        row=4,
        url="https://github.com/vllm-project/vllm/pull/28774",
        title="without tokens a rank goes on to a collective of another size",
        how="gloo processes",
        expected="killed by the transport",
        unsafe=Processes(program=another_size, judge=killed),
        ours=Processes(program=less_is_refused, judge=refused_alive),
    ),
    Hazard(
        row=6,
        url="https://github.com/sgl-project/sglang/pull/37933",
        title="an idle rank runs eagerly what the others run as a graph",
        how="gloo processes",
        expected="timeout",
        unsafe=Processes(program=another_kind, judge=stuck),
        ours=Processes(program=one_program, judge=all_right),
    ),
    Hazard(
        row=18,
        url="https://github.com/vllm-project/vllm/pull/54269",
        title="an input buffer is written again while it travels",
        how="gloo processes",
        expected="wrong data",
        unsafe=reused_input,
        ours=Processes(program=own_until_settled, judge=all_right),
    ),
)
