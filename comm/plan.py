"""From the proposals of all ranks to one order of collectives. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Literal

from .path import Op, Path, Ticket
from .proposal import Proposal

Mode = Literal["serial", "chunked", "whole_forward", "multiplexed", "disaggregated"]
Policy = Literal["plan", "abreast", "turnstile", "global_enqueue"]

_SPREADING = ("multiplexed", "disaggregated")

_PathSeqs = tuple[tuple[str, int], ...]
_CommSeqs = tuple[tuple[tuple[str, str], int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What every rank knows before the first step."""

    paths: tuple[Path, ...]
    """In order of precedence: where two tickets fall on the same place, the first path's goes."""
    mode: Mode
    slots: int = 2
    """Receive slots of each communicator."""
    chunk_steps: int = 3
    """Steps a prefill may span while anybody decodes."""
    start_tokens: int = 1
    """A prefill starts once so many tokens wait on some rank ..."""
    start_steps: int = 4
    """... or once any have waited for so many steps."""
    park_ms: int = 5
    policy: Policy = "plan"
    """How `multiplexed` orders a step in which both paths run. plan: decode's tickets among
    prefill's boundaries, as the work between these asks for. abreast: a whole prefill, its tickets
    and decode's by turns. turnstile: all of decode's, a meeting of all ranks, then one boundary of
    prefill. global_enqueue: a whole prefill, then decode."""
    layers_per_boundary: int = 0
    """Prefill stops for decode behind so many whole layers; 0: behind every collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """What the plan remembers: a pure fold over agreed proposals, so equal on all ranks."""

    epoch: int = 0
    step: int = 0
    version: int = 0
    seq: int = 0
    path_seq: _PathSeqs = ()
    comm_seq: _CommSeqs = ()
    position: tuple[tuple[str, int], ...] = ()
    """Paths in flight -> tickets of their program already issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, the same on every rank."""

    step: int
    version: int
    decoding: int
    """Largest number of decode rows any leader proposed."""
    start: tuple[str, ...] = ()
    """Paths whose forward pass begins."""
    drop: tuple[str, ...] = ()
    """Paths whose forward pass is abandoned, its outstanding collective settled first."""
    tickets: tuple[Ticket, ...] = ()
    meet_at: int = 0
    """All ranks meet before the ticket with this index; 0 for never."""
    finish: tuple[str, ...] = ()
    """Paths that run to their return in this step."""
    update: int = 0
    """Weight version to install once all of this step is done; 0 for none."""
    park_ms: int = 0
    stop: bool = False
    after: PlanState

    def count(self, path: str) -> int:
        return sum(ticket.path == path for ticket in self.tickets)


def plan(state: PlanState, proposals: Sequence[Proposal], config: PlanConfig) -> StepPlan:
    """The step every rank walks next.

    In mode `multiplexed` decode's whole program is spread among ``ceil(program / chunk_steps)``
    prefill boundaries, so at most that many lie between two decode tickets while anybody decodes,
    and at least one prefill boundary is issued per step. The more computation leads to a boundary
    (`Op.work`), the more of decode's tickets precede it. In `whole_forward` a step issues all of
    decode's tickets, then all of prefill's. In `serial` decode waits while a prefill runs or could
    start. `chunked` needs no rule: its one path does both. `disaggregated` spreads as `multiplexed`
    does, over paths of different ranks; a transfer between them begins and ends in the step in
    which any leader has something to send, and its tickets come first, by turns with those of the
    others. With policy `abreast` a prefill of mode `multiplexed` ends in the step in which it
    begins.

    Once every rank holds a newer weight version, the step ends all prefill in flight and begins
    none that would outlast it; the version changes between this step and the next.
    """
    ready = min(proposal.update for proposal in proposals)
    update = ready if ready > state.version else 0
    leaders = [proposal for proposal in proposals if proposal.leader]
    decoding = max(p.decode_rows for p in leaders)
    wanted = _wanted(leaders, decoding, config)
    position = dict(state.position)

    drop = []
    if max(p.live_rows for p in leaders) == 0:
        drop = [p.name for p in config.paths if p.name in position and "prefill" in p.work]
        for name in drop:
            del position[name]

    if config.mode == "serial" and (position or wanted["prefill"]):
        wanted["decode"] = False

    start, finish, counts = [], [], []
    for path in config.paths:
        if path.name not in position:
            if not any(wanted[kind] for kind in path.work) or (update and not path.whole):
                continue
            start.append(path.name)
            position[path.name] = 0
        size = len(path.program)
        split = not (path.whole or update) and config.mode in _SPREADING and decoding > 0
        num = size - position[path.name]
        if split and config.policy not in ("abreast", "global_enqueue"):
            num = sum(_boundaries(path, position[path.name], config))
        counts.append((path.name, num))
        position[path.name] += num
        if position[path.name] == size:
            finish.append(path.name)

    cursor = {**dict(state.position), **dict.fromkeys(start, 0)}
    order = _order(cursor, counts, config)
    tickets, path_seq, comm_seq = _tickets(state, cursor, order, decoding, config)
    turnstile = config.policy == "turnstile" and len(counts) > 1
    for name in finish:
        del position[name]
    idle = not counts
    return StepPlan(
        step=state.step,
        version=state.version,
        decoding=decoding,
        start=tuple(start),
        drop=tuple(drop),
        tickets=tickets,
        meet_at=counts[0][1] if turnstile else 0,
        finish=tuple(finish),
        update=update,
        park_ms=config.park_ms if idle and not update else 0,
        stop=idle and not drop and not update and all(p.idle and p.stop for p in leaders),
        after=PlanState(
            epoch=state.epoch,
            step=state.step + 1,
            version=update or state.version,
            seq=state.seq + len(tickets),
            path_seq=path_seq,
            comm_seq=comm_seq,
            position=tuple(sorted(position.items())),
        ),
    )


def fingerprint(plan: StepPlan) -> bytes:
    """Everything a rank does for the plan, as bytes; what follows from it (`after`) is left out."""
    head = (plan.step, plan.version, plan.decoding, plan.update, plan.park_ms, plan.stop)
    numbers = array("q", (*head, plan.meet_at))
    names = [*plan.start, "", *plan.drop, "", *plan.finish]
    for t in plan.tickets:
        numbers.extend(
            (t.epoch, t.step, t.seq, t.path_seq, t.comm_seq, t.slot, t.version, t.rows, t.op.crc)
        )
        names += (t.path, t.op.kind, t.op.role)
    return numbers.tobytes() + "\0".join(names).encode()


def _wanted(leaders: Sequence[Proposal], decoding: int, config: PlanConfig) -> dict[str, bool]:
    waiting = max(p.waiting_tokens for p in leaders)
    waited = max(p.waiting_steps for p in leaders)
    ripe = waiting >= config.start_tokens or waited >= config.start_steps
    return {
        "decode": decoding > 0,
        "prefill": waiting > 0 and ripe,
        "transfer": any(p.transfer_rows > 0 for p in leaders),
    }


def _tickets(
    state: PlanState,
    cursor: Mapping[str, int],
    order: Sequence[str],
    decoding: int,
    config: PlanConfig,
) -> tuple[tuple[Ticket, ...], _PathSeqs, _CommSeqs]:
    """The tickets of this order, of programs from `cursor` on; and how many there have been then,
    of each path and of each of its communicators."""
    at = dict(cursor)
    path_seq, comm_seq = dict(state.path_seq), dict(state.comm_seq)
    programs = {path.name: path.program for path in config.paths}
    rows = {path.name: decoding if "decode" in path.work else 0 for path in config.paths}
    epoch, step, version, slots = state.epoch, state.step, state.version, config.slots
    tickets = []
    for seq, name in enumerate(order, start=state.seq):
        op = programs[name][at[name]]
        key = name, op.role
        nth, of_path = comm_seq.get(key, 0), path_seq.get(name, 0)
        tickets.append(
            Ticket(epoch, step, seq, name, of_path, nth, nth % slots, op, version, rows[name])
        )
        at[name] += 1
        path_seq[name], comm_seq[key] = of_path + 1, nth + 1
    return tuple(tickets), tuple(sorted(path_seq.items())), tuple(sorted(comm_seq.items()))


def _boundaries(path: Path, position: int, config: PlanConfig) -> list[int]:
    """Tickets up to each boundary that the path may reach in a step in which others decode."""
    num_units = len(_units(path.program, config.layers_per_boundary))
    most = 1 if config.policy == "turnstile" else math.ceil(num_units / config.chunk_steps)
    return _left(path, position, config)[:most]


def _left(path: Path, position: int, config: PlanConfig) -> list[int]:
    """Tickets up to each place where the path may stop, from `position` to its program's end."""
    ends = accumulate(_units(path.program, config.layers_per_boundary))
    places = [position, *(end for end in ends if end > position)]
    return [end - start for start, end in pairwise(places)]


