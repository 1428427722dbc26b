"""Turns that never cease: so many at a time, each followed by another one."""

from __future__ import annotations

import random
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait

from interlace.rollout import Rollout, Task, Trajectory

_LOOK_S = 0.2


class Load:
    """Asks for turns in a thread of its own from `start` to `stop`."""

    def __init__(self, rollout: Rollout, *, at_once: int, vocab_size: int, seed: int) -> None:
        self.trajectories: list[Trajectory] = []
        self.num_tokens = 0
        self.error: BaseException | None = None
        self._rollout, self._at_once, self._vocab_size = rollout, at_once, vocab_size
        self._random = random.Random(seed)
        self._shared = [self._tokens(70) for _ in range(3)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait for the turns that run. Raises what one of them has raised."""
        self._stopping.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        running: set[Future[Trajectory]] = set()
        try:
            while running or not self._stopping.is_set():
                while len(running) < self._at_once and not self._stopping.is_set():
                    running.add(self._rollout.submit(self._task()))
                done, running = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    trajectory = future.result()
                    self.trajectories.append(trajectory)
                    self.num_tokens += int(trajectory.loss_mask.sum())
        except BaseException as error:
            self.error = error

    def _task(self) -> Task:
        """Half of the prompts begin alike, so that turns share keys and values."""
        start = self._random.choice([*self._shared, [], [], []])
        return Task(
            prompt=[*start, *self._tokens(self._random.randint(4, 90))],
            max_tokens=self._random.randint(8, 72),
        )

    def _tokens(self, num: int) -> list[int]:
        # The first are special, and one of them would end a turn.
        return [self._random.randrange(3, self._vocab_size) for _ in range(num)]
