"""The executor refuses what is not its ticket's before anything is posted."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
from tests.comm.toy import DECODE, PREFILL, Recording, local_world, stub_result

from interlace.comm.collectives import (
    Collective,
    Exchange,
    Forward,
    Gather,
    Watch,
    perform,
    preemption_point,
)
from interlace.comm.errors import DivergedError, OrderError
from interlace.comm.journal import Journal
from interlace.comm.path import Op, Path, Ticket
from interlace.comm.plan import PlanConfig, PlanState, StepPlan, plan
from interlace.comm.proposal import Proposal
from interlace.comm.sequencer import Sequencer, record_program, run_straight

STAGES = ("embed", "mix", "logits")
PROGRAM = tuple(Op(kind="Gather", role="ep", stage=stage) for stage in STAGES)
PATHS = tuple(
    Path(name=name, groups={"ep": ((0,),)}, program=PROGRAM, whole=name == DECODE, work=(name,))
    for name in (DECODE, PREFILL)
)
CONFIG = PlanConfig(paths=PATHS, mode="multiplexed", chunk_steps=3)
BOTH = Proposal(rank=0, leader=True, decode_rows=1, waiting_tokens=1)
ONLY_DECODE = Proposal(rank=0, leader=True, decode_rows=1)


async def gathers(stages: Sequence[str] = STAGES, role: str = "ep") -> list[Any]:
    return [await perform(Gather(role=role, stage=stage, payload=[stage])) for stage in stages]


class Rank:
    """A sequencer of one rank in a world of one, and what it posted."""

    def __init__(
        self, paths: Sequence[Path] = PATHS, *, watched: Sequence[str] = (DECODE,)
    ) -> None:
        self.world, self.posted = local_world(1), list[Ticket]()
        self.late: dict[int, int] = {}
        """Decode's comm_seq -> results of prefill that must have been taken before it is done."""
        self.prefills_taken = 0
        self.until_piece: dict[int, int] = {}
        """Decode's comm_seq -> pieces of prefill that must have been computed before it is done."""
        self.pieces: list[str] = []
        self.watches: list[Watch | None] = []
        """What prefill was told at each of its preemption points."""
        self.entered: list[str] = []
        self.inside: str | None = None
        self.sequencer = Sequencer(
            rank=0,
            paths=paths,
            communicators={(path.name, "ep"): Watching(self, (path.name, "ep")) for path in paths},
            around=self.around,
            clock=itertools.count().__next__,
            journal=Journal(),
            watches={(path, "ep"): lambda handle: ("message", handle.number) for path in watched},
        )

    @contextmanager
    def around(self, path: str) -> Iterator[None]:
        assert self.inside is None
        self.inside = path
        self.entered.append(path)
        try:
            yield
        finally:
            self.inside = None

    def walk(self, plan: StepPlan, started: dict[str, Forward]) -> dict[str, Any]:
        try:
            return self.world.run([self.sequencer.walk(plan, started)])[0]
        except BaseException:
            for forward in started.values():
                forward.close()
            raise


class Watching(Recording):
    """Posts only inside its own path's surroundings: on a GPU, on that path's stream."""

    def __init__(self, rank: Rank, key: tuple[str, str]) -> None:
        super().__init__(rank.world.communicator(key, (0,), 0), rank.posted)
        self.rank, self.path = rank, key[0]

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        assert self.rank.inside == self.path
        return super().post(request, ticket)

    def poll(self, handle: Any) -> bool:
        if self.path == DECODE and (
            self.rank.prefills_taken < self.rank.late.get(handle.number, 0)
            or len(self.rank.pieces) < self.rank.until_piece.get(handle.number, 0)
        ):
            return False
        return super().poll(handle)

    def result(self, handle: Any) -> Any:
        self.rank.prefills_taken += self.path == PREFILL
        return super().result(handle)


