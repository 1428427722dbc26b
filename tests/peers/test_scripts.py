"""How an engine is led through scripts."""

from __future__ import annotations

import asyncio

import pytest
from tests.peers.fake_engine import Fake
from tests.peers.made import script

from interlace.rollout.peers.scripts import Script, play


def test_every_turn_is_asked_with_all_that_stands_before_it():
    engine = Fake(None)
    (said,) = asyncio.run(play(engine, [script("a", num_turns=3)]))
    first, second = [3, 3, 3], [8, 8, 8]
    assert [turn.tokens for turn in said] == [first, second, [13, 13, 13]]
    assert engine.asked == [
        ("a", [5, 6, 7], 3, False),
        ("a", [5, 6, 7, *first, 8, 9], 3, False),
        ("a", [5, 6, 7, *first, 8, 9, *second, 8, 9], 3, True),
    ]


def test_scripts_are_played_at_once_and_told_in_their_order():
    engine = Fake(None)
    scripts = [script("slow", num_generated=5, wait_s=0.02), script("quick", num_generated=2)]
    said = asyncio.run(play(engine, scripts))
    assert [name for name, *_ in engine.asked] == ["quick", "slow"]
    assert [len(turns[0].tokens) for turns in said] == [5, 2]


def test_a_turn_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="a, turn 0: the engine gave 2 tokens, 3 were asked for"):
        asyncio.run(play(Fake("length"), [script("a")]))


def test_a_script_comes_back_from_json():
    one = script("a", num_turns=3)
    assert Script.from_json(one.as_json()) == one
    assert (one.num_turns, one.num_context) == (3, 3 + 4 + 9)
