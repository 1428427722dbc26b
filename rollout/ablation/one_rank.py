"""One rank's loop in this process, stepped by its caller: an engine without collector and launcher.

For checks of a device, where the fewer parts there are, the better. Turns have the lengths they are
told to have and follow each other at once; texts are drawn from seeds.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from interlace.comm.driver import run_blocking
from interlace.moe.config import read_config
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.config import RolloutConfig
from interlace.rollout.figures import Records
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import blocks_for, compose
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.messages import Event, TurnRequest, TurnResult
from interlace.rollout.workloads.episodes import Planned

from .measures import measure

Prompts = Sequence[tuple[int, int]]
"""Tokens of a prompt, tokens to generate behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One run of a workload."""

    seconds: float
    digest: str
    """Of all tokens, log-probabilities and experts."""
    figures: dict[str, Any]
    """As `measures.measure` gives them."""


class OneRank:
    """A rank without peers, composed as launchers do it and ready to step."""

    def __init__(
        self, config: RolloutConfig, folder: Path, transport: ProcessTransport, *, deadline: float
    ) -> None:
        """`deadline`, by time.monotonic: what goes on longer raises TimeoutError."""
        self._transport, self._deadline = transport, deadline
        self._vocab_size = read_config(folder).vocab_size
        self._inbox = Inbox()
        self._answered: Callable[[TurnResult], None] = lambda result: None
        self._num_answered = 0
        rank = compose(
            config,
            folder,
            transport,
            self._inbox,
            self._take,
            num_blocks=blocks_for(config, folder, transport.device),
        )
        self._engine = rank.engine
        if rank.first_use is not None:
            self._drive(rank.first_use())

    def play(self, episodes: Sequence[Planned], number: int) -> Played:
        """All episodes at once, without waits. Another `number` draws other texts."""
        contexts = [self._text(one.num_prompt, number, index) for index, one in enumerate(episodes)]
        asked: list[tuple[int, float]] = []
        finished: list[float] = []
        total = dict[tuple[int, int], bytes]()

        def ask(index: int, turn: int) -> None:
            asked.append((index, time.monotonic()))
            self._ask(index, turn, contexts[index], episodes[index].turns[turn].generate)

        def answered(result: TurnResult) -> None:
            index, turn = result.trajectory, result.turn
            total[index, turn] = _bytes_of(result)
            if turn + 1 == len(episodes[index].turns):
                finished.append(time.monotonic())
                return
            appended = self._text(episodes[index].turns[turn].append, number, index, turn)
            contexts[index] += [*result.token_ids, *appended]
            ask(index, turn + 1)

        self._answered, began_at = answered, time.monotonic()
        for index in range(len(episodes)):
            ask(index, 0)
        records = self._until(lambda: len(finished) == len(episodes))
        return Played(
            seconds=max(finished) - began_at,
            digest=hashlib.sha256(b"".join(total[key] for key in sorted(total))).hexdigest(),
            figures=measure(records, asked, finished, began_at=began_at),
        )

    def answer(self, first: Prompts, later: Prompts = ()) -> Records:
        """Single turns. `later` ones come once all `first` ones decode, and the records begin."""
        waiting, self._num_answered = set[int](), self._num_answered + 1
        self._answered = lambda result: waiting.discard(result.trajectory)

        def begin(prompts: Prompts, base: int) -> None:
            for index, (length, generate) in enumerate(prompts, start=base):
                waiting.add(index)
                self._ask(index, 0, self._text(length, self._num_answered, index), generate)

        begin(first, 0)
        if later:
            steps, before = self._engine.journal.steps, len(self._engine.journal.steps)
            self._until(lambda: len(steps) > before and steps[-1].decoding == len(first))
            begin(later, len(first))
        return self._until(lambda: not waiting)

    def _take(self, event: Event) -> None:
        if isinstance(event, TurnResult):
            self._answered(event)

    def _ask(self, trajectory: int, turn: int, context: Sequence[int], generate: int) -> None:
        self._inbox.put(
            TurnRequest(
                trajectory=trajectory,
                turn=turn,
                token_ids=list(context),
                seed=0,
                experts_from=0,
                sampling=SamplingParams(max_tokens=generate),
            )
        )

    def _text(self, length: int, *seed: int) -> list[int]:
        drawn = np.random.default_rng(seed).integers(3, self._vocab_size, length)
        return [int(token) for token in drawn]

    def _until(self, done: Callable[[], bool]) -> Records:
        """Step until then; the records of these steps."""
        journal = self._engine.journal
        num_steps, num_tickets = len(journal.steps), len(journal.tickets)
        while not done():
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"not done in time, after {len(journal.steps)} steps")
            self._drive(self._engine.step())
        return {0: (list(journal.steps)[num_steps:], list(journal.tickets)[num_tickets:])}

    def _drive(self, work: Any) -> Any:
        return run_blocking(work, park=self._inbox.wait, waiter=self._transport.waiter)


def _bytes_of(result: TurnResult) -> bytes:
    numbers = np.array(result.logprobs_raw, "<f4").tobytes()
    tokens = np.array([result.trajectory, result.turn, *result.token_ids], "<i4").tobytes()
    return struct.pack("<q", len(result.token_ids)) + tokens + numbers + result.experts
