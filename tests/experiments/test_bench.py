"""The one table: bars are judged from what the parts left, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from interlace.experiments import bench, figures_with_bars
from interlace.experiments.bench import Part
from interlace.experiments.figures_with_bars import Figure


def ratio(median: float) -> dict[str, Any]:
    return {"median": median, "low": median, "high": median, "pairs": 3}


def priced(shape: str, to_best: float, exact_ms: float, num_bytes: float | None) -> dict[str, Any]:
    step = {
        "framed_ms": exact_ms,
        "plain_to_best": ratio(to_best),
        "framed_to_best": ratio(to_best + 0.02),
    }
    return {"shape": shape, "parts": {"step": step}, "flops": 40e9, "bytes": num_bytes}


def exactness(**changes: float) -> dict[str, Any]:
    prices = [
        priced("decode 1 behind 256", changes.get("decode", 1.0), 8.0, 80e6),
        priced("decode 8 behind 256", 0.9, 30.0, None),
        priced("prefill 512", 1.02, 500.0, None),
    ]
    ceilings = {"torch bfloat16": 100e9, "own bfloat16": 90e9, "bytes": 12.5e9}
    return {
        "load": 0.5,
        "instructions": {"matrix tiles": {"ceilings": ceilings, "prices": prices}},
    }


def said(figures: list[Figure]) -> dict[str, tuple[str, bool | None]]:
    return {figure.what: (figure.value, figure.reached) for figure in figures}


def test_the_dearest_shape_of_each_path_is_held_to_the_bar() -> None:
    found = said(figures_with_bars.exactness(exactness(decode=1.06)))
    dearest = "exactness, matrix tiles: dearest decode 1 behind 256"
    assert found[dearest] == ("1.060 [1.060, 1.060]", False)
    assert found["exactness, matrix tiles: dearest prefill 512"][1]
    assert found["exactness and its frame, matrix tiles: dearest prefill 512"][1]


def test_ceilings_are_of_prefill_by_arithmetic_and_of_one_row_by_reading() -> None:
    found = said(figures_with_bars.exactness(exactness()))
    prefill = "prefill of 512 on one rank, share of 100 GFLOP/s (matrix tiles)"
    assert found[prefill] == ("80 %", True)
    one = "decode 1 behind 256, one rank, share of reading at 12.5 GB/s (matrix tiles)"
    assert found[one] == ("80 %", True)


def test_deciding_is_held_to_a_millisecond_where_most_wait() -> None:
    calls = [
        {"waiting": waiting, "blocks": blocks, "decide_us": us}
        for waiting, blocks, us in (
            (1_000, 10_000, 200.0),
            (1_000, 100_000, 300.0),
            (10_000, 10_000, 400.0),
            (10_000, 100_000, 1_200.0),
        )
    ]
    found = figures_with_bars.scheduler(
        {
            "calls": calls,
            "waiting_bytes": {"received": 25e3, "added": 7e3},
            "decode": {"rows": 16, "outside": 0.07},
            "load": 0.0,
        }
    )
    assert [(figure.value, figure.reached) for figure in found] == [
        ("1200 us", False),
        ("4.00", None),
        ("7.0 kB", None),
        ("7.0 %", True),
    ]


@pytest.mark.parametrize(("tiles", "behind"), [(True, ""), (False, ", no tiles")])
def test_peers_are_judged_by_completion_cpu_and_every_rate(tiles: bool, behind: str) -> None:
    found = figures_with_bars.peers(
        {
            "request": {"tiles": tiles},
            "arms": {"vllm-tp2": {"runs": [{"load": 0.1}, {"load": None}]}},
            "ratios": {"exact_vs_best_vllm": ratio(0.4), "multiplexed_vs_serial": ratio(1.0)},
            "cpu_ratios": {"exact_vs_llama_cpp": None, "exact_vs_best_vllm": ratio(0.5)},
            "rate_ratios": {"llama-cpp": {"decode_tokens_per_s": {"1": 0.9, "8": None}}},
        }
    )
    assert [(figure.what, figure.reached) for figure in found] == [
        (f"completion, exact vs best vllm{behind}", True),
        (f"CPU, exact vs best vllm{behind}", False),
        (f"decode_tokens_per_s at 1 / llama-cpp's{behind}", False),
    ]


def test_modes_are_judged_by_their_ratio_and_by_one_digest() -> None:
    found = figures_with_bars.modes(
        {"figures": {"wall_s": {"ratio": ratio(1.04)}}, "digests": ["a", "b"], "load": 0.2}
    )
    assert [figure.reached for figure in found] == [True, False]


def test_whole_steps_are_held_to_the_ceilings_but_those_between_them() -> None:
    shapes = {
        "decode 1": {"at_best_ms": 2.0, "cpu_ms": 4.0},
        "decode 16": {"at_best_ms": 2.0, "cpu_ms": 4.0},
        "prefill 512": {"at_best_ms": 3.0, "cpu_ms": 4.0},
    }
    found = figures_with_bars.steps({"shapes": shapes, "ranks": 2, "load": 0.0})
    assert [figure.reached for figure in found] == [False, None, True]


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(bench.main)
    return made


def test_a_part_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(script="there_is_none.py", leaves="a.json", read=figures_with_bars.exactness)
    monkeypatch.setattr(bench, "PARTS", {"exactness": part})
    (tmp_path / "exactness").mkdir()
    (tmp_path / "exactness" / "a.json").write_text(json.dumps(exactness()))
    done = CliRunner().invoke(app(), ["--out", str(tmp_path), "--peers", str(tmp_path / "none")])
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept[-1]["what"] == "not run: make peers"
    assert kept[0]["reached"] is True


@pytest.mark.processes
def test_a_part_that_fails_is_named_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(script="there_is_none.py", leaves="a.json", read=figures_with_bars.exactness)
    monkeypatch.setattr(bench, "PARTS", {"exactness": part})
    done = CliRunner().invoke(app(), ["--out", str(tmp_path), "--peers", str(tmp_path / "none")])
    assert done.exit_code == 1
    assert "there_is_none.py ended with 2" in done.output
    assert "not run: make peers" in done.output


def test_the_table_says_of_every_bar_whether_it_is_reached() -> None:
    console = Console(record=True, width=140)
    console.print(
        bench.table(
            [
                Figure(part="a", what="x", value="1", bar="< 2", reached=True, load=0.1),
                Figure(part="b", what="y", value="3", bar="< 2", reached=False),
            ]
        )
    )
    text = console.export_text()
    assert "yes" in text
    assert "NO" in text
