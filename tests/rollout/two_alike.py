"""The same work for two groups, of which each must do the same in every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from tests.rollout.cells import turn
from tests.rollout.one_side import OneSide
from tests.rollout.two_sides import TwoSides

from interlace.rollout.messages import TurnRequest, UpdateMode
from interlace.rollout.scheduler import Scheduler

Side = OneSide | TwoSides
TOLD = ("propose", "commit", "held", "describe_decode", "describe_prefill", "depart", "updated")
"""What a scheduler tells others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Some turns at once, of contexts that begin alike."""

    family: int
    num_alike: int
    """Leading tokens that a family shares."""
    tails: tuple[int, ...]
    """A turn for each; with how many tokens it goes on."""
    num: int
    held_until: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Do:
    what: str
    number: int = 1


Action = Submit | Do
MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)


def drawn_actions(draw: random.Random, num: int) -> list[Action]:
    actions: list[Action] = []
    for _ in range(num):
        if draw.random() < 0.4:
            submit = Submit(
                family=draw.randrange(2),
                num_alike=draw.randrange(16),
                tails=tuple(draw.randrange(7) for _ in range(draw.choice([1, 1, 2, 5]))),
                num=draw.randint(1, 7),
                held_until=draw.choice([0, 0, 0, 1, 3]),
            )
            actions.append(submit)
        else:
            what = draw.choice(["step"] * 8 + ["abort", "abort", "pause", "resume", *MODES])
            actions.append(Do(what=what, number=draw.randrange(8)))
    return actions


def drawn_side(draw: random.Random) -> Callable[[], Side]:
    """Makes one side or two, always the same."""
    blocks, chunk, running = (
        draw.choice([9, 12, 20, 60]),
        draw.choice([3, 8, 40]),
        draw.choice([2, 5]),
    )
    staleness, seed = draw.choice([None, 1]), draw.randrange(100)
    if draw.random() < 0.3:
        return lambda: TwoSides(
            blocks=(blocks, blocks), chunk=chunk, max_staleness=staleness, seed=seed
        )
    reuse = draw.choice(["current", "stale"])
    return lambda: OneSide(
        blocks=blocks,
        chunk=chunk,
        running=running,
        reuse=reuse,
        max_staleness=staleness,
        seed=seed,
    )


@dataclass(kw_only=True)
class Played:
    """A side, and what its schedulers have told."""

    side: Side
    told: list[Any] = field(default_factory=list)
    num_submitted: int = 0

    def __post_init__(self) -> None:
        for scheduler in schedulers(self.side):
            for name in TOLD:
                setattr(scheduler, name, self._recorded(name, getattr(scheduler, name)))

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            told = method(*args, **kwargs)
            numbers = [s.request.trajectory for s in told] if name == "depart" else told
            self.told.append((name, numbers))
            return told

        return recorded

    def play(self, actions: Sequence[Action]) -> list[Any]:
        """What was told, of these actions and of going on until nothing moves."""
        for action in actions:
            if isinstance(action, Submit):
                self._submit(action)
            else:
                self._do(action)
        self._do(Do(what="resume"))
        self._do(Do(what="step", number=30))
        self.side.update("keep", version=1000)
        self._do(Do(what="step", number=200))
        return self.told

    def _submit(self, action: Submit) -> None:
        alike = [(action.family + at * at) % 40 for at in range(action.num_alike)]
        for tail in action.tails:
            tokens = [*alike, 30 + action.family, *(20 + (tail + at) % 4 for at in range(tail))]
            holds = [(tail % 2, action.held_until)] if action.held_until else []
            request: TurnRequest = turn(self.num_submitted, tokens, action.num, holds=holds)
            self.num_submitted += 1
            self.side.submit(request)

    def _do(self, action: Do) -> None:
        match action.what:
            case "step":
                for _ in range(action.number):
                    self.side.step()
            case "abort":
                self.side.abort(max(0, self.num_submitted - action.number))
            case "pause":
                for scheduler in schedulers(self.side):
                    scheduler.pause()
            case "resume":
                for scheduler in schedulers(self.side):
                    scheduler.resume()
            case mode:
                self.side.update(mode)  # type: ignore[arg-type]


def schedulers(side: Side) -> list[Scheduler]:
    groups = [side.group] if isinstance(side, OneSide) else side.groups
    return [group.scheduler for group in groups]
