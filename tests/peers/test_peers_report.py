"""Who is best, by how much, and what is said of those who were not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.peers.made import compared, figures

from interlace.rollout.peers.picture import draw
from interlace.rollout.peers.report import HEADINGS, notes, report, rows, sound, which
from interlace.rollout.peers.request import PeersRequest

OURS = {"interlace-multiplexed": [figures(4.0)] * 2, "interlace-serial": [figures(3.0)] * 2}


def told(one, **more):
    request = PeersRequest(installed=Path("/nowhere"))
    return report(one, request, block_sizes=more.get("sizes", {}), max_load=0.2)


def test_the_best_mode_is_compared_with_the_best_way_to_run_each_peer():
    slow, quick = [figures(9.0)] * 2, [figures(6.0, cpu_s=8.0), figures(12.0, cpu_s=4.0)]
    found = told(compared({**OURS, "vllm-2-threads": quick, "vllm-tp2": slow, "llama-cpp": slow}))
    assert found["best"]["interlace"] == "interlace-serial"
    assert found["best"]["vllm"] in ("vllm-2-threads", "vllm-tp2")
    assert found["ratios"]["exact_vs_best_vllm"]["median"] == pytest.approx(
        (3 / 6 + 3 / 12) / 2 if found["best"]["vllm"] == "vllm-2-threads" else 1 / 3
    )
    assert found["ratios"]["exact_vs_llama_cpp"]["median"] == pytest.approx(1 / 3)
    assert found["cpu_ratios"]["exact_vs_llama_cpp"]["median"] == pytest.approx(1.0)
    assert found["ratios"]["multiplexed_vs_serial"]["median"] == pytest.approx(4 / 3)
    assert "exact_vs_transformers" not in found["ratios"]
    assert found["sound"]
    json.dumps(found, allow_nan=False)


def test_rates_are_divided_by_the_best_of_each_peer():
    peers = {"vllm-2-threads": [figures(6.0, rate=50.0)], "vllm-tp2": [figures(7.0, rate=200.0)]}
    found = told(compared({"interlace-serial": [figures(3.0, rate=100.0)], **peers}))
    assert found["rate_ratios"] == {
        "vllm": {
            "prefill_tokens_per_s": {"1": 0.5, "8": 0.5},
            "decode_tokens_per_s": {"1": 0.5, "8": None},
        }
    }


def test_runs_are_paired_by_turn_and_void_ones_left_out():
    peers = [figures(6.0), figures(1.0), figures(12.0)]
    ours = [figures(3.0), figures(30.0), figures(3.0)]
    one = compared({"interlace-serial": ours, "llama-cpp": peers}, loads={("llama-cpp", 1): 0.9})
    ratio = told(one)["ratios"]["exact_vs_llama_cpp"]
    assert ratio["pairs"] == 2
    assert ratio["median"] == pytest.approx((0.5 + 0.25) / 2)
    assert "1 runs are void" in " ".join(notes(told(one)))


def test_an_absent_peer_is_told_with_its_reason_and_is_no_error():
    one = compared(OURS, absent={"vllm": "it is not installed: run make peers"})
    found = told(one)
    assert found["absent"] == {"vllm": "it is not installed: run make peers"}
    assert list(found["ratios"]) == ["multiplexed_vs_serial"]
    assert found["sound"]
    assert "absent: vllm: it is not installed: run make peers" in notes(found)


def test_a_peer_that_fails_is_told_and_has_no_ratio():
    found = told(compared({**OURS, "llama-cpp": ["it said no"] * 2}))
    assert found["failed"] == {"llama-cpp": "it said no"}
    assert found["ratios"]["exact_vs_llama_cpp"] is None
    assert not found["sound"]
    assert "failed: llama-cpp: it said no" in notes(found)


def test_interlace_has_to_say_the_same_in_every_run():
    other = figures(3.0, tokens=[[1, 2, 3, 9]])
    one = compared({"interlace-multiplexed": [figures(4.0)], "interlace-serial": [other]})
    assert one.interlace_is_one is False
    assert not sound(one)
    assert any("DIFFERENT TOKENS" in line for line in notes(told(one)))


def test_rows_tell_rates_and_how_many_tokens_are_equal(tmp_path):
    other = figures(9.0, rate=2000.0, tokens=[[1, 2, 9, 4]])
    sizes = {"default": {"completion_s": 2.0}, "16": {"error": "no such size"}}
    found = told(compared({**OURS, "llama-cpp": [other] * 2}), sizes=sizes)
    table = {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in rows(found)}
    assert list(table) == ["interlace-multiplexed", "interlace-serial", "llama-cpp"]
    assert table["llama-cpp"] == {
        "engine": "llama-cpp",
        "completion": "9.00 s",
        "CPU": "2.0 s",
        "prefill": "2,000 / 4,000",
        "decode": "200 / -",
        "equal tokens": "3 of 4",
        "load of others": "0.05",
    }
    assert table["interlace-serial"]["equal tokens"] == "4 of 4"
    assert any("default: 2.00 s, 16: failed: no such size" in line for line in notes(found))
    draw(found, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_peers_alone_are_sound_and_have_no_ratio():
    found = told(compared({"vllm-tp2": [figures(9.0)]}))
    assert found["sound"]
    assert found["ratios"] == {"exact_vs_best_vllm": None, "multiplexed_vs_serial": None}
    assert found["rate_ratios"] == {}
    assert rows(found)[0][HEADINGS.index("equal tokens")] == "-"
    assert not sound(compared({"interlace-serial": ["it said no"], "vllm-tp2": [figures(9.0)]}))


def test_a_report_says_which_comparison_it_is():
    usual = PeersRequest(installed=Path("/nowhere"))
    without = PeersRequest(installed=Path("/nowhere"), tiles=False)
    names = [
        which(report(compared(OURS), one, block_sizes={}, max_load=0.2)) for one in (usual, without)
    ]
    assert names == [
        "all engines with all that the processor has",
        "all engines without matrix tiles",
    ]


def test_nothing_is_drawn_where_nothing_counts(tmp_path):
    found = told(compared({"interlace-serial": ["no"]}))
    assert rows(found) == []
    draw(found, tmp_path / "peers.png")
    assert not (tmp_path / "peers.png").exists()
