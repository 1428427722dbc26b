from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from interlace.rollout.timeline import COLOURS, draw_timeline


def colour_share(path, colour: str) -> float:
    pixels = np.round(imread(path)[:, :, :3] * 255).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((abs(pixels - wanted).max(axis=2) <= 2).mean())


@pytest.mark.slow
def test_a_timeline_shows_both_paths(recorded_run, tmp_path):
    records = recorded_run(["(PDPDPD", "PDPDPD)", "", "DDDD"], num_ranks=3)
    draw_timeline(tmp_path / "timeline.png", records, mode="multiplexed")
    assert colour_share(tmp_path / "timeline.png", COLOURS["prefill"]) > 0.02
    assert colour_share(tmp_path / "timeline.png", COLOURS["decode"]) > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[""], ["D"], ["(P)"], ["MM", "MM"]])
def test_short_and_one_sided_runs_are_drawn(recorded_run, tmp_path, steps):
    draw_timeline(tmp_path / "timeline.png", recorded_run(steps), mode="serial")
    assert (tmp_path / "timeline.png").stat().st_size > 1_000


@pytest.mark.slow
def test_of_many_ranks_the_first_are_drawn(recorded_run, tmp_path):
    draw_timeline(tmp_path / "a.png", recorded_run(["(PDP)"], num_ranks=8), mode="serial")
    draw_timeline(tmp_path / "b.png", recorded_run(["(PDP)"], num_ranks=32), mode="serial")
    assert imread(tmp_path / "a.png").shape == imread(tmp_path / "b.png").shape


def test_a_run_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no steps"):
        draw_timeline(tmp_path / "timeline.png", {0: ([], [])}, mode="serial")
