"""Commands on their way to a rank: to its loop, or to the thread that takes in weights."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .messages import Command, LeaderCommand, WeightsCommand

_LONGEST_S = 1.0


class Inbox:
    """Filled from any thread, emptied by the rank's loop once a step."""

    def __init__(self) -> None:
        self._commands: list[LeaderCommand] = []
        self._weights: deque[WeightsCommand] = deque()
        self._roused = False
        self._told: Callable[[], None] = _nobody
        lock = threading.RLock()
        self._stirred, self._weights_stirred = threading.Condition(lock), threading.Condition(lock)

    def put(self, command: Command) -> None:
        with self._stirred:
            if isinstance(command, WeightsCommand):
                self._weights.append(command)
                self._weights_stirred.notify_all()
            else:
                self._commands.append(command)
                self._stirred.notify_all()
                self._told()

    def tell(self, whom: Callable[[], None]) -> None:
        """Call this, too, whenever something for the loop has arrived."""
        self._told = whom

    @property
    def has_commands(self) -> bool:
        """Whether something for the loop waits to be taken."""
        return bool(self._commands)

    def drain(self) -> list[LeaderCommand]:
        """Everything that has arrived for the loop, in order of arrival."""
        with self._stirred:
            commands, self._commands = self._commands, []
        return commands

    def wait(self, seconds: float) -> None:
        """Sleep until something is there for the loop, at most so long."""
        with self._stirred:
            if not self._commands:
                self._stirred.wait(seconds)

    def take_weights(self) -> WeightsCommand | None:
        """The next command about weights, in order of arrival; waits a while for one."""
        with self._stirred:
            if not self._weights and not self._roused:
                self._weights_stirred.wait(_LONGEST_S)
            self._roused = False
            return self._weights.popleft() if self._weights else None

    @property
    def has_weights(self) -> bool:
        """Whether a command about weights waits to be taken."""
        return bool(self._weights)

    def rouse(self) -> None:
        """Let who waits in `take_weights`, or is about to, go on without any."""
        with self._stirred:
            self._roused = True
            self._weights_stirred.notify_all()


def _nobody() -> None:
    pass
