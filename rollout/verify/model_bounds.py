"""What the model checker is asked: bounds that must hold, and mutants that must not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """One exhaustive search that must find nothing."""

    name: str
    covers: str
    macros: Mapping[str, int] = field(default_factory=dict)
    quick: bool = False
    """Small enough for the subset that CI and `interlace verify` run."""
    livelock: bool = False
    """Search for endless runs that make no progress, instead of broken promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One rule of the design taken away; the search must find a broken promise."""

    name: str
    rule: str
    macros: Mapping[str, int]
    promises: tuple[str, ...]
    """Any of these may be the first that is seen broken."""
    slow: bool = False
    """Its counterexample is deep; left to `make model`."""
    livelock: bool = False


_ALONE = {"TP": 1, "ROLES_D": 0, "ROLES_P": 0}
"""Every rank leads itself; all collectives are of all ranks."""
_PAIR = {"R": 2, "TP": 1}
_SMALL = {**_PAIR, "OPS_D": 1, "OPS_P": 2, "ROLES_D": 0, "ROLES_P": 0}
_LONG = {"CHUNK_STEPS": 3}
_RENEWED = {"CRASHES": 1, "EPOCHS": 2}

BOUNDS = (
    Bounds(name="pair", covers="two ranks, two roles", macros=_PAIR, quick=True),
    Bounds(
        name="pair-crash",
        covers="a crash of either rank, then the next epoch",
        macros={**_PAIR, **_RENEWED, "OPS_D": 1, "OPS_P": 2},
        quick=True,
    ),
    Bounds(
        name="pair-torn",
        covers="posts and reads word by word: begun, data, released; each message checked twice",
        macros={**_PAIR, "FINE": 1},
    ),
    Bounds(name="order", covers="three ranks, a pair and a single, two roles"),
    Bounds(
        name="early stop",
        covers="the word that no more requests come arrives while some are under way",
        macros={"STOPS_EARLY": 1},
    ),
    Bounds(
        name="long",
        covers="a prefill over three steps, three tokens",
        macros={**_LONG, "TOKENS": 3},
    ),
    Bounds(
        name="link",
        covers="messages travel: later ones of the other path pass them",
        macros={"LINK": 1},
    ),
    Bounds(
        name="link-abort",
        covers="the same with an abort: a prefill is dropped while its messages travel",
        macros={"LINK": 1, "ABORTS": 1},
    ),
    Bounds(
        name="device",
        covers="a device that runs one collective at a time, in the order of posts, as NCCL's do",
        macros={"DEVICE": 1},
    ),
    Bounds(name="abort", covers="one abort at any time", macros={**_LONG, "ABORTS": 1}),
    Bounds(
        name="drop-again",
        covers="a second request a leader, so another prefill follows a dropped one; two ranks",
        macros={**_PAIR, "REQUESTS": 2, "ABORTS": 1},
    ),
    Bounds(
        name="ghosts",
        covers="three leaders, so an aborted row's prefill goes on for others' rows",
        macros={**_ALONE, **_LONG, "OPS_D": 1, "ABORTS": 1},
    ),
    Bounds(
        name="update", covers="one weight update, ready anywhere at any time", macros={"UPDATES": 1}
    ),
    Bounds(
        name="update-long",
        covers="the same while a prefill spans three steps",
        macros={**_LONG, "UPDATES": 1, "OPS_D": 1, "ROLES_D": 0},
    ),
    Bounds(name="crash", covers="one crash at any wait", macros={"CRASHES": 1}),
    Bounds(
        name="renewal", covers="one crash at any wait, then the next epoch", macros=dict(_RENEWED)
    ),
    Bounds(
        name="renewal-abort",
        covers="the same with an abort",
        macros={**_RENEWED, "ABORTS": 1},
    ),
    Bounds(
        name="renewal-update",
        covers="the same with an update, two ranks",
        macros={**_PAIR, **_RENEWED, "UPDATES": 1},
    ),
    Bounds(
        name="old-memory",
        covers="the next epoch in memory that was not wiped: old messages are refused; two ranks",
        macros={**_PAIR, **_RENEWED, "SAME_MEMORY": 1},
    ),
    Bounds(
        name="swap",
        covers="one rank walks a step in another order: nothing of it is committed",
        macros={"SWAPS": 1},
    ),
    Bounds(
        name="forgery",
        covers="one message of one path where the other's belongs: refused",
        macros={"FORGERIES": 1},
    ),
    Bounds(
        name="again",
        covers="two requests a leader, prompts of two chunks, two ranks",
        macros={**_PAIR, "REQUESTS": 2, "CHUNKS": 2, "OPS_P": 2},
    ),
    Bounds(name="four", covers="four ranks, two pairs, two roles", macros={"R": 4, "OPS_P": 2}),
    Bounds(name="serial", covers="mode serial", macros={"SERIAL": 1}),
    Bounds(name="whole-forward", covers="mode whole_forward", macros={"WHOLE_FORWARD": 1}),
    Bounds(
        name="livelock",
        covers="no endless run without progress while a request is under way; weak fairness",
        macros={**_SMALL, "ABORTS": 1, "UPDATES": 1},
        livelock=True,
    ),
)

MUTANTS = (
    Mutant(
        name="one order",
        rule="all ranks issue the tickets of both paths in one order",
        macros={"M_FREE_ORDER": 1},
        promises=("same_order",),
    ),
    Mutant(
        name="one order, unobserved",
        rule="the same, with nobody looking at the order: ranks wait for each other",
        macros={"M_FREE_ORDER": 1, "UNOBSERVED": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="one order, on a device",
        rule="the same on a device that runs collectives in the order of posts",
        macros={"M_FREE_ORDER": 1, "UNOBSERVED": 1, "DEVICE": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="own windows",
        rule="each path sends from slots of its own",
        macros={"M_ONE_WINDOW": 1},
        promises=("no_error_without_cause", "no_unread_overwritten"),
    ),
    Mutant(
        name="own windows, unchecked",
        rule="the same, with receivers that do not look at headers",
        macros={"M_ONE_WINDOW": 1, "M_NO_HEADER": 1},
        promises=("no_foreign_message",),
    ),
    Mutant(
        name="headers",
        rule="a receiver compares each header with its ticket",
        macros={"M_NO_HEADER": 1, "FORGERIES": 1},
        promises=("no_foreign_message",),
    ),
    Mutant(
        name="two slots",
        rule="a channel has two slots",
        macros={"SLOTS": 1},
        promises=("no_unread_overwritten",),
    ),
    Mutant(
        name="slots by channel",
        rule="slots are counted per (path, role), not per path",
        macros={"M_SLOT_PER_PATH": 1, "OPS_D": 3, "ROLES_D": 2},
        promises=("no_unread_overwritten",),
    ),
    Mutant(
        name="settle first",
        rule="a path's collective is settled before its next is posted",
        macros={"M_TWO_OUTSTANDING": 1, "ROLES_P": 0},
        promises=("no_unread_overwritten",),
    ),
    Mutant(
        name="counts go on",
        rule="comm_seq is never rewound, not even for a new pass",
        macros={"M_REWIND": 1, "REQUESTS": 2},
        promises=("no_unread_overwritten", "no_foreign_message"),
    ),
    Mutant(
        name="release last",
        rule="a message is released after it is written",
        macros={**_PAIR, "M_RELEASE_FIRST": 1, "FINE": 1},
        promises=("no_error_without_cause",),
    ),
    Mutant(
        name="idle ranks take part",
        rule="a rank without rows walks the whole program",
        macros={"M_IDLE_SKIPS": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="plan from agreed numbers",
        rule="nothing that arrives after the proposal enters the plan",
        macros={"M_LATE_EVENT": 1},
        promises=("same_order", "no_error_without_cause", "everybody_ends"),
    ),
    Mutant(
        name="agreed drop",
        rule="a prefill is dropped when agreed live rows are 0, never by one leader",
        macros={**_ALONE, "OPS_D": 1, "OPS_P": 2, "M_LOCAL_ABORT": 1, "ABORTS": 1},
        promises=("no_error_without_cause", "everybody_ends", "same_order"),
        slow=True,
    ),
    Mutant(
        name="settled drop",
        rule="a dropped prefill's outstanding collective is settled first",
        macros={**_PAIR, "M_DROP_UNSETTLED": 1, "REQUESTS": 2, "ABORTS": 1},
        promises=("one_outstanding",),
    ),
    Mutant(
        name="aborted in flight",
        rule="what an aborted request's prefill returns is discarded",
        macros={**_ALONE, "OPS_D": 1, "OPS_P": 2, "M_ABORT_EMITS": 1, "ABORTS": 1},
        promises=("nothing_after_abort",),
        slow=True,
    ),
    Mutant(
        name="agreed stop",
        rule="ranks stop by an agreed flag, never because they are idle",
        macros={"M_STOP_LOCAL": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="provisional",
        rule="a step's results are committed after the exchange that compares it",
        macros={"M_EARLY_COMMIT": 1, "SWAPS": 1},
        promises=("agreed_before_commit",),
    ),
    Mutant(
        name="hashes see order",
        rule="hashes hold the place among the tickets of all paths",
        macros={"M_HASH_BLIND": 1, "SWAPS": 1},
        promises=("agreed_before_commit",),
    ),
    Mutant(
        name="discarded by a failure",
        rule="provisional results do not outlive their epoch",
        macros={"M_KEEP_PROVISIONAL": 1, **_RENEWED},
        promises=("agreed_before_commit", "no_gap_no_duplicate"),
    ),
    Mutant(
        name="update ends prefill",
        rule="the step of an update issues all that is left of a prefill",
        macros={"M_PREFILL_CROSSES": 1, "UPDATES": 1, **_LONG, "OPS_D": 1, "ROLES_D": 0},
        promises=("one_version_per_prefill",),
    ),
    Mutant(
        name="agreed update",
        rule="weights change when all ranks hold them, never when one does",
        macros={"M_UPDATE_LOCAL": 1, "UPDATES": 1},
        promises=("versions_equal", "no_error_without_cause", "everybody_ends", "same_order"),
    ),
    Mutant(
        name="bounded bypass",
        rule="while anybody decodes a step issues at most its share of a prefill",
        macros={"M_BYPASS": 1, **_LONG, "OPS_D": 1, "ROLES_D": 0},
        promises=("bounded_bypass",),
    ),
    Mutant(
        name="prefill moves",
        rule="every step issues at least one boundary of a prefill in flight",
        macros={"M_STARVES": 1},
        promises=("prefill_moves",),
    ),
    Mutant(
        name="prompts start",
        rule="what waits is started in the end",
        macros={**_SMALL, "M_NEVER_STARTS": 1},
        promises=("livelock",),
        livelock=True,
    ),
    Mutant(
        name="watchdog",
        rule="somebody notices a rank that is gone",
        macros={"M_NO_WATCHDOG": 1, "CRASHES": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="poison in the exchange",
        rule="the wait of the exchange looks at the poison word",
        macros={"M_DEAF": 1, "CRASHES": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="poison in the description",
        rule="so does the wait for the leader's description",
        macros={"M_DEAF_DESCRIPTION": 1, "CRASHES": 1},
        promises=("everybody_ends",),
    ),
    Mutant(
        name="epoch in the header",
        rule="a message names its epoch",
        macros={"M_NO_EPOCH": 1, "SAME_MEMORY": 1, **_RENEWED},
        promises=("no_foreign_message",),
    ),
    Mutant(
        name="renew when all have left",
        rule="the next epoch begins when every rank has left the last",
        macros={"M_RENEW_EARLY": 1, **_RENEWED},
        promises=("no_error_without_cause", "no_unread_overwritten", "everybody_ends"),
    ),
    Mutant(
        name="new memory",
        rule="a rank of an old epoch cannot write into the memory of the next",
        macros={"M_OLD_WRITER": 1, **_RENEWED},
        promises=("no_error_without_cause", "no_unread_overwritten"),
    ),
)

SEARCHES: tuple[Bounds | Mutant, ...] = (*BOUNDS, *MUTANTS)
"""In the order in which they are made and shown."""
