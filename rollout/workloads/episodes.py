"""Episodes with every number fixed: drawn from distributions or taken from a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .draws import Draws, Purpose, correlated
from .recordings import Recorded
from .sections import ZERO, Faults, Part, Scale
from .spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """A turn of the model, and the step of the environment behind it."""

    generate: int
    append: int
    """Tokens between this turn and the next, chat template included; 0 behind the last."""
    wait_s: float
    retries: int = 0
    """Attempts of the step that fail; their time is part of `wait_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One trajectory before it is played. Lengths are in tokens."""

    part: str
    group: int
    """Members of a group have one prompt."""
    prompt: tuple[tuple[int, int], ...]
    """Pieces (seed of the text, tokens); prompts that begin alike share that in the cache."""
    turns: tuple[PlannedTurn, ...]
    reset_s: float
    cut: bool = False
    """It would have gone on, but its context was full."""

    @property
    def num_prompt(self) -> int:
        return sum(num for _, num in self.prompt)

    @property
    def num_context(self) -> int:
        """Tokens at its end."""
        return self.num_prompt + sum(turn.generate + turn.append for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The shortest texts there are: a chat template around one token."""

    prompt: int = 1
    append: int = 1


def drawn(parts: Sequence[Part], seed: int, scale: Scale, least: Least) -> list[Planned]:
    """The episodes of all parts, groups whole, the parts' groups spread evenly over the batch."""
    placed: list[tuple[float, int, list[Planned]]] = []
    for index, part in enumerate(parts):
        num_groups = _at_least_one(part.num_prompts * scale.prompts)
        num_members = _at_least_one(part.group_size * scale.members)
        for group in range(num_groups):
            members = [
                _drawn_one(part, scale, least, Draws(seed, index, group, 0), own)
                for own in (Draws(seed, index, group, n) for n in range(1, num_members + 1))
            ]
            placed.append(((group + 0.5) / num_groups, index, members))
    return [one for _, _, members in sorted(placed, key=lambda x: x[:2]) for one in members]


def replayed(
    recorded: Sequence[Recorded], seed: int, scale: Scale, least: Least, max_context: int | None
) -> list[Planned]:
    """The first episodes of a recording; those whose prompt is too long are left out."""
    num = _at_least_one(len(recorded) * scale.prompts)
    limit = _context_limit(max_context, scale, least)
    planned = []
    for group, one in enumerate(recorded[:num]):
        num_turns = _at_least_one(len(one.turns) * scale.turns)
        turns = [
            PlannedTurn(
                generate=_at_least_one(generate * scale.lengths),
                append=max(least.append, round(append * scale.lengths)),
                wait_s=_seconds(wait_s * scale.seconds),
            )
            for generate, append, wait_s in one.turns[:num_turns]
        ]
        episode = Planned(
            part="replay",
            group=group,
            prompt=_scaled_prompt(one.prompt, seed, scale, least),
            turns=tuple(turns),
            reset_s=_seconds(one.arrival_s * scale.seconds),
        )
        if limit is None or episode.num_prompt < limit:
            planned.append(_within(episode, limit))
    return planned


def _drawn_one(part: Part, scale: Scale, least: Least, shared: Draws, own: Draws) -> Planned:
    def of_both(purpose: Purpose, spread: Spread, num: int) -> list[float]:
        pairs = zip(shared.uniforms(purpose, num), own.uniforms(purpose, num), strict=True)
        return [spread.quantile(correlated(*pair, part.group_correlation)) for pair in pairs]

    def of_own(purpose: Purpose, spread: Spread, num: int) -> list[float]:
        if spread == ZERO:
            return [0.0] * num
        return [spread.quantile(u) for u in own.uniforms(purpose, num)]

    (num_turns,) = of_both(Purpose.TURNS, part.turns, 1)
    num = _at_least_one(num_turns * scale.turns)
    latency = of_own(Purpose.LATENCY, part.latency_s, num)
    extra = of_own(Purpose.EXTRA_LATENCY, part.extra_latency_s, num)
    retries = _retries(part.faults, own, num)
    penalty_s = part.faults.penalty_s if part.faults else 0.0
    # A failed attempt takes its time, then the penalty; the attempt behind it takes its time again.
    waits = [
        (first + more) * (1 + failed) + penalty_s * failed
        for first, more, failed in zip(latency, extra, retries, strict=True)
    ]
    generate = of_both(Purpose.GENERATE, part.generate, num)
    append = of_own(Purpose.APPEND, part.append or ZERO, num)
    (prompt,) = [part.prompt.quantile(u) for u in shared.uniforms(Purpose.PROMPT, 1)]
    turns = [
        PlannedTurn(
            generate=_at_least_one(generate[i] * scale.lengths),
            append=max(least.append, round(append[i] * scale.lengths)),
            wait_s=_seconds(waits[i] * scale.seconds),
            retries=retries[i],
        )
        for i in range(num)
    ]
    limit = _context_limit(part.max_context, scale, least)
    tokens = max(least.prompt, round(prompt * scale.lengths * scale.turns))
    episode = Planned(
        part=part.name,
        group=shared.group,
        prompt=((shared.integer(Purpose.TEXT), min(tokens, (limit or tokens + 1) - 1)),),
        turns=tuple(turns),
        reset_s=_seconds(of_own(Purpose.RESET, part.reset_s, 1)[0] * scale.seconds),
    )
    return _within(episode, limit)


def _retries(faults: Faults | None, own: Draws, num: int) -> list[int]:
    if faults is None:
        return [0] * num
    most = faults.max_retries
    tries = iter(own.uniforms(Purpose.FAULT, num * most))
    return [_leading(next(tries) < faults.rate for _ in range(most)) for _ in range(num)]


def _leading(failed: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    flags = list(failed)
    return flags.index(False) if False in flags else len(flags)


def _within(episode: Planned, limit: int | None) -> Planned:
    """The episode up to a context of `limit` tokens; nothing is appended behind its last turn."""
    turns = list(_fitting(episode, limit))
    cut = len(turns) < len(episode.turns) or turns[-1].generate < episode.turns[-1].generate
    turns[-1] = replace(turns[-1], append=0)
    return replace(episode, turns=tuple(turns), cut=cut)


def _fitting(episode: Planned, limit: int | None) -> Iterator[PlannedTurn]:
    at = episode.num_prompt
    for turn in episode.turns:
        room = turn.generate if limit is None else limit - at
        if room < 1:
            return
        yield replace(turn, generate=min(turn.generate, room))
        at += turn.generate + turn.append


def _scaled_prompt(
    pieces: Sequence[tuple[int, int]], seed: int, scale: Scale, least: Least
) -> tuple[tuple[int, int], ...]:
    """Pieces that begin at the same place in two prompts have the same length in both."""
    factor = scale.lengths * scale.turns
    ends = [round(end * factor) for end in accumulate((num for _, num in pieces), initial=0)]
    lengths = [end - start for start, end in pairwise(ends)]
    scaled = [
        (Draws(seed, 0, label, 0).integer(Purpose.TEXT), num)
        for (label, _), num in zip(pieces, lengths, strict=True)
        if num
    ]
    missing = least.prompt - ends[-1]
    if missing > 0:
        scaled.append((Draws(seed, 0, pieces[-1][0], 0).integer(Purpose.TEXT), missing))
    return tuple(scaled)


def _context_limit(max_context: int | None, scale: Scale, least: Least) -> int | None:
    """Room for the shortest prompt and a token there always is."""
    if max_context is None:
        return None
    return max(least.prompt + 1, round(max_context * scale.lengths * scale.turns))


def _at_least_one(value: float) -> int:
    return max(1, round(value))


def _seconds(value: float) -> float:
    return round(value, 6)
