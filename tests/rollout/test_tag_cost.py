"""The cost of verification is measured on steps that do the same work in both ways."""

from __future__ import annotations

import pytest

from interlace.rollout.verify import tag_cost


@pytest.mark.slow
def test_both_ways_run_the_same_steps_and_the_share_is_made_of_what_was_measured() -> None:
    cost = tag_cost.measure(num_pairs=3)
    assert cost.num_tickets == 8 * 3
    assert 0 < cost.step_s < 5
    assert cost.share == pytest.approx(
        (cost.tags_s + cost.headers_s) / (cost.step_s + cost.tags_s + cost.headers_s)
    )
