"""Whose time it is: every moment of a thread belongs to one part, the innermost that has begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from interlace.comm.collectives import perform

REST = "Python"
"""What no part claims: the loop, the sequencer, the glue of a forward pass."""


class Stopwatch:
    """CPU time of one thread by part, and wall time of the parts in which it waits."""

    def __init__(self) -> None:
        self._stack = [REST]
        self._since = time.thread_time_ns()
        self.switch_s = self._cost_of_a_switch()
        self.take()

    def take(self) -> tuple[dict[str, float], float]:
        """Seconds by part and seconds waited since the last call, less the watch's own."""
        self._charge()
        parts, waited_s = self._parts, self._waited_ns * 1e-9
        seconds = {part: ns * 1e-9 for part, ns in parts.items()}
        seconds[REST] = max(0.0, seconds.get(REST, 0.0) - self._switches * self.switch_s)
        self._reset()
        return seconds, waited_s

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; the time in it is the part's."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def of_steps(self, part: str, function: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        """The same for a coroutine function: its steps are the part's, its suspensions are not."""

        async def timed(*args: Any, **kwargs: Any) -> Any:
            coroutine, answer = function(*args, **kwargs), None
            while True:
                self._enter(part)
                try:
                    request = coroutine.send(answer)
                except StopIteration as stop:
                    return stop.value
                finally:
                    self._leave()
                answer = await perform(request)

        return timed

    def of_parts(
        self,
        part: str,
        function: Callable[..., Any],
        spent: Callable[..., dict[str, float]],
    ) -> Callable[..., Any]:
        """The same function, of whose time `spent` says, with its arguments, how many seconds other
        parts have had so far."""

        def timed(*args: Any) -> Any:
            before = spent(*args)
            began_ns = time.perf_counter_ns()
            self._enter(part)
            try:
                return function(*args)
            finally:
                self._leave()
                wall_ns = time.perf_counter_ns() - began_ns
                for name, seconds in spent(*args).items():
                    ns = round((seconds - before[name]) * 1e9)
                    self._parts[name] = self._parts.get(name, 0) + ns
                    self._parts[part] -= ns
                    wall_ns -= ns
                self._waited_ns += wall_ns

        return timed

    def of_waits(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; besides, its wall time is waiting."""
        timed = self.of(part, function)

        def waits(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.perf_counter_ns()
            try:
                return timed(*args, **kwargs)
            finally:
                self._waited_ns += time.perf_counter_ns() - began_ns

        return waits

    def _enter(self, part: str) -> None:
        self._charge()
        self._stack.append(part)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now, part = time.thread_time_ns(), self._stack[-1]
        self._parts[part] = self._parts.get(part, 0) + now - self._since
        self._since = now
        self._switches += 1

    def _reset(self) -> None:
        self._parts: dict[str, int] = {}
        self._switches, self._waited_ns = 0, 0

    def _cost_of_a_switch(self) -> float:
        """The least of some tries, so that no more is taken off than there was."""
        self._reset()
        nothing = self.of(REST, lambda: None)
        tries = []
        for _ in range(20):
            began_ns = time.thread_time_ns()
            for _ in range(200):
                nothing()
            tries.append((time.thread_time_ns() - began_ns) * 1e-9 / 400)
        return min(tries)
