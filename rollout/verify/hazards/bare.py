"""Ranks without a plan: each decides for itself which collective comes next, as in the bugs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from interlace.comm.collectives import Exchange, Gather, finish
from interlace.comm.communicator import Communicator
from interlace.comm.testing import LocalWorld


class BareRank:
    """Collectives by group name, each waited for at once. Nothing checks what meets what."""

    def __init__(self, world: LocalWorld, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        self.rank = rank
        self._world, self._groups = world, groups
        self._ends: dict[str, Communicator] = {}

    async def gather(self, group: str, what: str, payload: Any = None) -> list[Any]:
        """Everybody's payload; `what` is only for the error of a hang."""
        request = Gather(role=group, stage=what, payload=payload)
        answer: list[Any] = await self._perform(request)
        return answer

    async def exchange(
        self, group: str, what: str, rows: list[Any], send: Sequence[int], recv: Sequence[int]
    ) -> list[Any]:
        """Rows to and from every member."""
        counts = {"send": tuple(send), "recv": tuple(recv)}
        answer: list[Any] = await self._perform(
            Exchange(role=group, stage=what, payload=rows, **counts)
        )
        return answer

    async def _perform(self, request: Gather | Exchange) -> Any:
        handle = self.end(request.role).post(request, None)
        return await self.finish(request.role, request.stage, handle)

    async def finish(self, group: str, what: str, handle: Any) -> Any:
        """The result of what was posted at this rank's end of the group."""
        return await finish(self.end(group), handle, f"rank {self.rank} in {group}: {what}")

    def end(self, group: str) -> Communicator:
        """This rank's end of the group named so; all ranks, where no others are named."""
        if group not in self._ends:
            members = self._groups.get(group, range(self._world.size))
            self._ends[group] = self._world.communicator(group, members, self.rank)
        return self._ends[group]


Program = Callable[[BareRank], Coroutine[Any, Any, Any]]


def run_bare(
    program: Program,
    *,
    size: int = 2,
    groups: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    **world: Any,
) -> list[Any]:
    """What the program returned on each rank; DeadlockError names every rank's wait.

    Payloads are passed on as they are, without a copy; headers are not checked, as nobody does.
    """
    options: dict[str, Any] = {"copy": lambda part: part, "verify": False, **world}
    local = LocalWorld(size, split=_split, concat=_concat, seed=seed, **options)
    ranks = [BareRank(local, rank, groups or {}) for rank in range(size)]
    return local.run([program(rank) for rank in ranks])


def _split(rows: list[Any], counts: Sequence[int]) -> list[list[Any]]:
    left = list(rows)
    return [[left.pop(0) for _ in range(count)] for count in counts]


def _concat(parts: Sequence[list[Any]]) -> list[Any]:
    return [row for part in parts for row in part]
