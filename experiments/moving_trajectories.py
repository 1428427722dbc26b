"""Would it pay to move a trajectory to the emptier rank between two turns?

    python experiments/moving_trajectories.py

A trajectory stays where its keys and values are. One that moves loses them: its whole context is
prefilled again. Here workloads are played by arithmetic, without a model: two ranks that step
together, as all modes but replicas do, or each at its own pace, as replicas do; a step costs a
constant, its rows and its prefilled tokens, where the busier rank counts if they step together.
Before each turn but the first, a trajectory of at most so many tokens moves if its rank has at
least so many turns more than the emptiest one.

Seen: where ranks step together the best rule for each case takes 0.97 to 1.01 of the time without
moving, the worst 1.02 to 1.25. Replicas gain where contexts are short: 0.87 to 1.00 at best.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track
from rich.table import Table

from interlace.rollout.balancer import Balancer
from interlace.rollout.workloads.episodes import Planned
from interlace.rollout.workloads.workload import load_workload

WORKLOADS = ("swe-long", "search-deep", "taubench")
WORLD, MAX_RUNNING, CHUNK = 2, 32, 256
NEVER = (0, 1)
RULES = (NEVER, *((limit, more) for limit in (256, 512, 1024, 1 << 20) for more in (2, 4)))
"""Most tokens of a context that is moved, least difference in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a step, of a row in it, of a prefilled token."""

    name: str
    step_s: float
    row_s: float
    token_s: float


COSTS = (
    Cost(name="a token costs as much as a row", step_s=4e-3, row_s=1e-3, token_s=1e-3),
    Cost(name="a token costs a quarter of a row", step_s=4e-3, row_s=1e-3, token_s=0.25e-3),
    Cost(name="rows are nearly free", step_s=20e-3, row_s=0.1e-3, token_s=0.05e-3),
)


@dataclass(slots=True)
class Turn:
    """What is left of one."""

    episode: int
    number: int
    prefill: int
    generate: int


@dataclass(slots=True)
class Rank:
    """Turns that wait for their prefill, or for its end, and those that decode."""

    waiting: deque[Turn] = field(default_factory=deque)
    running: list[Turn] = field(default_factory=list)

    @property
    def num_turns(self) -> int:
        return len(self.waiting) + len(self.running)

    def prefill(self) -> tuple[int, list[Turn]]:
        """Tokens of the next chunk, and the turns that decode from the next step on."""
        room, ready = CHUNK, list[Turn]()
        while room and self.waiting and len(self.running) + len(ready) < MAX_RUNNING:
            turn = self.waiting[0]
            num = min(room, turn.prefill)
            turn.prefill -= num
            room -= num
            if not turn.prefill:
                ready.append(self.waiting.popleft())
        return CHUNK - room, ready

    def decode(self) -> list[Turn]:
        """The turns that end with this step."""
        for turn in self.running:
            turn.generate -= 1
        ended = [turn for turn in self.running if not turn.generate]
        self.running = [turn for turn in self.running if turn.generate]
        return ended


class Play:
    """All episodes of a workload on ranks that step together in engines."""

    def __init__(self, episodes: Sequence[Planned], engines: Sequence[Sequence[int]]) -> None:
        self.moved_tokens = 0
        self._episodes, self._engines = episodes, engines
        self._ranks = [Rank() for _ in range(WORLD)]
        balancer = Balancer(WORLD)
        self._home = [balancer.place(f"{one.part}-{one.group}") for one in episodes]
        self._context = [one.num_prompt for one in episodes]
        self._cached = [0] * len(episodes)
        self._coming = [(one.reset_s, number, 0) for number, one in enumerate(episodes)]
        heapq.heapify(self._coming)

    def seconds(self, cost: Cost, rule: tuple[int, int]) -> float:
        """Until the last episode has ended."""
        clocks = [0.0] * len(self._engines)
        while self._coming or any(rank.num_turns for rank in self._ranks):
            busy = [
                (clock, engine)
                for engine, clock in enumerate(clocks)
                if any(self._ranks[rank].num_turns for rank in self._engines[engine])
            ]
            now, engine = min(busy, default=(0.0, 0))
            if self._coming and (not busy or self._coming[0][0] <= now):
                self._ask(*heapq.heappop(self._coming), rule, clocks)
                continue
            clocks[engine] = self._step(engine, now, cost)
        return max(clocks)

    def _ask(
        self, at: float, episode: int, number: int, rule: tuple[int, int], clocks: list[float]
    ) -> None:
        limit, more = rule
        loads = [rank.num_turns for rank in self._ranks]
        home, emptiest = self._home[episode], loads.index(min(loads))
        if number and self._context[episode] <= limit and loads[home] - loads[emptiest] >= more:
            self._home[episode] = home = emptiest
            self.moved_tokens += self._cached[episode]
            self._cached[episode] = 0
        engine = next(e for e, ranks in enumerate(self._engines) if home in ranks)
        if not any(self._ranks[rank].num_turns for rank in self._engines[engine]):
            clocks[engine] = max(clocks[engine], at)
        self._ranks[home].waiting.append(
            Turn(
                episode=episode,
                number=number,
                prefill=self._context[episode] - self._cached[episode],
                generate=self._episodes[episode].turns[number].generate,
            )
        )

    def _step(self, engine: int, now: float, cost: Cost) -> float:
        ranks = [self._ranks[rank] for rank in self._engines[engine]]
        rows = max(len(rank.running) for rank in ranks)
        chunks = [rank.prefill() for rank in ranks]
        tokens = max(num for num, _ in chunks)
        end = now + cost.step_s + cost.row_s * rows + cost.token_s * tokens
        for rank, (_, ready) in zip(ranks, chunks, strict=True):
            for turn in rank.decode():
                self._end(turn, end)
            rank.running += ready
        return end

    def _end(self, turn: Turn, at: float) -> None:
        planned = self._episodes[turn.episode].turns
        made = planned[turn.number]
        self._cached[turn.episode] = self._context[turn.episode] + made.generate
        self._context[turn.episode] += made.generate + made.append
        if turn.number + 1 < len(planned):
            coming = (at + made.wait_s, turn.episode, turn.number + 1)
            heapq.heappush(self._coming, coming)


def main() -> None:
    together, apart = [range(WORLD)], [[rank] for rank in range(WORLD)]
    table = Table(title="Completion time, as a multiple of that without moving")
    for heading in ("workload", "ranks step", "costs", "fastest rule", "slowest", "tokens again"):
        table.add_column(heading)
    cases = [
        (name, words, engines, cost)
        for name in WORKLOADS
        for words, engines in (("together", together), ("apart", apart))
        for cost in COSTS
    ]
    for name, words, engines, cost in track(cases, "playing", transient=True):
        episodes = load_workload(name).episodes
        found = []
        for rule in RULES:
            play = Play(episodes, engines)
            found.append((play.seconds(cost, rule), play.moved_tokens, rule))
        stay = found[0][0]
        seconds, again, (limit, more) = min(found[1:])
        table.add_row(
            *(name, words, cost.name),
            f"{seconds / stay:.3f} (up to {limit} tokens, {more} turns more)",
            f"{max(found)[0] / stay:.3f}",
            f"{again} to {max(found)[1]}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
