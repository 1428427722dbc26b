"""The driver of a rank's own process: every wait has a deadline and a name."""

from typing import Any

import pytest

from interlace.comm.collectives import Early, Finish, Park, perform
from interlace.comm.driver import run_blocking
from interlace.comm.errors import BufferInFlightError, CollectiveTimeoutError, PeerLostError
from interlace.comm.waiter import SleepWaiter


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.parked: list[float] = []

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += max(seconds, 0.0001)


class Transport:
    """Done after so many polls; the answer is the handle."""

    timeout_s = 2.0

    def __init__(self, polls: float, error: Exception | None = None) -> None:
        self.left, self.error = polls, error

    def poll(self, handle: Any) -> bool:
        self.left -= 1
        return self.left < 0

    def result(self, handle: Any) -> Any:
        if self.error is not None:
            raise self.error
        return handle


async def waits(transport: Transport, handle: Any = "answer") -> Any:
    return await perform(
        Finish(communicator=transport, handle=handle, where="rank 1: step 7 decode/ep 3.combine")
    )


def drive(rank: Any, time: FakeTime) -> Any:
    return run_blocking(
        rank, park=time.parked.append, clock=time.clock, waiter=SleepWaiter(time.pause)
    )


def test_an_answer_that_is_there_costs_no_pause() -> None:
    time = FakeTime()
    assert drive(waits(Transport(0)), time) == "answer"
    assert time.pauses == []


def test_an_answer_that_is_there_is_not_put_into_words() -> None:
    class Words:
        asked = 0

        def __str__(self) -> str:
            self.asked += 1
            return "rank 1: step 7"

    words = Words()
    for polls, asked in ((0, 0), (3, 1)):
        transport = Transport(polls)
        request = Finish(communicator=transport, handle="answer", where=words)
        assert drive(perform(request), FakeTime()) == "answer"
        assert words.asked == asked


def test_a_wait_always_lets_go_of_the_core_and_for_longer_the_longer_it_takes() -> None:
    time = FakeTime()
    assert drive(waits(Transport(300)), time) == "answer"
    assert 0 < time.pauses[0] < time.pauses[-1] == 0.0005


def test_a_wait_past_the_deadline_names_what_it_waited_for() -> None:
    time = FakeTime()
    with pytest.raises(
        CollectiveTimeoutError,
        match=r"no answer within 2 s: rank 1: step 7 decode/ep 3\.combine; a rank of this group",
    ):
        drive(waits(Transport(float("inf"))), time)
    assert 102.0 < time.now < 102.01


def test_another_result_that_is_there_first_is_handed_over_and_the_wait_goes_on() -> None:
    main, other = Transport(3), Transport(1)

    async def rank() -> Any:
        request = Finish(
            communicator=main, handle="main", where="here", others=((other, "another"),)
        )
        first = await perform(request)
        return first, await waits(main, "main")

    answer = drive(rank(), FakeTime())
    assert answer == (Early(index=0, value="another"), "main")


def test_who_is_busy_does_not_wait() -> None:
    main, other = Transport(3), Transport(100)
    pieces = []

    async def rank() -> Any:
        others = ((other, "another"),)
        request = Finish(communicator=main, handle="main", where="here", others=others, busy=True)
        while isinstance(answer := await perform(request), Early):
            assert answer == Early(index=1, value=None)
            pieces.append(1)
        return answer

    time = FakeTime()
    assert drive(rank(), time) == "main"
    assert time.pauses == []
    assert 0 < len(pieces) < 3


def test_who_is_told_to_give_up_does_so_during_a_wait() -> None:
    asked = []

    def check() -> None:
        asked.append(True)
        if len(asked) == 3:
            raise KeyboardInterrupt

    time = FakeTime()
    with pytest.raises(KeyboardInterrupt):
        run_blocking(
            waits(Transport(float("inf"))),
            park=time.parked.append,
            clock=time.clock,
            waiter=SleepWaiter(time.pause),
            check=check,
        )


def test_a_transport_that_gives_up_is_a_typed_error_with_the_same_name() -> None:
    broken = Transport(0, RuntimeError("Connection closed by peer"))
    with pytest.raises(PeerLostError, match=r"rank 1: step 7 decode/ep 3\.combine: Connection clo"):
        drive(waits(broken), FakeTime())


def test_our_own_errors_pass_unchanged() -> None:
    with pytest.raises(BufferInFlightError, match=r"^mine$"):
        drive(waits(Transport(0, BufferInFlightError("mine"))), FakeTime())


def test_park_parks_for_the_agreed_time_and_answers_nothing() -> None:
    async def rank() -> Any:
        return await perform(Park(ms=25))

    time = FakeTime()
    assert drive(rank(), time) is None
    assert time.parked == [0.025]


def test_anything_else_a_rank_suspends_on_is_a_type_error() -> None:
    async def rank() -> None:
        await perform("a socket")

    with pytest.raises(TypeError, match="a rank suspended on 'a socket'; only Finish and Park"):
        drive(rank(), FakeTime())
