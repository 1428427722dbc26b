"""From what every rank was last seen to do, to what is wrong with which. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .rank_status import Activity, ProcessState, RankStatus, TicketMark
from .verdict import Diagnosis, RankDiagnosis, Verdict

SILENT_S = 1.0
"""A watchdog thread that has not run for so long cannot run."""
_FEW_PLACES = 6
"""Lines of one loop. Whoever computes towards something is seen on more."""
_STILL = 0.75
"""Of the time others have waited, a rank that did nothing new for so much of it stands still."""
_DIVERGENCE = ("OrderError", "DivergedError", "CanaryError")
_CONSEQUENCE = ("CollectiveTimeoutError", "PeerLostError", "RankFailureError")
_NUM_QUOTED = 3


def is_silent(status: RankStatus, now: float, silent_s: float = SILENT_S) -> bool:
    """Whether the rank's watchdog thread has not run for so long that it cannot."""
    return now - status.alive_at > silent_s


def diagnose(
    statuses: Sequence[RankStatus],
    *,
    by: int,
    now: float,
    deadline_s: float = 0.0,
    note: str = "",
    silent_s: float = SILENT_S,
) -> Diagnosis:
    """One verdict for every rank, whatever the statuses say.

    `deadline_s`: what a wait has outlasted, 0 if none has; `note` is what made `by` look. A
    watchdog that has not run for `silent_s` cannot: longer on a machine that is late itself.
    """
    subject = _subject(statuses)
    diverged = _diverged([status for status in statuses if not _has_diverged(status)])
    ranks = []
    for status in statuses:
        silent = is_silent(status, now, silent_s)
        verdict, what = _judge(status, subject, diverged, now, deadline_s, silent)
        if silent and status.process is ProcessState.UNKNOWN and note.startswith("PeerLostError"):
            verdict = Verdict.DEAD
        ranks.append(
            RankDiagnosis(
                rank=status.rank,
                verdict=verdict,
                what=what,
                pid=status.pid,
                host=status.host,
                process=status.process,
                responsive=_responds(status) and not silent,
                tickets=status.tickets,
            )
        )
    found = Diagnosis(by=by, at=now, deadline_s=deadline_s, text="", ranks=tuple(ranks))
    return replace(found, text=_in_words(found, statuses, subject, now, note))


