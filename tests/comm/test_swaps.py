"""Order swaps below the sequencer on four real ranks; small counts of what `make swaps` does."""

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from tests.comm.test_processes import ENVIRONMENT

from interlace.comm.windows import native
from interlace.rollout.verify.swaps.injection import Injection
from interlace.rollout.verify.swaps.rank import ARMS, Ended
from interlace.rollout.verify.swaps.report import outcome, wrongs
from interlace.rollout.verify.swaps.run import Run


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.skipif(native() is None, reason="the window was built without a compiler")
def test_twenty_swaps_are_named_on_every_rank_and_the_controls_go_as_they_should() -> None:
    # A program of its own: it forks, which a process with threads should not.
    command = [sys.executable, "-m", "interlace.rollout.verify.swaps", "--count", "20"]
    run = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=140, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "named at the post 16" in run.stdout


def test_what_is_injected_is_a_function_of_seed_and_number() -> None:
    drawn = [Injection.draw(3, number, 4, ("order",)) for number in range(200)]
    assert drawn == [Injection.draw(3, number, 4, ("order",)) for number in range(200)]
    for name in ("rank", "first", "relation", "equal", "one_strategy", "after"):
        assert min(Counter(getattr(one, name) for one in drawn).values()) > 20


FIRST, SECOND = "epoch 0 step 3 seq 5 decode/tp 0.views", "epoch 0 step 3 seq 6 prefill/ep 0.counts"
NAMED = f"OrderError: rank 1: {FIRST} comes after {SECOND}: nothing was posted"


def seen(errors: Sequence[str], verdict: str, *, step: int = 3) -> Run:
    where = {"step": 3, "first": FIRST, "second": SECOND, "equal": False}
    return Run(
        arm=ARMS["order, window"],
        ends=tuple(
            Ended(
                rank=rank,
                epoch=0,
                injection={"rank": 1, "kind": "order"},
                injected=where if rank == 1 else None,
                step=3 if rank == 1 else step,
                error=error,
                verdict=verdict if error else "",
                seconds=0.1,
            )
            for rank, error in enumerate(errors)
        ),
    )


def test_a_swap_counts_as_named_only_if_all_ranks_name_rank_and_tickets_within_a_step() -> None:
    errors = ["RankFailureError: x", NAMED, "RankFailureError: x", "RankFailureError: x"]
    verdict = f"{FIRST}: rank 1 is DIVERGED: {NAMED}. Last tickets: none"
    assert wrongs([seen(errors, verdict)]) == []
    for other in (
        seen(errors, verdict.replace("rank 1 is", "rank 0 is")),
        seen(errors, verdict.replace("seq 6", "seq 7")),
        seen(errors, verdict, step=5),
        seen([""] * 4, ""),
        seen(["", "", "WrongDataError: y", ""], verdict),
    ):
        assert wrongs([other])


def test_a_run_without_a_place_for_its_swap_is_no_swap_that_was_named() -> None:
    nowhere = seen([""] * 4, "")
    nowhere = dataclasses.replace(
        nowhere, ends=tuple(dataclasses.replace(end, injected=None) for end in nowhere.ends)
    )
    assert outcome(nowhere) == "no place found"
    assert wrongs([nowhere])
