"""What a run is reduced to."""

from __future__ import annotations

import pytest
from tests.peers.made import phase, script

from interlace.rollout.peers.played import (
    PlayedPhase,
    decode_rate,
    equal_tokens,
    figures,
    prefill_rate,
)
from interlace.rollout.peers.scripts import Said
from interlace.rollout.peers.workload import Shape

SHAPE = Shape(batches=(2,))
PHASES = [
    phase("prefill-2", [script("p-0", num_generated=1), script("p-1", num_generated=1)]),
    phase("decode-2", [script("d-0"), script("d-1")]),
    phase("rollout", [script("r-0", num_turns=2)]),
]


def said(*times: float) -> Said:
    return Said(tokens=[round(10 * at) for at in times], times=list(times))


def one(name: str, seconds: float, *scripts: list[Said], cpu_s: float = 1.0) -> PlayedPhase:
    return PlayedPhase(
        name=name, began_at=1.0, ended_at=1.0 + seconds, cpu_s=cpu_s, said=list(scripts)
    )


PREFILL = one("prefill-2", 2.0, [said(1.5)], [said(2.9)])
DECODE = one("decode-2", 3.0, [said(1.1, 1.3, 1.5)], [said(1.2, 1.4, 1.6)])
ROLLOUT = one("rollout", 4.0, [said(1.1, 1.2, 1.3), said(2.1, 2.2, 2.3)], cpu_s=7.5)


def test_a_run_in_figures():
    found = figures(SHAPE, PHASES, [PREFILL, DECODE, ROLLOUT])
    assert found["completion_s"] == pytest.approx(4.0)
    assert found["cpu_s"] == 7.5
    assert found["prefill_tokens_per_s"] == {"2": pytest.approx(3.0)}
    assert found["decode_tokens_per_s"] == {"2": pytest.approx(3 / 0.3)}
    assert found["tokens"] == [[11, 12, 13, 21, 22, 23]]
    assert found["num_tokens"] == 6


def test_decode_is_measured_only_while_all_turns_decode():
    alone_before_and_behind = one("d", 9, [said(1.0, 2.0, 5.0)], [said(4.0, 4.5, 5.0, 6.0, 7.0)])
    assert decode_rate(alone_before_and_behind) == pytest.approx(3 / 1.0)
    never_together = one("d", 9, [said(1.0, 2.0)], [said(3.0, 4.0)])
    assert decode_rate(never_together) is None


def test_prefill_counts_prompts():
    assert prefill_rate(PHASES[0].scripts, PREFILL) == pytest.approx(6 / 2.0)


def test_what_was_not_played_or_is_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="phase rollout was not played"):
        figures(SHAPE, PHASES, [PREFILL, DECODE])
    short = one("rollout", 4.0, [said(1.1, 1.2, 1.3), said(2.1, 2.2)])
    with pytest.raises(ValueError, match="r-0: a turn has 2 tokens and 2 times, 3 were asked"):
        figures(SHAPE, PHASES, [PREFILL, DECODE, short])
    missing = one("rollout", 4.0, [said(1.1, 1.2, 1.3)])
    with pytest.raises(ValueError, match="r-0 has 1 turns, not 2"):
        figures(SHAPE, PHASES, [PREFILL, DECODE, missing])


def test_tokens_are_compared_position_by_position():
    ours, theirs = [[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]
    assert equal_tokens(ours, theirs) == {"equal": 5, "before_first_difference": 4}
    assert equal_tokens(ours, ours) == {"equal": 6, "before_first_difference": 6}
