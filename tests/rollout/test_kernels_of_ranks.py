"""All ranks compute with the same kernels: those of another processor give other bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.rollout.test_failures import ROOT, command_line, started

from interlace.moe import kernels
from interlace.rollout.config import RolloutConfig

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120)]
several = pytest.mark.skipif(
    kernels.native is None or len(kernels.native.choices()) < 2,
    reason="this processor runs kernels of one kind at most",
)


def played(script: Path, folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and output of two ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    short = ("tasks.0.count=2", "sampling.max_tokens=4", "environments.max_turns=2")
    with started(
        [*command, *command_line("torchrun", 2, folder / "out", *overrides, *short)], folder
    ) as process:
        process.wait(100)
    return process.returncode, (folder / "log").read_text()


@several
def test_ranks_of_different_processors_are_refused_before_they_begin(tmp_path: Path) -> None:
    code, log = played(ROOT / "tests/rollout/other_kernels_job.py", tmp_path)
    first, last = kernels.native.choices()[0], kernels.native.choices()[-1]
    assert code != 0
    assert f"different kernels, whose bits differ: rank 0 {first}, rank 1 {last}." in log
    assert "Set model.kernels" in log


@several
def test_kernels_that_all_have_can_be_asked_for(tmp_path: Path) -> None:
    code, log = played(ROOT / "rollout/cli.py", tmp_path, "model.kernels=avx2")
    assert code == 0, log


def test_kernels_the_processor_lacks_are_named_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Native:
        @staticmethod
        def choices() -> tuple[str, ...]:
            return ("AVX2",)

    monkeypatch.setattr(kernels, "native", Native)
    with pytest.raises(ValueError, match="kernels is amx, but this machine has avx2: take auto"):
        kernels.choose("amx")


def test_one_process_does_not_mix_them() -> None:
    with pytest.raises(ValueError, match=r"model\.kernels=avx2 is of ranks that are processes"):
        RolloutConfig.model_validate({"model": {"kernels": "avx2"}, "launch": {"kind": "local"}})