def _responds(status: RankStatus) -> bool:
    gone = status.process in (ProcessState.STOPPED, ProcessState.GONE)
    absent = status.activity in (Activity.ABSENT, Activity.LEFT)
    return not (gone or absent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is waited for: the ticket that comes first in the order, or an exchange."""

    name: str
    seq: int | None
    path: str = ""
    began: float
    """When the first of those who still wait began to."""


def _subject(statuses: Sequence[RankStatus]) -> _Subject | None:
    waiting = [s for s in statuses if s.activity is Activity.WAITING]
    if not waiting:
        return None
    began = min(status.since for status in waiting)
    tickets = [ticket for status in waiting if (ticket := _awaited(status)) is not None]
    if tickets:
        first = min(tickets, key=lambda ticket: ticket.seq)
        return _Subject(name=str(first), seq=first.seq, path=first.path, began=began)
    longest = min(waiting, key=lambda status: (status.since, status.rank))
    return _Subject(name=_wait_of(longest), seq=None, began=began)


def _awaited(status: RankStatus) -> TicketMark | None:
    return next((t for t in reversed(status.tickets) if str(t) in status.where), None)


def _wait_of(status: RankStatus) -> str:
    """What it waits for without its own number, so that two ranks say the same."""
    return status.where.removeprefix(f"rank {status.rank}: ")


def _lacks(status: RankStatus, subject: _Subject | None) -> str:
    """What the rank has not done of what is waited for; empty if it has done its share."""
    if subject is None:
        return ""
    if subject.seq is None:
        same = status.activity is Activity.WAITING and _wait_of(status) == subject.name
        return "" if same else "has not come to it; "
    posted = [ticket for ticket in status.tickets if ticket.posted_at]
    own = [ticket for ticket in posted if ticket.path == subject.path]
    # Posts are in order, so whoever is beyond it and not on its path has no part in it.
    done = any(ticket.seq >= subject.seq for ticket in own or posted)
    return "" if done else "never posted it; "


def _has_diverged(status: RankStatus) -> bool:
    """Whether it says so itself."""
    return status.activity is Activity.FAILED and status.where.startswith(_DIVERGENCE)


def _diverged(statuses: Sequence[RankStatus]) -> dict[int, str]:
    """Ranks whose ticket of some seq is not that of the others; all who differ, if none is more."""
    found: dict[int, str] = {}
    by_seq: dict[int, dict[int, str]] = {}
    for status in statuses:
        for ticket in status.tickets:
            by_seq.setdefault(ticket.seq, {})[status.rank] = str(ticket)
    for _, issued in sorted(by_seq.items()):
        counts = Counter(issued.values()).most_common()
        if len(counts) < 2:
            continue
        agreed = counts[0][0] if counts[0][1] > counts[1][1] else None
        others = agreed or "; ".join(text for text, _ in counts)
        for rank, words in issued.items():
            if words != agreed:
                found.setdefault(rank, f"its ticket is {words}, that of others {others}")
    return found


def _judge(
    status: RankStatus,
    subject: _Subject | None,
    diverged: dict[int, str],
    now: float,
    deadline_s: float,
    silent: bool,
) -> tuple[Verdict, str]:
    if _has_diverged(status):
        return Verdict.DIVERGED, status.where
    if status.activity is Activity.FAILED and not status.where.startswith(_CONSEQUENCE):
        return Verdict.RAISED, status.where
    if status.activity is Activity.ABSENT:
        return Verdict.MISSING, "nothing has been heard of it"
    if status.activity is Activity.LEFT:
        return Verdict.MISSING, f"it left its loop in order {_ago(status.since, now)}"
    if status.process is ProcessState.GONE and status.activity is not Activity.FAILED:
        last = f"; last it was {_doing(status, now)}"
        return Verdict.DEAD, f"its process {status.pid} has ended without a last word{last}"
    share = _lacks(status, subject)
    if status.rank in diverged:
        return Verdict.DIVERGED, share + diverged[status.rank]
    if status.process is ProcessState.STOPPED:
        return Verdict.BLOCKED, f"{share}{_doing(status, now)} (process stopped, state T)"
    if silent:
        why = "a C call holds the interpreter, or the machine gives it no time"
        if status.process is ProcessState.UNKNOWN:
            why = "it is on another host, where it is stopped, dead, or cut off"
        silence = f"no sign of life for {now - status.alive_at:.1f} s ({why})"
        return Verdict.BLOCKED, f"{share}{_doing(status, now)}; {silence}"
    if status.activity is Activity.FAILED:
        return Verdict.WAITING, status.where
    if status.activity is Activity.WAITING:
        if share and deadline_s:
            return Verdict.MISSING, f"{share}{_doing(status, now)} instead"
        return Verdict.WAITING, _doing(status, now)
    if not deadline_s or not share or subject is None:
        return Verdict.RUNNING, _doing(status, now)
    if now - status.moved_at < _STILL * (now - subject.began):
        return Verdict.SLOW, f"{share}{_doing(status, now)}; it moved on while others waited"
    if status.places > _FEW_PLACES:
        seen = f"seen on {status.places} different lines since"
        return Verdict.SLOW, f"{share}{_doing(status, now)}; {seen}"
    return Verdict.BLOCKED, f"{share}{_doing(status, now)}"


def _doing(status: RankStatus, now: float) -> str:
    seconds = f"for {max(0.0, now - status.moved_at):.1f} s"
    if status.activity is Activity.WAITING:
        return f"waiting {seconds} for {_wait_of(status)}"
    if status.activity is Activity.FAILED:
        return f"ending after {status.where}"
    place = f", at {status.place}" if status.place else ""
    last = status.tickets[-1] if status.tickets else None
    if last is None:
        return f"in host code {seconds}{place}, before its first ticket"
    if last.reached == "computing":
        return f"in host code {seconds}{place}, computing towards {_brief(last)}"
    return f"in host code {seconds}{place}, after {_brief(last)}"


def _ago(then: float, now: float) -> str:
    return f"{max(0.0, now - then):.1f} s ago"


def _brief(ticket: TicketMark) -> str:
    return f"{ticket.path}/{ticket.role} {ticket.stage} (seq {ticket.seq})"


def _in_words(
    found: Diagnosis,
    statuses: Sequence[RankStatus],
    subject: _Subject | None,
    now: float,
    note: str,
) -> str:
    causes = found.causes
    parts = [f"rank {rank.rank} is {rank.verdict}: {rank.what}" for rank in causes]
    waiting = [rank.rank for rank in found.ranks if rank.verdict is Verdict.WAITING]
    if waiting and subject is not None:
        parts.append(f"{_listed(waiting)} waited {max(0.0, now - subject.began):.1f} s")
    if not causes:
        running = any(rank.verdict is Verdict.RUNNING for rank in found.ranks)
        done = "every rank that takes part has done its share: the transport stands still"
        parts.append("no rank is seen to be at fault" if running else done)
        parts += [note] if note else []
    quoted = causes[:4] or found.ranks[:4]
    last = "; ".join(
        f"rank {rank.rank}: {_last(rank.tickets)}" for rank in _with_one_more(found, quoted)
    )
    head = "" if subject is None else f"{subject.name}: "
    return " ".join(f"{head}{'; '.join(parts)}. Last tickets: {last}".split())


def _with_one_more(found: Diagnosis, quoted: Sequence[RankDiagnosis]) -> list[RankDiagnosis]:
    """And one rank that is well, to compare with."""
    well = (rank for rank in found.ranks if rank not in quoted)
    return [*quoted, *([other] if (other := next(well, None)) else [])]


def _last(tickets: Sequence[TicketMark]) -> str:
    last = tickets[-_NUM_QUOTED:]
    return ", ".join(f"{_brief(ticket)} {ticket.reached}" for ticket in last) or "none"


def _listed(ranks: Iterable[int]) -> str:
    """ranks 0-2, 5"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    word = "rank" if len(runs) == 1 and len(runs[0]) == 1 else "ranks"
    return f"{word} {', '.join(texts)}"
