"""Commands on their way to a rank's loop."""

from __future__ import annotations

import threading

from .messages import Command


class Inbox:
    """Filled from any thread, emptied by the rank's loop once a step."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._stirred = threading.Condition()

    def put(self, command: Command) -> None:
        with self._stirred:
            self._commands.append(command)
            self._stirred.notify_all()

    def drain(self) -> list[Command]:
        """Everything that has arrived, in order of arrival."""
        with self._stirred:
            commands, self._commands = self._commands, []
        return commands

    def wait(self, seconds: float) -> None:
        """Sleep until something is there, at most so long."""
        with self._stirred:
            if not self._commands:
                self._stirred.wait(seconds)
