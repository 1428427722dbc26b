"""The scripted environment: what it says, how long that is in tokens, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from interlace.envs.episode_table import EpisodeTable
from interlace.envs.registry import make
from interlace.envs.scripted import Scripted, plain_text, prompt_text
from interlace.moe.random_model import byte_tokenizer, write_random_model
from interlace.rollout.chat import Chat
from interlace.rollout.environments import EnvironmentPool

TURNS = [[5, 30, 0.25, 0], [7, 200, 1.5, 2], [3, 1, 0.0, 0]]


def scripted(**more: Any) -> Scripted:
    made = make("scripted", {"prompt": [[11, 100], [12, 28]], "turns": TURNS, **more})
    assert isinstance(made, Scripted)
    return made


def test_gymnasium_finds_nothing_to_complain_about() -> None:
    check_env(gymnasium.make(EnvSpec(id="Text-v0", entry_point=lambda: scripted())).unwrapped)


def test_a_script_is_played_whatever_the_model_says() -> None:
    def played(words: str) -> list[Any]:
        env = scripted(reset_s=2.0)
        first = env.reset(seed=4)
        return [first, *(env.step(words * place) for place in range(len(TURNS)))]

    episode = played("left ")
    assert episode == played("<|im_end|> nothing at all")
    (prompt, reset_info), *steps = episode
    assert len(prompt) == 128
    assert reset_info == {"num_tokens": 5, "wait_s": 2.0}
    assert [len(step[0]) for step in steps] == [30, 200, 0]
    assert [step[2] for step in steps] == [False, False, True]
    assert [step[4].get("num_tokens") for step in steps] == [7, 3, None]
    assert [step[4].get("wait_s") for step in steps] == [0.25, 1.5, None]
    assert [step[4]["retries"] for step in steps] == [0, 2, 2]


def test_without_sleep_nothing_is_waited_for_and_the_text_is_the_same() -> None:
    awake, asleep = scripted(reset_s=9.0, sleep=False), scripted(reset_s=9.0)
    text, info = awake.reset(seed=1)
    assert (text, info) == (asleep.reset(seed=1)[0], {"num_tokens": 5})
    step = awake.step("")
    assert step[0] == asleep.step("")[0]
    assert "wait_s" not in step[4]


def test_text_depends_on_seeds_and_nothing_else() -> None:
    assert plain_text([(3, 1, 40)]) == "s3z4o9z5u1x7m9q5i5f7k1p3t1y7b5h9y7q9u8y2"
    assert prompt_text([(3, 500)]).startswith(prompt_text([(3, 200), (5, 9)])[:200])
    observations = {seed: scripted().reset(seed=seed)[0] for seed in (1, 2)}
    assert observations[1] == observations[2]
    one, other = scripted(), scripted()
    one.reset(seed=1)
    other.reset(seed=2)
    assert one.step("")[0] != other.step("")[0]


def split_like(pattern: str) -> Tokenizer:
    """A vocabulary that merges every pair of letters and of digits, behind somebody's pattern."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    alike = [[c for c in letters if c.isascii() and c.islower()], list("0123456789")]
    merges = [(a, b) for kind in alike for a in kind for b in kind]
    merges += [(a, b) for a in alike[0] for b in alike[1]]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("family", ["tiny", *PATTERNS])
def test_a_character_of_text_is_a_token(family: str) -> None:
    tokenizer = byte_tokenizer(320) if family == "tiny" else split_like(PATTERNS[family])
    for num in (1, 2, 63, 64, 65, 1000):
        text = plain_text([(num, 0, num)])
        assert len(text) == num
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == num
        assert text == text.strip()


