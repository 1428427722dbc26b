"""The episodes one process hosts, behind a handler that no environment can make raise."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from interlace.envs.registry import make
from interlace.envs.snapshot import copied

MAX_TEXT_BYTES = 1024 * 1024
"""The largest observation, and the largest info, in bytes of UTF-8."""

MAX_WAIT_S = 86_400
"""The longest `wait_s` of an info."""

_MAX_MESSAGE = 2000

Reply = dict[str, Any]


class InvalidResult(Exception):
    """An environment returned something that is not in the contract."""


class EpisodeTable:
    """Answers requests about its episodes, one at a time; always answers, never raises.

    Requests are dicts with `op` and, but for `hello`, `episode` (an int the caller chose):

    - `hello`
    - `open` with `env` and `params` (see `registry.make`)
    - `reset` with `seed` -> `text`, `info`
    - `step` with `action` -> `text`, `reward`, `terminated`, `truncated`, `info`
    - `copy` with `source`, an open episode -> `copied`: whether `episode` now is a second one in
      the state of the first (see `snapshot.copied`); if not, `episode` is not open
    - `close`; closing what is not open is fine

    Replies have `ok`. One that is not ok has `kind`, "raised" (an environment raised, SystemExit
    and KeyboardInterrupt included) or "invalid" (it returned what the contract excludes: text that
    is not str, not encodable as UTF-8 or over `MAX_TEXT_BYTES`; a reward that is not a finite
    number; a flag that is not a bool), and `message`; its episode is closed. `info` keeps the
    keys that JSON can carry. What ends or blocks the whole process is the caller's to notice.
    """

    def __init__(self) -> None:
        self._episodes: dict[int, gymnasium.Env[str, str]] = {}

    def handle(self, request: Mapping[str, Any]) -> Reply:
        """The reply to one request."""
        episode = request.get("episode")
        try:
            return {"ok": True} | self._serve(request, episode)
        except InvalidResult as error:
            failure = {"ok": False, "kind": "invalid", "message": str(error)[:_MAX_MESSAGE]}
        except BaseException as error:  # sys.exit in an environment must not end its neighbours
            failure = {"ok": False, "kind": "raised", "message": _described(error)}
        if isinstance(episode, int):
            self._close_quietly(episode)
        return failure

    def handle_frame(self, frame: bytes) -> bytes:
        """`handle` for requests and replies as JSON in UTF-8."""
        try:
            request = json.loads(frame)
        except ValueError as error:
            request, failure = None, f"not JSON: {error}"
        else:
            failure = f"a request is an object, not a {type(request).__name__}"
        if isinstance(request, dict):
            reply = self.handle(request)
        else:
            reply = {"ok": False, "kind": "invalid", "message": failure}
        return json.dumps(reply).encode("ascii")

    def _serve(self, request: Mapping[str, Any], episode: Any) -> Reply:
        op = request.get("op")
        if op == "hello":
            return {}
        if not isinstance(episode, int):
            raise InvalidResult(f"an episode is named by an int, not {episode!r}")
        if op == "open":
            self._close_quietly(episode)
            self._episodes[episode] = make(request["env"], request["params"])
            return {}
        if op == "close":
            self._close_quietly(episode)
            return {}
        if op == "copy":
            return {"copied": self._copy(request["source"], episode)}
        if episode not in self._episodes:
            raise InvalidResult(f"episode {episode} is not open here")
        if op == "reset":
            return _reset_reply(self._episodes[episode].reset(seed=request["seed"]))
        if op == "step":
            return _step_reply(self._episodes[episode].step(request["action"]))
        raise InvalidResult(f"there is no operation {op!r}")

    def _copy(self, source: Any, episode: int) -> bool:
        if not isinstance(source, int) or source not in self._episodes or source == episode:
            raise InvalidResult(f"episode {source!r} is not another one that is open here")
        self._close_quietly(episode)
        environment = copied(self._episodes[source])
        if environment is not None:
            self._episodes[episode] = environment
        return environment is not None

    def _close_quietly(self, episode: int) -> None:
        environment = self._episodes.pop(episode, None)
        if environment is None:
            return
        try:
            environment.close()
        except BaseException:  # the episode is over: how it left changes no result
            return


def _reset_reply(result: Any) -> Reply:
    text, info = _parts(result, "reset", "an observation and info", 2)
    return {"text": _text(text), "info": _info(info)}


def _step_reply(result: Any) -> Reply:
    text, reward, terminated, truncated, info = _parts(
        result, "step", "observation, reward, terminated, truncated and info", 5
    )
    return {
        "text": _text(text),
        "reward": _reward(reward),
        "terminated": _flag("terminated", terminated),
        "truncated": _flag("truncated", truncated),
        "info": _info(info),
    }


def _parts(result: Any, method: str, expected: str, count: int) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) != count:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise InvalidResult(f"{method} must return {expected} ({count} values), not {got}")
    return result


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidResult(f"an observation is a str, not {type(value).__name__}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidResult(f"an observation must be encodable as UTF-8: {error.reason}") from error
    if size > MAX_TEXT_BYTES:
        raise InvalidResult(f"an observation of {size} bytes: at most {MAX_TEXT_BYTES} are taken")
    return value


def _reward(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise InvalidResult(f"a reward is a number, not {type(value).__name__}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InvalidResult(f"a reward must be finite, not {reward}")
    return reward


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidResult(f"{name} is a bool, not {type(value).__name__}")
    return bool(value)


def _info(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidResult(f"info is a dict, not {type(value).__name__}")
    kept: dict[str, Any] = {}
    size = 0
    for key, item in value.items():
        if not isinstance(key, str):
            continue
        try:
            encoded = json.dumps({key: item}, allow_nan=False, ensure_ascii=False, default=_plain)
            size += len(encoded.encode("utf-8"))
        except (TypeError, ValueError, RecursionError):
            continue
        kept[key] = json.loads(encoded)[key]
    if size > MAX_TEXT_BYTES:
        raise InvalidResult(f"an info of {size} bytes: at most {MAX_TEXT_BYTES} are taken")
    _check_list(kept, "choices", "non-empty texts", lambda x: isinstance(x, str) and x != "")
    _check_list(kept, "allowed_token_ids", "token ids", lambda x: type(x) is int and x >= 0)
    _check_item(kept, "num_tokens", "a whole number from 1 on", lambda x: type(x) is int and x > 0)
    _check_item(
        kept,
        "wait_s",
        f"a number of seconds from 0 to {MAX_WAIT_S}",
        lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= MAX_WAIT_S,
    )
    lost = {"choices", "allowed_token_ids", "num_tokens", "wait_s"} & value.keys() - kept.keys()
    if lost:
        raise InvalidResult(f"info[{min(lost)!r}] cannot be written as JSON")
    return kept


def _check_list(info: dict[str, Any], key: str, what: str, fits: Callable[[Any], bool]) -> None:
    if key not in info:
        return
    items = info[key]
    if not isinstance(items, list) or not items or not all(map(fits, items)):
        raise InvalidResult(f"info[{key!r}] must be a list of at least one of: {what}")


def _check_item(info: dict[str, Any], key: str, what: str, fits: Callable[[Any], bool]) -> None:
    if key in info and not fits(info[key]):
        raise InvalidResult(f"info[{key!r}] must be {what}, not {str(info[key])[:40]}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _described(error: BaseException) -> str:
    """Type, message and place of an error, whatever its __str__ does."""
    try:
        message = str(error)
    except BaseException:
        message = "(an error without readable text)"
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = f"{type(error).__name__}: {message[:_MAX_MESSAGE]}{place}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
