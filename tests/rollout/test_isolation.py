"""Paths of a rank hold nothing mutable in common but the weights and the KV pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from tests.rollout.object_graph import in_common, reach
from torch.distributed import HashStore

from interlace.comm.collectives import Forward
from interlace.comm.driver import run_blocking
from interlace.moe.sampling_params import SamplingParams
from interlace.rollout.cache import model_folder
from interlace.rollout.config_file import load_config
from interlace.rollout.engine import Engine
from interlace.rollout.inbox import Inbox
from interlace.rollout.launch.compose import compose
from interlace.rollout.launch.processes import ProcessTransport
from interlace.rollout.messages import TurnRequest

pytestmark = pytest.mark.slow

PATHS = ("decode", "prefill")


class Alone(NamedTuple):
    """A rank of a world of one."""

    engine: Engine
    transport: ProcessTransport


@contextmanager
def both_paths_in_flight(transport_name: str) -> Iterator[Alone]:
    """The loop of a real rank, alone in its world, while each path has a collective in flight."""
    overrides = [
        "launch.kind=ray",
        "layout.world=1",
        "scheduler.chunk_steps=6",
        "order.policy=plan",
        f"launch.transport={transport_name}",
    ]
    config = load_config(preset="tiny", overrides=overrides)
    inbox = Inbox()
    with ProcessTransport(rank=0, world=1, store=HashStore(), launch=config.launch) as transport:
        folder = model_folder(config.model.path)
        engine = compose(config, folder, transport, inbox, print, num_blocks=32).engine
        inbox.put(turn(0))
        for _ in range(4):
            run_blocking(engine.step(), park=time.sleep)
        inbox.put(turn(1))
        step = engine.step()
        drive(step, until=lambda: len(engine._sequencer._outstanding) == 2)
        yield Alone(engine, transport)
        step.close()
        engine._sequencer.close()


def drive(step: Forward, until: Callable[[], bool]) -> None:
    """Answer what the step waits for, at once since it is alone, until it is where it should be."""
    request = step.send(None)
    while not until():
        request = step.send(request.communicator.result(request.handle))


def turn(trajectory: int) -> TurnRequest:
    return TurnRequest(
        trajectory=trajectory,
        turn=0,
        token_ids=[1 + (trajectory + at) % 50 for at in range(40)],
        seed=0,
        experts_from=0,
        sampling=SamplingParams(max_tokens=200),
    )


def reached(alone: Alone, path: str, *extra: Any) -> dict[int, Any]:
    """All that this path can touch, weights and KV pool apart."""
    engine, sequencer = alone.engine, alone.engine._sequencer
    root = {
        "context": engine._contexts[path],
        "communicators": [end for key, end in sequencer.communicators.items() if key[0] == path],
        "forward": sequencer._running.get(path),
        "outstanding": sequencer._outstanding.get(path),
        "extra": extra,
    }
    # Two things of the rank carry no data: the witness knows the order over all paths, and the
    # doorbell says that something came.
    carry_nothing = sequencer._posts, alone.transport.waiter
    # Layers that two paths are at may differ, and yet lie in the same memory.
    weights = reach((engine._weights, engine._model), "weights").values()
    pool = engine._contexts[path].kv
    kept = pool, pool.pages
    return reach(root, path, beyond=[*(one.what for one in weights), *kept, *carry_nothing])


@pytest.mark.parametrize("transport_name", ["window", "gloo"])
def test_paths_share_nothing_mutable_but_weights_and_the_kv_pool(transport_name: str) -> None:
    with both_paths_in_flight(transport_name) as alone:
        decode, prefill = (reached(alone, path) for path in PATHS)
        assert min(len(decode), len(prefill)) > 50
        assert in_common(decode, prefill) == []


def test_the_walk_finds_a_buffer_a_communicator_and_a_tensor_that_are_shared() -> None:
    with both_paths_in_flight("gloo") as alone:
        communicators = alone.engine._sequencer.communicators
        own = communicators["prefill", "ep"]
        communicators["prefill", "ep"] = communicators["decode", "ep"]
        found = in_common(*(reached(alone, path) for path in PATHS))
        assert any("TorchCommunicator" in line for line in found)
        communicators["prefill", "ep"] = own
        whole = torch.zeros(64)
        views = {"decode": whole[:32], "prefill": whole[48:]}
        found = in_common(*(reached(alone, path, views[path]) for path in PATHS))
        assert found == ["decode['extra'][0] shares memory with prefill['extra'][0]"]
