"""The profile of a step: what it says of a shape that never came about."""

import pytest

from interlace.experiments.profile_step import averaged
from interlace.experiments.step_profile.rank import Steps

SEEN = Steps(
    parts=[{"experts": 2e-3, "Python": 1e-3}],
    waited_s=[5e-4],
    work=[{"flops": {"experts": 1e6}, "bytes": {"experts": 1e6}}],
)


def test_a_shape_that_no_step_had_is_named() -> None:
    with pytest.raises(ValueError, match="decode 32: rank 1 timed 0 steps"):
        averaged("decode 32", [SEEN, Steps(parts=[], waited_s=[], work=[])], 1e9, 1e9)


def test_milliseconds_and_the_share_of_the_nearer_ceiling_are_of_one_rank() -> None:
    found = averaged("decode 1", [SEEN, SEEN], 1e9, 2e9)
    assert found["cpu_ms"] == pytest.approx(3)
    assert found["waited_ms"] == pytest.approx(0.5)
    assert found["computed"]["experts"]["at_best_ms"] == pytest.approx(1)
    assert found["computed"]["experts"]["share"] == pytest.approx(0.5)
