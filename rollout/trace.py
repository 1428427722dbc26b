"""trace.json: a run for Perfetto (ui.perfetto.dev) or chrome://tracing.

A process per rank; in it a lane "steps" and a lane per path. On a path's lane a slice named after
the stage is computation up to a collective, with "paused" in it where the path stood aside for
another, and the slice "in flight" behind it lasts until the path took the result. An arrow runs
from the rank that posted a collective last (nobody could be done before) to where each other member
took the result. Slices carry all recorded numbers, so the file can be read back. Times are
microseconds since the first step began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from interlace.comm.journal import StepRecord, TicketRecord
from interlace.rollout.figures import Records


def write_trace(path: str | Path, records: Records) -> None:
    """Write the file event by event, under a temporary name until it is complete."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    zero = min((steps[0].began_at for steps, _ in records.values() if steps), default=0.0)
    lanes = sorted({ticket.path for _, tickets in records.values() for ticket in tickets})
    lane_of = {name: index for index, name in enumerate(lanes, 1)}
    with partial.open("w", encoding="utf-8", buffering=1 << 20) as out:
        out.write(f'{{"displayTimeUnit":"ms","otherData":{{"zero_s":{zero!r}}},"traceEvents":[\n')
        separator = ""
        for event in _events(records, lane_of, zero):
            out.write(separator)
            out.write(event)
            separator = ",\n"
        out.write("\n]}\n")
    partial.replace(path)


def read_trace(path: str | Path) -> dict[int, tuple[list[StepRecord], list[TicketRecord]]]:
    """The records of a trace written by `write_trace`.

    Everything is as it was, except that times of tickets are rounded to a nanosecond. ValueError
    naming the file if it is not such a trace.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        zero = document["otherData"]["zero_s"]
        records: dict[int, tuple[list[StepRecord], list[TicketRecord]]] = {}
        posted: dict[tuple[int, int], tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        for event in document["traceEvents"]:
            rank, kind = event["pid"], event.get("cat")
            if event["ph"] == "M":
                records.setdefault(rank, ([], []))
            elif kind == "step":
                records[rank][0].append(_step(event["args"]))
            elif kind == "compute":
                posted[rank, event["args"]["seq"]] = event, []
            elif kind == "paused":
                posted[rank, event["args"]["seq"]][1].append(event)
            elif kind == "in flight":
                compute, paused = posted.pop((rank, event["args"]["seq"]))
                records[rank][1].append(_ticket(compute, paused, event, zero))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a trace written here: {error!r}") from error
    return records


def _events(records: Records, lane_of: dict[str, int], zero: float) -> Iterator[str]:
    for rank, (steps, tickets) in sorted(records.items()):
        yield _name("process_name", rank, 0, f"rank {rank}")
        yield _name("thread_name", rank, 0, "steps")
        for name, lane in lane_of.items():
            yield _name("thread_name", rank, lane, name)
        for step in steps:
            yield (
                f'{{"ph":"X","cat":"step","name":"step {step.step}","pid":{rank},"tid":0,'
                f'"ts":{_us(step.began_at - zero)},"dur":{_us(step.ended_at - step.began_at)},'
                f'"args":{json.dumps(asdict(step), separators=(",", ":"))}}}'
            )
        for ticket in tickets:
            yield from _slices(rank, lane_of[ticket.path], ticket, zero)
    yield from _arrows(records, lane_of, zero)


def _slices(rank: int, lane: int, ticket: TicketRecord, zero: float) -> Iterator[str]:
    head = f'"pid":{rank},"tid":{lane},"ts":'
    members = ",".join(map(str, ticket.members))
    yield (
        f'{{"ph":"X","cat":"compute","name":{json.dumps(ticket.stage)},{head}'
        f'{_us(ticket.resumed_at - zero)},"dur":{_us(ticket.computed_at - ticket.resumed_at)},'
        f'"args":{{"seq":{ticket.seq},"step":{ticket.step},"path":{json.dumps(ticket.path)},'
        f'"role":{json.dumps(ticket.role)},"comm_seq":{ticket.comm_seq},"members":[{members}]}}}}'
    )
    for start, stop in ticket.pauses:
        yield (
            f'{{"ph":"X","cat":"paused","name":"paused",{head}{_us(start - zero)},'
            f'"dur":{_us(stop - start)},"args":{{"seq":{ticket.seq}}}}}'
        )
    yield (
        f'{{"ph":"X","cat":"in flight","name":"in flight",{head}'
        f'{_us(ticket.posted_at - zero)},"dur":{_us(ticket.settled_at - ticket.posted_at)},'
        f'"args":{{"seq":{ticket.seq},"waited_s":{ticket.waited_s!r}}}}}'
    )


def _arrows(records: Records, lane_of: dict[str, int], zero: float) -> Iterator[str]:
    """A viewer ties an arrow's ends to the slices that enclose them, hence a hair inside."""
    together: dict[tuple[int, tuple[int, ...]], list[tuple[int, TicketRecord]]] = {}
    for rank, (_, tickets) in sorted(records.items()):
        for ticket in tickets:
            together.setdefault((ticket.seq, ticket.members), []).append((rank, ticket))
    numbers = count()
    hair = 1e-9
    for taking_part in together.values():
        poster, last = max(taking_part, key=lambda one: one[1].posted_at)
        lane = lane_of[last.path]
        start = _us(last.posted_at - zero)
        for rank, ticket in taking_part:
            if rank == poster or ticket.settled_at - hair < last.posted_at:
                continue
            head = f'"cat":"c","name":"c","id":{next(numbers)},"tid":{lane}'
            stop = _us(ticket.settled_at - hair - zero)
            yield f'{{"ph":"s",{head},"pid":{poster},"ts":{start}}}'
            yield f'{{"ph":"f","bp":"e",{head},"pid":{rank},"ts":{stop}}}'


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3f}"


def _name(kind: str, rank: int, lane: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}})


def _step(args: dict[str, Any]) -> StepRecord:
    return StepRecord(
        **{
            **args,
            "started": tuple(args["started"]),
            "finished": tuple(args["finished"]),
            "rows": _pairs(args["rows"]),
            "num_tickets": _pairs(args["num_tickets"]),
            "sampled": tuple(args["sampled"]),
        }
    )


def _pairs(pairs: Iterable[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, num) for name, num in pairs)


def _ticket(
    compute: dict[str, Any],
    paused: Iterable[dict[str, Any]],
    in_flight: dict[str, Any],
    zero: float,
) -> TicketRecord:
    args = compute["args"]
    return TicketRecord(
        step=args["step"],
        seq=args["seq"],
        path=args["path"],
        role=args["role"],
        stage=compute["name"],
        comm_seq=args["comm_seq"],
        members=tuple(args["members"]),
        resumed_at=zero + compute["ts"] * 1e-6,
        computed_at=zero + (compute["ts"] + compute["dur"]) * 1e-6,
        posted_at=zero + in_flight["ts"] * 1e-6,
        settled_at=zero + (in_flight["ts"] + in_flight["dur"]) * 1e-6,
        waited_s=in_flight["args"]["waited_s"],
        pauses=tuple(
            (zero + one["ts"] * 1e-6, zero + (one["ts"] + one["dur"]) * 1e-6) for one in paused
        ),
    )