async def in_pieces(rank: Rank, num: int) -> list[Any]:
    """As `gathers`, with so many pieces of computation before each collective."""
    answers = []
    for stage in STAGES:
        for piece in range(num):
            if piece:
                rank.watches.append(await preemption_point())
            assert rank.inside == PREFILL
            rank.pieces.append(stage)
        answers.append(await perform(Gather(role="ep", stage=stage, payload=[stage])))
    return answers


def made(proposal: Proposal = ONLY_DECODE, state: PlanState | None = None) -> StepPlan:
    return plan(state or PlanState(), [proposal], CONFIG)


def test_a_walk_returns_the_output_of_each_path_that_finishes() -> None:
    rank = Rank()
    step = made(BOTH)
    outputs = rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})
    assert outputs == {DECODE: [[["embed"]], [["mix"]], [["logits"]]]}
    assert rank.posted == list(step.tickets)


def test_an_unfinished_path_carries_one_collective_into_the_next_step() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})
    settled = {(t.path, t.stage) for t in rank.sequencer.journal.tickets}
    assert (PREFILL, "embed") not in settled
    for _ in range(2):
        step = plan(step.after, [replace(BOTH, waiting_tokens=0, live_rows=1)], CONFIG)
        outputs = rank.walk(step, {DECODE: gathers()})
    assert outputs[PREFILL] == [[["embed"]], [["mix"]], [["logits"]]]


def test_a_path_computes_on_while_another_waits_and_posts_in_its_turn_all_the_same() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.late[2] = 1
    outputs = rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})
    assert outputs == {DECODE: [[["embed"]], [["mix"]], [["logits"]]]}
    assert rank.posted == list(step.tickets)
    (early,) = [t for t in rank.sequencer.journal.tickets if t.path == PREFILL]
    waiting = rank.sequencer.journal.tickets[-1]
    assert waiting.posted_at < early.settled_at < waiting.settled_at
    last = plan(step.after, [replace(BOTH, waiting_tokens=0, live_rows=1)], CONFIG)
    rank.walk(last, {DECODE: gathers()})
    last = plan(last.after, [replace(BOTH, waiting_tokens=0, live_rows=1)], CONFIG)
    outputs = rank.walk(last, {DECODE: gathers()})
    assert outputs[PREFILL] == [[["embed"]], [["mix"]], [["logits"]]]


def test_a_path_that_has_computed_ahead_can_still_be_dropped() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.late[2] = 1
    rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})
    assert rank.prefills_taken == 1
    step = plan(step.after, [replace(BOTH, waiting_tokens=0)], CONFIG)
    assert step.drop == (PREFILL,)
    assert set(rank.walk(step, {DECODE: gathers()})) == {DECODE}
    step = plan(step.after, [BOTH], CONFIG)
    rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})


def overlaps(rank: Rank) -> list[str]:
    """Stretches of computation that began before the last one ended."""
    tickets = rank.sequencer.journal.tickets
    spans = sorted((*span, t.path, t.stage) for t in tickets for span in t.computing)
    return [f"{a} {b}" for a, b in itertools.pairwise(spans) if a[1] > b[0]]


def test_a_path_stands_aside_as_soon_as_what_another_waits_for_is_there() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.until_piece[1] = 7  # five before prefill's first collective, two of its second
    rank.walk(step, {DECODE: gathers(), PREFILL: in_pieces(rank, 5)})
    assert rank.pieces == ["embed"] * 5 + ["mix"] * 2
    assert rank.posted == list(step.tickets)
    for _ in range(2):
        step = plan(step.after, [replace(BOTH, waiting_tokens=0, live_rows=1)], CONFIG)
        outputs = rank.walk(step, {DECODE: gathers()})
    assert outputs[PREFILL] == [[["embed"]], [["mix"]], [["logits"]]]
    assert rank.pieces == ["embed"] * 5 + ["mix"] * 5 + ["logits"] * 5
    mix = next(t for t in rank.sequencer.journal.tickets if (t.path, t.stage) == (PREFILL, "mix"))
    assert len(mix.pauses) == 2
    assert len(mix.computing) == 3
    assert overlaps(rank) == []


