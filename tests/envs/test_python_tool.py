"""The Python tool: any code is answered, none outlives its time, answers are right."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.envs.computing import KINDS, draw
from interlace.envs.python_process import PythonProcess
from interlace.envs.python_tool import PythonTool

pytestmark = pytest.mark.processes


@pytest.fixture
def tool(request: pytest.FixtureRequest) -> Any:
    env = PythonTool(timeout_s=20.0, max_steps=100, max_chars=200)
    env.reset(seed=0)
    yield env
    env.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("reply", "shown", "outcome"),
    [
        ("1 + 1", "2", "ran"),
        ("print('a'); print('b')", "a\nb", "ran"),
        ("x = 1", "(nothing printed)", "ran"),
        ("None", "(nothing printed)", "ran"),
        ("So:\n```python\n2 * 3\n```\nand\n```\n7\n```", "6", "ran"),
        ("```py\n'open end'", "'open end'", "ran"),
        ("```print(5)```", "5", "ran"),
        ("answer = 3\nanswer", "3", "ran"),
        ("```python\nanswer: int = 3\nanswer\n```", "3", "ran"),
        ("import sys; print('e', file=sys.stderr); print('o')", "e\no", "ran"),
        ("import subprocess\nsubprocess.run(['echo', 'hi'])\nprint('ho')", "hi\nho", "ran"),
        ("import sys; sys.stdout.close()", "(nothing printed)", "ran"),
        ("print('häßlich')", "h??lich", "ran"),
        ("print('\\ud800')", "\\ud800", "ran"),
        ("print('x' * 1000)", "x\n...\nx", "ran"),
        ("lambda: 0", "<function <lambda> at 0x...>", "ran"),
        ("1 / 0", "ZeroDivisionError: division by zero", "raised"),
        ("import sys; sys.exit(3)", "SystemExit: 3", "raised"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "raised"),
        ("input()", "EOFError", "raised"),
        ("bytearray(10**11)", "MemoryError", "raised"),
        ("def f(): return f()\nf()", "RecursionError", "raised"),
        ("f'{", "SyntaxError", "no code"),
        ("What is this?", "SyntaxError", "no code"),
        ("'\x00'", "null bytes", "no code"),
        ("", "ANSWER:", "no code"),
        ("# nothing", "ANSWER:", "no code"),
        ("import os; os._exit(0)", "(the process ended; what was defined is gone)", "ended"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "(the process ended", "ended"),
        ("import os; os.closerange(0, 100)", "(the process ended", "ended"),
    ],
)
def test_code_is_answered_with_what_it_prints(
    reply: str, shown: str, outcome: str, tool: PythonTool
) -> None:
    text, reward, terminated, truncated, info = tool.step(reply)
    assert shown in text
    assert text in tool.observation_space
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid_action": outcome != "no code", "outcome": outcome}
    assert tool.step("'alive'")[0] == "'alive'"


def test_names_persist_until_the_process_ends(tool: PythonTool) -> None:
    tool.step("x = 3")
    tool.step("def f(n): return n + x")
    assert tool.step("f(4)")[0] == "7"
    tool.step("import os; os._exit(1)")
    assert "NameError" in tool.step("x")[0]


def test_a_traceback_shows_the_lines_of_the_code(tool: PythonTool) -> None:
    text, *_ = tool.step("def f():\n    raise ValueError('no')\n\nf()")
    assert "File \"<code>\", line 2, in f\n    raise ValueError('no')" in text
    assert "python_child" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "print('begun')\nwhile True: pass",
        "import time\nprint('begun')\ntime.sleep(1e6)",
        "import signal, time\nprint('begun')\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(1e6)",
        "print('begun')\n9 ** 9 ** 9 ** 9",
    ],
)
def test_what_takes_too_long_is_stopped_and_a_fresh_process_follows(code: str) -> None:
    env = PythonTool(timeout_s=0.5, max_chars=200)
    env.reset(seed=0)
    env.step("x = 1")
    began = time.monotonic()
    text, _, terminated, truncated, info = env.step(code)
    assert time.monotonic() - began < 10
    assert text == "begun\n(stopped after 0.5 s; what was defined is gone)"
    assert (terminated, truncated, info["outcome"]) == (False, False, "timed out")
    assert "NameError" in env.step("x")[0]
    env.close()


@pytest.mark.slow
def test_an_endless_print_is_cut_where_it_is_always_cut() -> None:
    env = PythonTool(timeout_s=0.5, max_chars=40)
    texts = set()
    for _ in range(2):
        env.reset(seed=0)
        texts.add(env.step("n = 0\nwhile True:\n    print(n)\n    n += 1")[0])
    env.close()
    assert len(texts) == 1
    assert texts.pop().startswith("0\n1\n2\n")


def test_code_sees_no_secrets_and_writes_into_a_folder_that_goes(
    tool: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    assert tool.step("import os; os.environ.get('SOME_API_KEY', 'unknown')")[0] == "'unknown'"
    tool.step("open('notes', 'w').write('hello')")
    folder = Path(tool.step("print(os.getcwd())")[0])
    assert tool.step("os.environ['HOME'] == os.getcwd()")[0] == "True"
    assert (folder / "notes").read_text() == "hello"
    tool.close()
    assert not folder.exists()


def test_what_code_starts_ends_with_its_process(tool: PythonTool) -> None:
    child = "import subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)"
    pid = int(tool.step(child)[0])
    assert alive(pid)
    tool.close()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline


def test_a_forked_copy_has_no_voice(tool: PythonTool) -> None:
    tool.step("import os; pid = os.fork()")
    assert [tool.step(f"{n}")[0] for n in range(5)] == [str(n) for n in range(5)]


def test_a_process_that_was_killed_meanwhile_is_replaced(tool: PythonTool) -> None:
    pid = int(tool.step("import os; print(os.getpid())")[0])
    os.kill(pid, 9)
    assert tool.step("1")[4]["outcome"] == "ended"
    assert tool.step("1")[0] == "1"


def test_a_python_that_cannot_start_is_an_error_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    process = PythonProcess(seed=0, timeout_s=5, memory_bytes=2**30, max_bytes=100)
    with pytest.raises(RuntimeError, match="no Python could be started"):
        process.run("1")
    process.close()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(replies=st.lists(st.text() | st.text("answer:` \n=(\"'\\\x00\ud800"), max_size=4))
def test_no_text_is_too_strange(replies: list[str]) -> None:
    env = PythonTool(max_chars=50)
    env.reset(seed=0)
    for reply in replies:
        outcome = env.step(reply)
        assert outcome[0] in env.observation_space
        if outcome[2]:
            break
    env.close()


SOLUTIONS = {
    "primes": "sum(p for p in range(2, {0}) if all(p % d for d in range(2, int(p**.5) + 1)))",
    "power": "print(pow({0}, {1}, {2}))",
    "collatz": "n, k = {0}, 0\nwhile n > 1: n, k = 3 * n + 1 if n % 2 else n // 2, k + 1\nprint(k)",
    "digits": "import math\nprint(sum(map(int, str(math.factorial({0})))))",
    "multiples": "sum(1 for n in range({1} + 1) if not (n % {2} and n % {3}) and n % {4})",
    "recurrence": "x = {0}\nfor _ in range({4}): x = ({1} * x + {2}) % {3}\nprint(x)",
}


@pytest.mark.parametrize("kind", sorted(SOLUTIONS))
def test_code_that_solves_a_question_is_rewarded(kind: str) -> None:
    env = PythonTool(kinds=[kind], timeout_s=20.0)
    question, _ = env.reset(seed=3)
    numbers = re.findall(r"\d+", question)
    result = env.step(f"```python\n{SOLUTIONS[kind].format(*numbers)}\n```")[0]
    text, reward, terminated, _, info = env.step(f"It printed it.\n**ANSWER:** {result}.")
    assert (text, reward, terminated, info["success"]) == ("Right.", 1.0, True, True)
    env.reset(seed=3)
    assert env.step(f"ANSWER: {int(result) + 1}")[:3] == ("Wrong.", 0.0, True)
    env.close()


def test_the_answer_to_rising_numbers_and_grids_is_the_best_of_all_ways() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        task = draw(rng, ("grid",))
        rows = [list(map(int, line.split())) for line in task.question.splitlines()[1:]]

        def cheapest(y: int, x: int, rows: list[list[int]] = rows) -> int:
            ways = [
                cheapest(*before, rows) for before in ((y - 1, x), (y, x - 1)) if min(before) >= 0
            ]
            return rows[y][x] + min(ways, default=0)

        assert task.answer == str(cheapest(len(rows) - 1, len(rows[0]) - 1))
        task = draw(rng, ("rising",))
        tails: list[int] = []
        for n in eval(task.question[task.question.index("[") : -1]):
            at = int(np.searchsorted(tails, n))
            tails[at : at + 1] = [n]
        assert task.answer == str(len(tails))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_question_has_a_number_as_its_answer(kind: str) -> None:
    tasks = [draw(np.random.default_rng(seed), (kind,)) for seed in range(20)]
    assert len({task.question for task in tasks}) > 15
    assert all(0 <= int(task.answer) < 10**15 for task in tasks)
    assert tasks[5] == draw(np.random.default_rng(5), (kind,))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be positive, not 0"),
        ({"memory_mb": 1}, "memory_mb must be at least 64, not 1"),
        ({"max_chars": 1}, "max_chars must be at least 20, not 1"),
        ({"kinds": ["sums"]}, r"some of primes, .*, not \['sums'\]"),
        ({"kinds": []}, r"some of primes, .*, not \[\]"),
    ],
)
def test_impossible_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PythonTool(**params)