def _units(program: tuple[Op, ...], layers: int) -> list[int]:
    """Number of tickets up to each place where a program may stop for another path."""
    if not layers:
        return [1] * len(program)
    sizes = [len(list(ops)) for _, ops in groupby(op.stage.partition(".")[0] for op in program)]
    return [sum(sizes[at : at + layers]) for at in range(0, len(sizes), layers)]


def _order(
    cursor: Mapping[str, int], counts: Sequence[tuple[str, int]], config: PlanConfig
) -> list[str]:
    """Whose ticket is next, throughout the step, of programs from `cursor` on."""
    if len(counts) < 2:
        return _in_turn(counts)
    first = {path.name for path in config.paths if path.work == ("transfer",)}
    if any(name in first for name, _ in counts):
        rest = [count for count in counts if count[0] not in first]
        ahead = _in_turn([count for count in counts if count[0] in first])
        return _by_turns(ahead, _order(cursor, rest, config))
    if config.mode == "whole_forward" or config.policy == "turnstile":
        return _in_turn(counts)
    if config.policy == "global_enqueue":
        return _in_turn(counts[::-1])
    if config.policy == "abreast" and len(counts) == 2:
        (one, num), (other, num_of_other) = counts
        return _by_turns([one] * num, [other] * num_of_other)
    paths = {path.name: path for path in config.paths}
    if not config.layers_per_boundary:
        return interleave([(name, _works(paths[name], cursor[name], num)) for name, num in counts])
    lumps = {
        name: [1] * num if paths[name].whole else _lumps(paths[name], cursor[name], num, config)
        for name, num in counts
    }
    turns = interleave([(name, (1,) * len(sizes)) for name, sizes in lumps.items()])
    following = {name: iter(sizes) for name, sizes in lumps.items()}
    return [name for name in turns for _ in range(next(following[name]))]