def test_what_stands_aside_is_told_what_to_watch_for_as_long_as_another_path_waits() -> None:
    rank = Rank()
    rank.until_piece[1] = 7
    step = made(BOTH)
    rank.walk(step, {DECODE: gathers(), PREFILL: in_pieces(rank, 5)})
    assert rank.watches == [None] * 4 + [Watch(("message", 1))]
    for _ in range(2):
        step = plan(step.after, [replace(BOTH, waiting_tokens=0, live_rows=1)], CONFIG)
        rank.walk(step, {DECODE: gathers()})
    assert rank.watches[5:] == [None] * 7


def test_where_nothing_can_be_watched_for_that_is_said() -> None:
    rank = Rank(watched=(PREFILL,))
    rank.until_piece[1] = 7
    rank.walk(made(BOTH), {DECODE: gathers(), PREFILL: in_pieces(rank, 5)})
    assert rank.watches == [None] * 4 + [Watch(None)]


def test_nobody_stands_aside_where_nobody_waits() -> None:
    rank = Rank()
    step = made(replace(ONLY_DECODE, decode_rows=0, waiting_tokens=1))
    outputs = rank.walk(step, {PREFILL: in_pieces(rank, 5)})
    assert outputs == {PREFILL: [[["embed"]], [["mix"]], [["logits"]]]}
    assert rank.watches == [None] * 12
    assert all(not ticket.pauses for ticket in rank.sequencer.journal.tickets)


def test_a_path_that_stands_aside_can_still_be_dropped() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.until_piece[1] = 7
    rank.walk(step, {DECODE: gathers(), PREFILL: in_pieces(rank, 5)})
    step = plan(step.after, [replace(BOTH, waiting_tokens=0)], CONFIG)
    assert step.drop == (PREFILL,)
    assert set(rank.walk(step, {DECODE: gathers()})) == {DECODE}
    assert len(rank.pieces) == 7
    step = plan(step.after, [BOTH], CONFIG)
    rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})


def test_a_program_is_recorded_and_driven_alone_through_preemption_points() -> None:
    rank = Rank()
    rank.inside = PREFILL
    assert record_program(in_pieces(rank, 3), {"ep": 1}, stub_result) == PROGRAM
    (end,) = [rank.world.communicator(("alone", "ep"), (0,), 0)]
    answers = run_straight(in_pieces(rank, 3), {"ep": end})
    assert answers == [[["embed"]], [["mix"]], [["logits"]]]


def test_each_post_is_compared_first_where_that_is_asked_for() -> None:
    world, posted = local_world(2), list[Ticket]()
    paths = tuple(replace(path, groups={"ep": ((0, 1),)}) for path in PATHS)
    config = replace(CONFIG, paths=paths)

    def sequencer(rank: int) -> Sequencer:
        def ends(kind: str, watch: bool) -> dict[tuple[str, str], Any]:
            made = {(p.name, "ep"): world.communicator((kind, p.name), (0, 1), rank) for p in paths}
            return {key: Recording(end, posted) if watch else end for key, end in made.items()}

        return Sequencer(
            rank=rank,
            paths=paths,
            communicators=ends("data", watch=True),
            prechecks=ends("before", watch=False),
            around=lambda path: nullcontext(),
            clock=itertools.count().__next__,
            journal=Journal(),
        )

    right = plan(PlanState(), [ONLY_DECODE], config)
    first, second, third = right.tickets
    wrong = replace(right, tickets=(first, replace(second, seq=7), third))
    ranks = [sequencer(0).walk(right, {DECODE: gathers()})]
    ranks.append(sequencer(1).walk(wrong, {DECODE: gathers()}))
    told = r"rank 0 is about to post epoch 0 step 0 seq 1 .*; rank 1 is about to post .* seq 7 "
    with pytest.raises(DivergedError, match=told):
        world.run(ranks)
    assert {ticket.seq for ticket in posted} == {0}


