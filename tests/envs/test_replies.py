"""What is read out of a reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.envs.replies import answer_block_in, answer_in, code_in, prose_in
from interlace.envs.text import AnyText


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("SELECT 1", "SELECT 1"),
        ("Look:\n```sql\nSELECT 1\n```\n```\nSELECT 2\n```", "SELECT 1\n"),
        ("```SQL\nSELECT 1", "SELECT 1"),
        ("```\nSELECT 1```", "SELECT 1"),
        ("```SELECT 1```", "SELECT 1"),
        ("```sql SELECT 1```", "SELECT 1"),
        ("``` sql\nSELECT 1\n```", "SELECT 1\n"),
        ("```", ""),
    ],
)
def test_code_is_the_first_fenced_block_or_everything(reply: str, code: str) -> None:
    assert code_in(reply, "sql") == code


@pytest.mark.parametrize(
    ("reply", "answer", "block"),
    [
        ("ANSWER: 3", "3", "3"),
        ("I think\n **Answer :** 3.\nSure.", "3.", "3.\nSure."),
        ("answer: 1\nno\nanswer: 2", "2", "2"),
        ("ANSWER:\n1 2\n3 4", "", "\n1 2\n3 4"),
        ("The answer: 3", None, None),
        ("", None, None),
    ],
)
def test_an_answer_is_behind_its_last_mark(
    reply: str, answer: str | None, block: str | None
) -> None:
    assert answer_in(reply) == answer
    assert answer_block_in(reply) == block


def test_prose_is_what_is_not_fenced() -> None:
    assert prose_in("a\n```python\nanswer: int = 3\n```\nb") == "a\n\nb"


@given(reply=st.text() | st.text("`sql\n answer:*"))
def test_any_reply_can_be_read(reply: str) -> None:
    assert code_in(reply, "sql") in reply
    assert len(prose_in(reply)) <= len(reply)
    block = answer_block_in(reply)
    assert block is None or reply.endswith(block)


def test_a_space_of_any_text_holds_what_utf_8_can_carry() -> None:
    space = AnyText(10)
    assert "∧ 🙂" in space
    assert "\ud800" not in space
    assert "x" * 11 not in space
    assert 3 not in space
    assert space.sample() in space
