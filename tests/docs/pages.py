"""The pages of the documentation as sessions: their blocks, and how each is run.

A page is one session in one folder. Its blocks are tried from top to bottom:

* ```python blocks are run as scripts; ```toml blocks must be valid; in shell blocks, and blocks
  without a language, the lines that start with `interlace` are run.
* `<!-- file: NAME -->` in the line above a block writes it to NAME instead of running it.
* `<!-- not run: REASON -->` leaves a block out.

Commands are run with tiny models: the demo's preset and its model are replaced.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SHELL = ("", "sh", "bash", "console")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>file|not run): (?P<what>[^>]+?) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
_FEWER = ["--set", "sampling.max_tokens=8", "--set", "environments.max_turns=3"]
_SMALL_WORK = [
    *("--scale", "prompts=0.016,members=0.25,turns=0.05,lengths=0.02,seconds=0.001"),
    *("--repeat", "1", "--no-tune", "--max-load", "1000", "--set", "launch.kind=local"),
]
_TINY_MODEL = ["--set", "model.path=tiny-qwen3-moe", *_FEWER]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    text: str
    file: str | None
    """Where it is written to, if it is not run."""
    not_run: str | None
    """Why it is left out."""

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block that are run; comments are cut off."""
        if self.language not in SHELL or self.not_run is not None or self.file is not None:
            return []
        lines = (line.split("  #")[0].strip() for line in self.text.splitlines())
        return [line for line in lines if line.startswith("interlace ")]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            line=text[: found.start("language")].count("\n") + 1,
            language=found["language"],
            text=found["text"],
            file=found["what"] if found["mark"] == "file" else None,
            not_run=found["what"] if found["mark"] == "not run" else None,
        )
        for found in _BLOCK.finditer(text)
    ]


def with_tiny_model(command: str) -> list[str]:
    """The arguments of `interlace` that try the same with a model that takes seconds."""
    words = ["tiny-qwen3-moe" if word == "smollm2-moe" else word for word in shlex.split(command)]
    words = ["tiny" if word == "demo" else word for word in words[1:]]
    words = [word.replace("=smollm2-moe", "=tiny-qwen3-moe") for word in words]
    if words[0] in ("rollout", "eval"):
        words += _FEWER if any("model.path=" in word for word in words) else _TINY_MODEL
    if words[0] == "ablate" and "--scale" not in words:
        words += _SMALL_WORK
    return words


@dataclass(frozen=True, slots=True)
class Step:
    """A process a page asks for."""

    name: str
    command: list[str]


class Session:
    """One page, tried in `folder` with a home of its own."""

    def __init__(self, page: Path, folder: Path, home: Path) -> None:
        self._page, self._folder = page, folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("INTERLACE_CACHE", "XDG_CACHE_HOME", "RANK", "WORLD_SIZE")
        }
        self._environment: Mapping[str, str] = kept | {"HOME": str(home), "COLUMNS": "100"}

    @property
    def num_steps(self) -> int:
        """How many there will be."""
        run = [one for one in blocks(self._page) if one.file is None and one.not_run is None]
        return sum(len(one.commands) + (one.language == "python") for one in run)

    def steps(self) -> Iterator[Step]:
        """What is to be run, one after the other; files are written on the way."""
        for block in blocks(self._page):
            where = f"{self._page.name}, line {block.line}"
            if block.not_run is not None:
                continue
            if block.file is not None:
                (self._folder / block.file).write_text(block.text, encoding="utf-8")
            elif block.language == "toml":
                tomllib.loads(block.text)
            elif block.language == "python":
                script = self._folder / f"block_{block.line}.py"
                script.write_text(block.text, encoding="utf-8")
                yield Step(f"{where}: python", [sys.executable, script.name])
            for command in block.commands:
                program = str(Path(sys.executable).with_name("interlace"))
                yield Step(f"{where}: {command}", [program, *with_tiny_model(command)])

    def run(self, step: Step, timeout_s: float) -> str:
        """Everything it printed. AssertionError with it if it failed."""
        done = subprocess.run(
            step.command,
            cwd=self._folder,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{step.name}\n{done.stdout[-4000:]}"
        return done.stdout
