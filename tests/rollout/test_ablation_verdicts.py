"""Arms, verdicts, and what is written of them; all on runs that were never made."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from tests.rollout.ablation_runs import ORDERS, compared, figures_of

from interlace.rollout.ablation.arms import MODES, parse_arms, split_present
from interlace.rollout.ablation.chunk_tuning import Tuning, tune
from interlace.rollout.ablation.gain import Gain
from interlace.rollout.ablation.page import page
from interlace.rollout.ablation.pictures import draw_all
from interlace.rollout.ablation.report import report
from interlace.rollout.ablation.request import Request, link_overrides, scale_of
from interlace.rollout.ablation.rows import HEADINGS, notes, rows
from interlace.rollout.ablation.statistics import PairedRatio
from interlace.rollout.ablation.verdict import sentence, verdict
from interlace.rollout.config import ConfigError

REQUEST = Request(workload="swe-long")


@pytest.fixture(scope="module")
def found(recorded_run):
    """Arm -> the figures of five runs."""
    return {
        mode: [figures_of(recorded_run, mode, rounds=6, seed=seed) for seed in range(5)]
        for mode in ("serial", "chunked", "whole_forward", "multiplexed")
    }


# ---- arms


def test_all_modes_are_arms_by_default():
    assert [arm.name for arm in parse_arms(None, world=2)] == list(MODES) == list(ORDERS)


PLAN = ("mode=multiplexed", "order.policy=plan")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("plan", PLAN),
        ("plan-layer", (*PLAN, "order.layers_per_boundary=1")),
        ("plan-2layers", (*PLAN, "order.layers_per_boundary=2")),
        ("abreast", ("mode=multiplexed", "order.policy=abreast")),
        ("turnstile", ("mode=multiplexed", "order.policy=turnstile")),
        ("global_enqueue", ("mode=multiplexed", "order.policy=global_enqueue")),
        ("disaggregated-1p3d", ("mode=disaggregated", "layout.prefill_ranks=1", "layout.tp=1")),
        ("replicas-2", ("mode=replicas", "layout.replicas=2", "layout.tp=1")),
        (
            "multiplexed+scheduler.chunk_steps=6",
            ("mode=multiplexed", "scheduler.chunk_steps=6"),
        ),
    ],
)
def test_a_name_says_what_an_arm_sets(name, overrides):
    (arm,) = parse_arms(name, world=4)
    assert arm.overrides == overrides


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("serial,fast", "there is no arm 'fast'"),
        ("disaggregated-1p1d", r"1 \+ 1 ranks, but layout.world is 4"),
        ("serial,serial", "'?serial'? is there twice"),
        ("serial+chunk", "behind \\+ goes key=value"),
        (",", "name at least one arm"),
    ],
)
def test_a_word_that_is_no_arm_is_told_so(names, message):
    with pytest.raises(ConfigError, match=message):
        parse_arms(names, world=4)


def test_an_arm_the_job_cannot_run_is_absent_with_its_reason():
    arms = parse_arms("serial,serial+order.policy=turnstile", world=2)
    present, absent = split_present(arms, ["layout.world=2"])
    assert [arm.name for arm in present] == ["serial"]
    assert "order is of mode multiplexed" in absent["serial+order.policy=turnstile"]
    with pytest.raises(ConfigError, match="tp=2 does not divide world=3"):
        split_present(arms, ["layout.world=3", "layout.tp=2"])


def test_links_and_scales_are_read():
    assert link_overrides("500us,2gbit") == (
        "launch.link.latency_us=500.0",
        "launch.link.shared=false",
        "launch.link.gbit=2.0",
    )
    assert "launch.link.latency_us=1500.0" in link_overrides("1.5ms,shared")
    assert "launch.link.shared=true" in link_overrides("1.5ms,shared")
    with pytest.raises(ConfigError, match="'fast' is no part of a link"):
        link_overrides("fast")
    scale = scale_of("prompts=0.5,lengths=0.25")
    assert (scale.prompts, scale.lengths, scale.turns) == (0.5, 0.25, 1)
    assert scale_of("full") == "full"
    with pytest.raises(ConfigError, match="--scale length=2"):
        scale_of("length=2")


# ---- the baseline is tuned


def test_chunks_grow_while_that_helps():
    seconds = {128: 9.0, 256: 7.0, 512: 6.0, 1024: 6.5}
    tuning = tune(128, seconds.__getitem__)
    assert tuning.best == 512
    assert sorted(tuning.completion_s) == [128, 256, 512, 1024]


def test_chunks_shrink_where_growing_did_not_help():
    seconds = {64: 7.0, 32: 8.0, 128: 7.5, 256: 9.0}
    assert tune(128, seconds.__getitem__).best == 64


def test_what_cannot_be_measured_is_not_tuned():
    assert tune(128, lambda chunk: None).best is None


# ---- verdicts


def ratio(median, low, high, pairs=7):
    return PairedRatio(median=median, low=low, high=high, pairs=pairs)


def gained(**changes):
    values = {
        "prefill_share": 0.4,
        "slow_down": 1.4,
        "bound": 0.24,
        "saved": 0.0,
        "won_of_bound": 0.0,
        "serial_idle": 0.3,
        "serial_parked": 0.0,
        "won_of_idle": 0.0,
    }
    return Gain(**{**values, **changes})


EQUAL = ratio(1.001, 0.99, 1.01)


@pytest.mark.parametrize(
    ("ratio", "coexisting", "gain", "words"),
    [
        (
            ratio(0.85, 0.84, 0.87),
            0.7,
            gained(saved=0.15, won_of_idle=0.5),
            "multiplexed takes 0.850 [0.840, 0.870] of serial's time: P and D coexist in 70 % of "
            "steps, and of the 30 % of its time that serial waits, 50 % is won",
        ),
        (
            EQUAL,
            0.04,
            gained(),
            "no gain: multiplexed takes 1.001 [0.990, 1.010] of serial's time; "
            "P and D coexist in 4 % of steps: nothing to overlap",
        ),
        (EQUAL, 0.5, gained(prefill_share=0.01), "prefill is 1.0 % of serial's time"),
        (EQUAL, 0.5, gained(serial_parked=0.8, serial_idle=0.9), "the environment sets the pace"),
        (EQUAL, 0.5, gained(serial_idle=0.03), "wait for one another in 3 % of their time"),
        (EQUAL, 0.5, gained(slow_down=1.97), "slow each other down by 1.97"),
        (EQUAL, 0.5, gained(), "more repeats may tell"),
        (ratio(1.1, 1.05, 1.2), 0.5, gained(slow_down=2.3), "takes longer, 1.100"),
        (ratio(1.1, 1.05, 1.2), 0.5, gained(serial_idle=0.02), "nothing to hide"),
        (ratio(0.9, 0.9, 0.9, pairs=1), 0.5, None, "(from 1 pairs only)"),
    ],
)
def test_a_verdict_is_one_sentence_with_its_cause(ratio, coexisting, gain, words):
    said = sentence("multiplexed", "serial", ratio, coexisting, gain)
    assert words in said
    assert "\n" not in said


def test_multiplexed_is_compared_with_serial(found):
    said = verdict(compared(found))
    assert said.sound
    assert said.text.startswith("multiplexed takes 0.6")
    best = compared(found).best_of_same_sharding()
    assert best is not None
    assert best.name != "multiplexed"


def test_orders_are_compared_by_how_long_decode_waits(recorded_run):
    slow = [figures_of(recorded_run, "whole_forward", rounds=6, seed=seed) for seed in range(5)]
    fast = [figures_of(recorded_run, "multiplexed", rounds=6, seed=seed) for seed in range(5)]
    said = verdict(compared({"plan": fast, "plan-layer": fast, "global_enqueue": slow}))
    assert said.sound
    assert said.text.startswith("global_enqueue takes 1.")
    assert said.text.endswith("ready to issued, with plan 2.0 ms")


def test_different_digests_are_all_that_is_said(found):
    other = [{**one, "digest": "e" * 64} for one in found["multiplexed"]]
    said = verdict(compared({**found, "multiplexed": other}))
    assert not said.sound
    assert said.text.startswith("DIGESTS DIFFER")
    assert "eeee" in said.text


def test_void_runs_are_not_counted(found):
    loads = {("multiplexed", 0): 5.0, ("serial", 3): 3.5}
    those = compared(found, loads=loads)
    written = report(those, REQUEST, description={}, tuning=None)
    assert len(written["arms"]["multiplexed"]["completion_s"]) == 4
    ratio = written["arms"]["multiplexed"]["ratio_to_reference"]["completion"]
    assert ratio["pairs"] == 3
    assert written["arms"]["serial"]["subject_ratio"] == ratio
    assert written["arms"]["multiplexed"]["subject_ratio"] is None
    assert written["load"]["void_runs"] == 2
    assert [run["void"] for run in written["arms"]["serial"]["runs"]] == [False] * 3 + [True, False]
    assert any("2 runs are void" in line for line in notes(written))


def test_where_every_run_is_void_there_is_no_verdict(found):
    loads = {(arm, number): 9.0 for arm in found for number in range(5)}
    those = compared(found, loads=loads)
    said = verdict(those)
    assert not said.sound
    assert "20 of 20 runs are void" in said.text
    written = report(those, REQUEST, description={}, tuning=None)
    assert rows(written) == []
    assert "20 of 20 runs are void" in page(written, draw_all(those))


# ---- what is written


@pytest.fixture(scope="module")
def written(found):
    return report(
        compared(found, absent={"replicas": "mode: 'replicas' is not built yet"}),
        REQUEST,
        description={"trajectories": 4, "turns": {"p50": 3.0}},
        tuning=Tuning(completion_s={256: 2.0, 512: 1.5}),
    )


def test_a_report_has_every_run_and_says_what_is_absent(written):
    again = json.loads(json.dumps(written, allow_nan=False))
    for arm in again["arms"].values():
        assert len(arm["completion_s"]) == len(arm["cpu_s"]) == 5
        assert arm["digest"] == "d" * 64
    assert again["absent"] == {"replicas": "mode: 'replicas' is not built yet"}
    assert again["verdict"].startswith("multiplexed takes 0.6")
    assert again["chunk_tuning"]["chosen"] == 512
    assert again["machine"]["cores"] >= 1
    told = " ".join(notes(written))
    for words in ("absent: replicas", "chunks of 512", "min(p, 1 - p)(2 - s)", "same sharding"):
        assert words in told


def test_a_row_has_a_cell_for_every_heading(written):
    for row in rows(written):
        assert len(row) == len(HEADINGS)


@pytest.fixture(scope="module")
def drawn(found):
    return draw_all(compared(found))


@pytest.mark.slow
def test_a_page_needs_nothing_but_itself(drawn, written):
    text = page(written, drawn)

    class Names(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.ids: list[str] = []
            self.tags: set[str] = set()
            self.asked: list[str] = []

        def handle_starttag(self, tag, attrs):
            self.tags.add(tag)
            for name, value in attrs:
                if name == "id":
                    self.ids.append(value)
                if name.split(":")[-1] in ("src", "href", "data"):
                    self.asked.append(value)

    names = Names()
    names.feed(text)
    assert not names.tags & {"script", "link", "img", "iframe", "object"}
    assert all(value.startswith("#") for value in names.asked)
    assert len(set(names.ids)) == len(names.ids)
    assert not re.search(r"url\((?!#)|@import", text)
    assert text.count("<svg") == 4
    assert written["verdict"].replace("'", "&#x27;") in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.slow
def test_pictures_are_files_too(drawn, tmp_path):
    for picture in drawn:
        picture.save_png(tmp_path / f"{picture.name}.png")
        assert (tmp_path / f"{picture.name}.png").stat().st_size > 5_000