def test_ranks_meet_where_the_plan_says_so() -> None:
    rank, config = Rank(), replace(CONFIG, policy="turnstile")
    rank.sequencer._meeting = rank.world.communicator("meeting", (0,), 0)
    step = plan(PlanState(), [BOTH], config)
    assert step.meet_at == 3
    walk, asked = rank.sequencer.walk(step, {DECODE: gathers(), PREFILL: gathers()}), list[str]()
    request = walk.send(None)
    while len(rank.posted) < len(step.tickets):
        asked.append(str(request.where))
        request = walk.send(request.communicator.result(request.handle))
    walk.close()
    rank.sequencer.close()
    assert asked[2] == "rank 0: step 0: all ranks meet"
    assert [PREFILL in where for where in asked] == [False] * len(asked)
    assert rank.posted == list(step.tickets)


def test_each_resume_and_post_is_surrounded_by_its_own_path() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})
    assert rank.entered == [ticket.path for ticket in step.tickets] + [DECODE]


@pytest.mark.parametrize(
    ("stages", "role", "asked", "num_posted"),
    [
        (("embed", "logits"), "ep", "Gather ep logits", 1),
        (("embed", "mix", "mix"), "ep", "Gather ep mix", 2),
        (STAGES, "tp", "Gather tp embed", 0),
    ],
)
def test_a_request_that_is_not_its_tickets_is_refused_before_posting(
    stages: Sequence[str], role: str, asked: str, num_posted: int
) -> None:
    rank = Rank()
    with pytest.raises(OrderError, match=f"asks for {asked}"):
        rank.walk(made(), {DECODE: gathers(stages, role)})
    assert len(rank.posted) == num_posted


def test_the_kind_of_collective_is_checked_too() -> None:
    async def exchanges() -> None:
        await perform(Exchange(role="ep", stage="embed", payload=[1], send=(1,), recv=(1,)))

    rank = Rank()
    with pytest.raises(OrderError, match="asks for Exchange ep embed"):
        rank.walk(made(), {DECODE: exchanges()})
    assert rank.posted == []


def test_a_refusal_names_rank_ticket_what_is_in_flight_and_the_last_tickets() -> None:
    rank = Rank()
    first = made(BOTH)
    rank.walk(first, {DECODE: gathers(), PREFILL: gathers()})
    second = plan(first.after, [replace(ONLY_DECODE, live_rows=1)], CONFIG)
    wrong = gathers(("embed", "elsewhere"))
    with pytest.raises(OrderError) as caught:
        rank.walk(second, {DECODE: wrong})
    assert str(caught.value) == (
        "rank 0: epoch 0 step 1 seq 5 decode/ep mix: the forward pass asks for Gather ep "
        "elsewhere; in flight: epoch 0 step 0 seq 2 prefill/ep embed; last tickets: "
        "0 decode/ep embed; 1 decode/ep mix; 3 decode/ep logits; 4 decode/ep embed"
    )


def test_a_seq_that_does_not_increase_is_refused_before_the_forward_pass_moves() -> None:
    rank = Rank()
    step = made()
    zero, one, two = step.tickets
    with pytest.raises(OrderError, match="seq 0 decode/ep embed: comes after seq 1"):
        rank.walk(replace(step, tickets=(one, zero, two)), {DECODE: misnumbered(one, zero)})
    assert rank.posted == [one]


async def misnumbered(*tickets: Ticket) -> None:
    for ticket in tickets:
        await perform(Gather(role="ep", stage=ticket.op.stage, payload=[]))


def test_a_ticket_is_not_used_twice() -> None:
    rank = Rank()
    step = made()
    rank.walk(step, {DECODE: gathers()})
    with pytest.raises(OrderError, match="seq 0 decode/ep embed: comes after seq 2"):
        rank.walk(step, {DECODE: gathers()})


def test_two_tickets_do_not_share_a_place() -> None:
    rank = Rank()
    step = made(BOTH)
    one, two, *_ = step.tickets
    twins = one, replace(two, seq=one.seq)
    with pytest.raises(OrderError, match="seq 0 decode/ep mix: comes after seq 0"):
        rank.walk(replace(step, tickets=twins), {DECODE: gathers(), PREFILL: gathers()})
    assert rank.posted == [one]


