"""Whatever happens to forked ranks, the case ends and the next one is not touched by it."""

import signal
from collections.abc import Callable, Sequence

import pytest
from tests.hazards import programs

from interlace.rollout.verify.hazards.forks import Forks
from interlace.rollout.verify.hazards.hazard import Outcome, Processes, RankEnd


def never(ends: Sequence[RankEnd]) -> Outcome:
    raise AssertionError("only the ends are asked for")


def case(program: Callable[[int, int, str], str], deadline_s: float = 20.0) -> Processes:
    return Processes(program=program, judge=never, deadline_s=deadline_s)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_hang_or_die_end_with_their_case() -> None:
    with Forks() as forks:
        returned, killed = forks.run(case(programs.stays, deadline_s=0.3))
        assert (returned.status, returned.said) == (0, "rank 0 of 2")
        assert (killed.status, killed.said) == (-signal.SIGKILL, "")
        raised, died = forks.run(case(programs.dies))
        assert raised.status == 1
        assert raised.stderr.endswith("ValueError: on purpose\n")
        assert died.status == -signal.SIGKILL
