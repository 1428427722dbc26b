"""The request handler answers everything and keeps episodes apart."""

from __future__ import annotations

import json
import os
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.envs.episode_table import EpisodeTable
from interlace.envs.frames import MAX_FRAME_BYTES, read_frame, write_frame


class Scripted(gymnasium.Env[str, str]):
    """Returns what it was constructed with."""

    def __init__(self, *, info: Any = None, reward: Any = 0.0) -> None:
        self.info = {} if info is None else info
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"seed {seed}", self.info

    def step(self, action: str) -> Any:
        return action, self.reward, np.bool_(True), False, self.info


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> EpisodeTable:
    def scripted(env: str, params: dict[str, Any]) -> Scripted:
        return Scripted(**params)

    monkeypatch.setattr("interlace.envs.episode_table.make", scripted)
    return EpisodeTable()


def test_episodes_have_a_life_each(table: EpisodeTable) -> None:
    for episode in (1, 2):
        assert table.handle({"op": "open", "episode": episode, "env": "x", "params": {}})["ok"]
        reply = table.handle({"op": "reset", "episode": episode, "seed": episode})
        assert reply == {"ok": True, "text": f"seed {episode}", "info": {}}
    assert table.handle({"op": "close", "episode": 1}) == {"ok": True}
    assert table.handle({"op": "close", "episode": 1}) == {"ok": True}
    assert table.handle({"op": "step", "episode": 1, "action": "hi"})["kind"] == "invalid"
    assert table.handle({"op": "step", "episode": 2, "action": "hi"}) == {
        "ok": True,
        "text": "hi",
        "reward": 0.0,
        "terminated": True,
        "truncated": False,
        "info": {},
    }


def test_info_keeps_what_json_can_carry(table: EpisodeTable) -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    info = {
        "kept": [1, 2.5, "ä", None, {"a": (1, 2)}],
        "number": np.float32(0.5),
        "allowed_token_ids": np.arange(3),
        "choices": ("yes", "no"),
        "object": object(),
        "nan": float("nan"),
        "surrogate": "\ud800",
        "loop": loop,
        "deep": deep,
        "bytes": b"x",
        3: "a key that is no text",
    }
    table.handle({"op": "open", "episode": 0, "env": "x", "params": {"info": info}})
    assert table.handle({"op": "reset", "episode": 0, "seed": 0})["info"] == {
        "kept": [1, 2.5, "ä", None, {"a": [1, 2]}],
        "number": 0.5,
        "allowed_token_ids": [0, 1, 2],
        "choices": ["yes", "no"],
    }


@pytest.mark.parametrize(
    "info",
    [
        {"choices": "left"},
        {"choices": []},
        {"choices": ["left", ""]},
        {"choices": {"left"}},
        {"allowed_token_ids": [1, -1]},
        {"allowed_token_ids": [True]},
        {"allowed_token_ids": ["1"]},
        {"story": "x" * 2_000_000},
    ],
)
def test_an_info_that_would_mislead_is_invalid(table: EpisodeTable, info: dict[str, Any]) -> None:
    table.handle({"op": "open", "episode": 0, "env": "x", "params": {"info": info}})
    assert table.handle({"op": "reset", "episode": 0, "seed": 0})["kind"] == "invalid"


@pytest.mark.parametrize("reward", [1, True, 0.5, np.float32(0.25), np.int64(3)])
def test_any_finite_number_is_a_reward(table: EpisodeTable, reward: Any) -> None:
    table.handle({"op": "open", "episode": 0, "env": "x", "params": {"reward": reward}})
    reply = table.handle({"op": "step", "episode": 0, "action": ""})
    assert type(reply["reward"]) is float
    assert reply["reward"] == float(reward)


class Counter(Scripted):
    """Counts its steps; copies itself as its parameters say."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.num_steps = 0
        self.how = how

    def step(self, action: str) -> Any:
        self.num_steps += 1
        return str(self.num_steps), 0.0, False, False, {}


class CopyableCounter(Counter):
    copyable = True


class CopyingCounter(Counter):
    def copy(self) -> Any:
        if self.how == "raises":
            raise OSError("out of ink")
        if self.how == "itself":
            return self
        other = type(self)(how=self.how)
        other.num_steps = self.num_steps
        return other


def a_table_with(kind: type[Counter], how: str, monkeypatch: pytest.MonkeyPatch) -> EpisodeTable:
    monkeypatch.setattr("interlace.envs.episode_table.make", lambda env, params: kind(how=how))
    table = EpisodeTable()
    table.handle({"op": "open", "episode": 0, "env": "x", "params": {}})
    table.handle({"op": "step", "episode": 0, "action": ""})
    return table


def texts(table: EpisodeTable, *episodes: int) -> list[Any]:
    return [
        table.handle({"op": "step", "episode": episode, "action": ""}).get("text")
        for episode in episodes
    ]


@pytest.mark.parametrize("kind", [CopyableCounter, CopyingCounter])
def test_a_copy_goes_its_own_way(kind: type[Counter], monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table_with(kind, "well", monkeypatch)
    reply = table.handle({"op": "copy", "source": 0, "episode": 1})
    assert reply == {"ok": True, "copied": True}
    assert texts(table, 1, 1, 0) == ["2", "3", "2"]
    table.handle({"op": "close", "episode": 0})
    assert texts(table, 1) == ["4"]


def test_what_does_not_offer_copies_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table_with(Counter, "", monkeypatch)
    reply = table.handle({"op": "copy", "source": 0, "episode": 1})
    assert reply == {"ok": True, "copied": False}
    assert texts(table, 1, 0) == [None, "2"]


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "out of ink"), ("itself", "must be another environment")]
)
def test_a_copy_that_fails_leaves_the_original_as_it_is(
    how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = a_table_with(CopyingCounter, how, monkeypatch)
    reply = table.handle({"op": "copy", "source": 0, "episode": 1})
    assert reply["kind"] == "raised"
    assert message in reply["message"]
    assert texts(table, 1, 0) == [None, "2"]


@pytest.mark.parametrize("source", [1, 2, None, "0"])
def test_only_an_open_episode_can_be_copied(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table_with(CopyableCounter, "", monkeypatch)
    assert table.handle({"op": "copy", "source": source, "episode": 1})["kind"] == "invalid"
    assert texts(table, 0) == ["2"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(), items, max_size=3),
    max_leaves=8,
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["hello", "open", "reset", "step", "copy", "close"]) | JSON,
        "episode": st.integers(0, 1) | JSON,
        "env": st.just("frozen_lake") | JSON,
        "params": st.just({}) | JSON,
        "seed": st.integers(0, 9) | JSON,
        "action": st.text() | JSON,
        "source": st.integers(0, 1) | JSON,
    },
)


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(REQUESTS.map(lambda r: json.dumps(r).encode()) | st.binary(), max_size=6))
def test_every_frame_gets_a_reply(frames: list[bytes]) -> None:
    table = EpisodeTable()
    for frame in frames:
        reply = json.loads(table.handle_frame(frame))
        assert reply["ok"] is True or reply["kind"] in ("raised", "invalid")


def test_frames_arrive_as_they_were_sent_and_end_with_the_stream() -> None:
    reader, writer = os.pipe()
    for payload in (b"", b"x", b"y" * 30_000):
        write_frame(writer, payload)
        assert read_frame(reader) == payload
    os.write(writer, (MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ValueError, match="at most"):
        read_frame(reader)
    os.write(writer, b"\x00\x00\x00\x09cut")
    os.close(writer)
    assert read_frame(reader) is None
    os.close(reader)