def test_a_forward_pass_that_returns_early_is_refused() -> None:
    rank = Rank()
    with pytest.raises(OrderError, match="seq 2 decode/ep logits: the forward pass already return"):
        rank.walk(made(), {DECODE: gathers(STAGES[:2])})
    assert [ticket.op.stage for ticket in rank.posted] == ["embed", "mix"]


def test_a_forward_pass_that_goes_on_after_its_program_is_refused() -> None:
    rank = Rank()
    with pytest.raises(OrderError, match=r"rank 0: step 0 decode: the program has ended, .* extra"):
        rank.walk(made(), {DECODE: gathers((*STAGES, "extra"))})
    assert len(rank.posted) == 3


def test_exactly_the_paths_that_start_are_given_a_forward_pass() -> None:
    for given in ({}, {DECODE: gathers(), PREFILL: gathers()}, {PREFILL: gathers()}):
        rank = Rank()
        with pytest.raises(OrderError, match=r"rank 0: step 0 starts \['decode'\], but"):
            rank.walk(made(), given)
        assert rank.posted == []


def test_a_path_in_flight_is_not_started_again() -> None:
    rank = Rank()
    step = made(BOTH)
    rank.walk(step, {DECODE: gathers(), PREFILL: gathers()})
    again = replace(made(BOTH), tickets=())
    with pytest.raises(OrderError, match=r"\['prefill'\] are in flight"):
        rank.walk(again, {DECODE: gathers(), PREFILL: gathers()})


def test_a_dropped_path_is_settled_closed_and_may_start_again_in_the_same_step() -> None:
    closed = []

    async def unwanted() -> None:
        try:
            await gathers()
        except GeneratorExit:
            closed.append(True)
            raise

    rank = Rank()
    first = made(BOTH)
    rank.walk(first, {DECODE: gathers(), PREFILL: unwanted()})
    second = plan(first.after, [replace(BOTH, live_rows=0)], CONFIG)
    assert second.drop == (PREFILL,)
    assert PREFILL in second.start
    rank.walk(second, {DECODE: gathers(), PREFILL: gathers()})
    assert closed == [True]
    assert (PREFILL, 0) in {(t.path, t.comm_seq) for t in rank.sequencer.journal.tickets}


def test_an_error_of_the_forward_pass_comes_out_as_it_is() -> None:
    async def broken() -> None:
        await gathers(STAGES[:1])
        raise ZeroDivisionError("inside")

    with pytest.raises(ZeroDivisionError, match="inside"):
        Rank().walk(made(), {DECODE: broken()})


def test_the_journal_says_when_each_ticket_was_resumed_posted_and_settled() -> None:
    rank = Rank()
    rank.walk(made(BOTH), {DECODE: gathers(), PREFILL: gathers()})
    for ticket in rank.sequencer.journal.tickets:
        assert ticket.resumed_at < ticket.computed_at < ticket.posted_at < ticket.settled_at
        assert ticket.members == (0,)
    waited = sum(ticket.waited_s for ticket in rank.sequencer.journal.tickets)
    assert rank.sequencer.waited_s == waited


def test_ranks_outside_a_path_skip_its_tickets() -> None:
    elsewhere = tuple(replace(path, groups={"ep": ((1,),)}) for path in PATHS)
    rank = Rank(elsewhere)
    assert rank.walk(made(BOTH), {}) == {}
    assert rank.posted == []


def test_a_program_is_recorded_from_stub_results() -> None:
    assert record_program(gathers(), {"ep": 3}, stub_result) == PROGRAM


def test_run_straight_blocks_in_every_collective_and_returns_the_output() -> None:
    communicator = local_world(1).communicator("alone", (0,), 0)
    assert run_straight(gathers(), {"ep": communicator}) == [[["embed"]], [["mix"]], [["logits"]]]