def test_in_a_conversation_the_template_is_all_that_is_added(tmp_path: Path) -> None:
    chat = Chat(write_random_model(tmp_path / "model", "qwen3_moe", 0, num_layers=1))

    def opened(num: int) -> int:
        message = {"role": "user", "content": prompt_text([(1, num)])}
        return len(chat.open([message]).token_ids)

    def replied(num: int) -> int:
        return len(chat.reply(plain_text([(1, 1, num)]), closed=False).token_ids)

    for num in (2, 64, 300):
        assert opened(num) - opened(1) == num - 1
        assert replied(num) - replied(1) == num - 1


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"prompt": [], "turns": TURNS}, "at least one piece of prompt"),
        ({"prompt": [[1, 5]], "turns": []}, "at least one piece of prompt and one turn"),
        ({"prompt": [[1, 5], [2, 0]], "turns": TURNS}, r"prompt\[1\] should be .*found \[2, 0\]"),
        ({"prompt": [[1, 5]], "turns": [[1, 1, 0.0]]}, r"turns\[0\] should be .*\[1, 1, 0.0\]"),
        ({"prompt": [[1, 5]], "turns": [[0, 1, 0.0, 0]]}, r"turns\[0\]"),
        ({"prompt": [[1, 5]], "turns": [TURNS[0], [1, 1, -1.0, 0]]}, r"turns\[1\]"),
        ({"prompt": [[1, 5]], "turns": TURNS, "reset_s": -1.0}, "reset_s must be 0 or more"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused_with_its_place(
    params: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        make("scripted", params)


def test_a_step_before_a_reset_or_behind_the_end_is_refused() -> None:
    env = scripted()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("")
    env.reset(seed=0)
    for _ in TURNS:
        env.step("")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("")


class Promising(gymnasium.Env[str, str]):
    """Puts anything into its info."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.observation_space = self.action_space = gymnasium.spaces.Text(10)
        self._info = info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "begin", self._info


@pytest.mark.parametrize(
    "info",
    [
        *({"num_tokens": x} for x in (0, 2.0, True, range(2))),
        *({"wait_s": x} for x in (-1, "soon", 1e9, float("nan"))),
    ],
    ids=str,
)
def test_lengths_and_waits_that_make_no_sense_are_no_info(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlace.envs.episode_table.make", lambda env, params: Promising(info))
    table = EpisodeTable()
    table.handle({"op": "open", "episode": 1, "env": "x", "params": {}})
    reply = table.handle({"op": "reset", "episode": 1, "seed": 0})
    assert reply["kind"] == "invalid"
    assert next(iter(info)) in reply["message"]


class InProcess:
    """An EnvironmentHost without a process."""

    def __init__(self) -> None:
        self._table = EpisodeTable()

    async def call(self, frame: bytes) -> bytes:
        return self._table.handle_frame(frame)

    def kill(self) -> None:
        pass


async def host(index: int) -> InProcess:
    return InProcess()


def pool_of_one_process() -> EnvironmentPool:
    return EnvironmentPool(
        factory=host, num_hosts=1, episodes_per_host=2, step_timeout_s=0.01, reset_timeout_s=0.01
    )


def script(wait_s: float) -> dict[str, Any]:
    return {"prompt": [[1, 5]], "turns": [[1, 1, wait_s, 0], [1, 1, 0.0, 0]]}


def test_whoever_waits_keeps_nobody_of_the_same_process_waiting() -> None:
    async def work() -> None:
        async with pool_of_one_process() as pool:
            slow, quick = [await pool.open("scripted", script(s), 0) for s in (3600.0, 0.0)]
            await slow.reset()
            waiting = asyncio.create_task(slow.step(""))
            await quick.reset()
            await quick.step("")
            assert (await quick.step("")).terminated
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert (await slow.step("")).terminated  # the step it left took place

    asyncio.run(work())


def test_a_wait_is_slept_and_under_no_deadline() -> None:
    async def work() -> float:
        async with pool_of_one_process() as pool, await pool.open("scripted", script(0.05), 0) as e:
            await e.reset()
            began_at = time.monotonic()
            await e.step("")
            return time.monotonic() - began_at

    assert asyncio.run(work()) >= 0.05
