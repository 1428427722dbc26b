"""Which data-parallel group a trajectory lives on."""

from __future__ import annotations


class Balancer:
    """Least loaded first; trajectories of one task group stay together, as they share a prompt.

    A trajectory keeps its place: its keys and values are there.
    """

    def __init__(self, num_leaders: int, *, slack: int = 4) -> None:
        """`slack`: how many trajectories more than the least loaded a group's place may hold."""
        self._load = [0] * num_leaders
        self._groups: dict[str, int] = {}
        self._slack = slack

    def place(self, group_id: str | None) -> int:
        """The leader for a new trajectory; counts it until `leave`."""
        least = min(range(len(self._load)), key=lambda leader: (self._load[leader], leader))
        leader = least
        if group_id is not None:
            home = self._groups.setdefault(group_id, least)
            if self._load[home] <= self._load[least] + self._slack:
                leader = home
        self._load[leader] += 1
        return leader

    def leave(self, leader: int) -> None:
        self._load[leader] -= 1
