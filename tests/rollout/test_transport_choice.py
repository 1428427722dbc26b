"""What moves bytes between ranks, and how it is chosen and told."""

from typing import Any

import pytest
import torch.distributed as dist

from interlace.comm.collectives import Gather
from interlace.comm.doorbell import DoorbellWaiter
from interlace.comm.torch_communicator import ControlCommunicator
from interlace.comm.waiter import SleepWaiter
from interlace.comm.window_channel import ByteCommunicator
from interlace.comm.windows import native
from interlace.rollout import ConfigError, load_config
from interlace.rollout.config import Launch, LinkSection
from interlace.rollout.launch import processes
from interlace.rollout.launch.launcher import LaunchError
from interlace.rollout.launch.processes import ProcessTransport

built = pytest.mark.skipif(native() is None, reason="built without a compiler")


def joined(**launch: Any) -> ProcessTransport:
    """The only rank of its job."""
    return ProcessTransport(
        rank=0, world=1, store=dist.HashStore(), launch=Launch(kind="torchrun", **launch)
    )


@built
def test_one_host_with_the_extension_takes_the_window_for_control_too() -> None:
    with joined() as transport:
        assert transport.carrier.kind == "window"
        assert isinstance(transport.waiter, DoorbellWaiter)
        first, second = transport.control(5.0), transport.control(7.0)
        assert isinstance(first, ByteCommunicator)
        assert (first.timeout_s, second.timeout_s) == (5.0, 7.0)
        for communicator in (first, second, first):  # they count their messages together
            handle = communicator.post(Gather(role="control", stage="x", payload=b"a"), None)
            assert communicator.poll(handle)
            assert communicator.result(handle) == [b"a"]


def test_without_the_extension_gloo_is_used_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "native", lambda: None)
    with joined() as transport:
        assert transport.carrier.kind == "gloo"
        assert transport.carrier.why == "the extension is not built on rank 0"
        assert isinstance(transport.waiter, SleepWaiter)
        assert isinstance(transport.control(5.0), ControlCommunicator)


def test_gloo_is_used_where_it_is_asked_for() -> None:
    with joined(transport="gloo") as transport:
        assert (transport.carrier.kind, transport.carrier.why) == (
            "gloo",
            "launch.transport is gloo",
        )


@pytest.mark.parametrize(
    ("launch", "key"),
    [({"transport": "window"}, "transport"), ({"link": LinkSection(latency_us=5)}, "link")],
)
def test_who_insists_on_the_window_gets_one_error_and_can_join_again(
    launch: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "native", lambda: None)
    with pytest.raises(LaunchError, match=f"launch.{key} needs the window, but the extension is"):
        joined(**launch)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "overrides",
    [
        ["launch.kind=local", "launch.transport=window"],
        ["launch.kind=ray", "launch.backend=nccl", "launch.transport=window"],
        ["launch.kind=local", "launch.link.latency_us=5"],
        ["launch.kind=ray", "launch.transport=gloo", "launch.link.latency_us=5"],
    ],
)
def test_a_configuration_that_cannot_have_a_window_says_so(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="window"):
        load_config(preset="tiny", overrides=overrides)