def _lumps(path: Path, position: int, num: int, config: PlanConfig) -> list[int]:
    sizes = _left(path, position, config)
    return [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= num]


def _in_turn(counts: Sequence[tuple[str, int]]) -> list[str]:
    return [name for name, num in counts for _ in range(num)]


def _by_turns(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Each name of the first in front of one of the second, as long as there are any."""
    pairs = zip_longest(one, other[: len(one)])
    return [name for pair in pairs for name in pair if name is not None] + [*other[len(one) :]]


def _works(path: Path, position: int, num: int) -> Sequence[int]:
    """Of the path's next tickets, as they are spread. Decode waits for each of its own just as
    long, whatever leads to it."""
    if path.whole:
        return (1,) * num
    return [op.work for op in path.program[position : position + num]]


def interleave(works: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    """Spread each name's tickets over the step, so far apart as the work that leads to each asks
    for; ties go to the name listed first.

    Where all work of a name is the same there are, between two of its n tickets, at most
    ``ceil(m / (n + 1)) + 1`` of another that has m, also of the same work.
    """
    totals = [sum(own) * (len(own) + 1) for _, own in works]
    common = math.lcm(*(total for total in totals if total))
    marks = [
        (done * len(own) * (common // total), order, name)
        for order, ((name, own), total) in enumerate(zip(works, totals, strict=True))
        for done in accumulate(own)
    ]
    return [name for _, _, name in sorted(marks)]
