"""What a rollout asks of whatever started its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from interlace.comm.verdict import Diagnosis
from interlace.rollout.environments import HostFactory
from interlace.rollout.messages import Command, Event, WeightsCommand

EventSink = Callable[[Event], None]


class LaunchError(RuntimeError):
    """The ranks of a job could not be started or did not stop; says what was asked and found.

    `diagnosis`: of all ranks, if one of them failed and they had found one another by then.
    """

    def __init__(self, message: str, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class Launcher(Protocol):
    """Starts the ranks and carries messages. Leaves nothing running behind."""

    num_leaders: int
    """Data-parallel groups, each with its own queue."""
    is_driver: bool
    """Whether episodes are played here; with torchrun only rank 0 is."""
    environment_hosts: HostFactory
    """How a process that holds environments is started."""

    def start(self, on_event: EventSink) -> None:
        """Start every rank; returns once all have said RankReady through `on_event`.

        `on_event` is called from any thread. Raises LaunchError; then nothing is left running.
        """
        ...

    def send(self, leader: int, command: Command) -> None:
        """Hand a command to a leader. Never blocks for long."""
        ...

    def tell(self, rank: int, command: WeightsCommand) -> None:
        """Hand a command to a rank, whether it leads or not; for all ranks call it for each, with
        the same object. May take as long as its bytes take."""
        ...

    def stop(self) -> None:
        """Tell every leader to finish and wait until every rank has said its last word.

        Raises LaunchError if one does not in time; then the rest has been ended by force.
        """
        ...

    def kill(self) -> None:
        """End everything at once. Safe to call at any time, also twice."""
        ...
