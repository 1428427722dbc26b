"""Mutations of what bounds environments and the processes they live in."""

from __future__ import annotations

from typing import Any

from tests.complaints.mutation import Function, Mutation


def an_hour(exchange: Function) -> Function:
    return lambda self, host, request, timeout_s: exchange(self, host, request, 3600.0)


def no_deadline(run: Function) -> Function:
    def changed(self: Any, code: str) -> Any:
        self._timeout_s = None
        return run(self, code)

    return changed


def always_to_blame(init: Function) -> Function:
    return lambda self, message, *, idle=False: init(self, message)


def untied(die_with_parent: Function) -> Function:
    return lambda parent, by: None


MUTATIONS = (
    Mutation(
        name="requests to environments have no deadline",
        target="interlace.rollout.environment_room:Room._exchange",
        change=an_hour,
    ),
    Mutation(
        name="code has no deadline",
        target="interlace.envs.python_process:PythonProcess.run",
        change=no_deadline,
    ),
    Mutation(
        name="whoever asks a dead process is to blame",
        target="interlace.envs.host:HostDied.__init__",
        change=always_to_blame,
    ),
    Mutation(
        name="processes outlive their parent",
        target="interlace.envs.lifeline:die_with_parent",
        change=untied,
    ),
)
