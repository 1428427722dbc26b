"""No message of a rollout is larger than the slot it is given."""

from typing import Any

import pytest

from interlace.comm.collectives import Collective
from interlace.comm.communicator import Communicator
from interlace.comm.path import Ticket
from interlace.moe.config import read_config
from interlace.rollout import Rollout, load_config
from interlace.rollout.cache import model_folder
from interlace.rollout.launch.largest_message import largest_message
from interlace.rollout.launch.local import LocalTransport
from interlace.rollout.launch.transport import Groups

pytestmark = pytest.mark.slow


SPARE = 1 << 20
"""The room for counts and paddings alone would hold a tiny model's messages: it is left out."""


class Weighed:
    """Notes its messages as shares of what the largest was said to be."""

    def __init__(self, inner: Communicator, num_bytes: int, shares: list[float]) -> None:
        self._inner, self._num_bytes, self._shares = inner, num_bytes - SPARE, shares

    def post(self, request: Collective, ticket: Ticket | None) -> Any:
        self._shares.append(request.payload.nbytes / self._num_bytes)
        return self._inner.post(request, ticket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("model", "tp", "strategy"),
    [
        ("tiny-qwen3-moe", 1, "fixed"),
        ("tiny-qwen3-moe", 2, "all_to_all"),
        ("tiny-deepseek-v2", 2, "gather"),
    ],
)
def test_no_message_is_larger_than_its_slot(
    model: str, tp: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    make = LocalTransport.communicator

    def weighed(
        self: LocalTransport, path: str, role: str, groups: Groups, num_bytes: int
    ) -> Weighed:
        return Weighed(make(self, path, role, groups, num_bytes), num_bytes, shares)

    monkeypatch.setattr(LocalTransport, "communicator", weighed)
    config = load_config(
        preset="tiny",
        overrides=[
            f"model.path={model}",
            "layout.world=2",
            f"layout.tp={tp}",
            f"dispatch.prefill={strategy}",
            f"dispatch.decode={strategy}",
            "sampling.max_tokens=4",
            "scheduler.max_running=2",
        ],
    )
    with Rollout(config) as rollout:
        list(rollout.run(config.expand_tasks()))
    assert 0 < max(shares) <= 1


def test_the_room_for_a_message_can_be_given() -> None:
    config = load_config(preset="tiny", overrides=["launch.window_mib=3"])
    model_config = read_config(model_folder("tiny-qwen3-moe"))
    assert largest_message(config, model_config, ("decode",)) == 3 << 20
