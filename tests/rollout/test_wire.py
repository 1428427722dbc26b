"""Frames between processes of one host: whole, in order, and nobody waits to send."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.envs.host import SubprocessHost
from interlace.rollout.launch.environment_line import EnvironmentLine
from interlace.rollout.launch.wire import Door, Wire, knock


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    made = tuple(Wire(end, patience_s=5.0) for end in socket.socketpair())
    yield made[0], made[1]
    for end in made:
        end.hang_up()
        end.close()


def test_frames_arrive_whole_and_in_order(ends: tuple[Wire, Wire]) -> None:
    one, other = ends
    frames = [b"", b"a", bytes(70_000), b"b" * 3, b""]
    for frame in frames:
        one.send(frame)
    got: list[bytes] = []
    while len(got) < len(frames):
        got += other.receive()
    assert got == frames


def test_who_sends_does_not_wait_for_who_receives(ends: tuple[Wire, Wire]) -> None:
    one, other = ends
    frames = [bytes([n]) * 1_000_000 for n in range(8)]
    for frame in frames:
        one.send(frame)
    got: list[bytes] = []
    while len(got) < len(frames):
        got += other.receive()
    assert got == frames


def test_silence_and_the_end_are_told_apart() -> None:
    ours, theirs = socket.socketpair()
    one, other = Wire(ours, patience_s=0.01), Wire(theirs, patience_s=5.0)
    with pytest.raises(TimeoutError):
        one.receive()
    other.send(b"still here")
    assert one.receive() == [b"still here"]
    other.send(b"last word")
    other.hang_up()
    other.close()
    assert one.receive() == [b"last word"]
    with pytest.raises(EOFError):
        one.receive()
    one.send(b"nobody hears that")
    one.close()
    one.send(b"nor that")


def test_a_wait_ends_when_this_end_hangs_up(ends: tuple[Wire, Wire]) -> None:
    errors: list[type[BaseException]] = []

    def receive() -> None:
        try:
            ends[0].receive()
        except EOFError as error:
            errors.append(type(error))

    waiting = threading.Thread(target=receive)
    waiting.start()
    ends[0].hang_up()
    waiting.join(5.0)
    assert errors == [EOFError]


def test_a_door_opens_once_and_leaves_nothing_behind() -> None:
    door = Door()
    folder = Path(door.path).parent
    assert folder.stat().st_mode & 0o077 == 0
    with knock(door.path) as outside, door.open(5.0) as inside:
        outside.sendall(b"x")
        assert inside.recv(1) == b"x"
    assert not folder.exists()
    door.close()


def test_nobody_at_the_door_is_noticed_in_time() -> None:
    door = Door()
    with pytest.raises(TimeoutError):
        door.open(0.01)
    assert not Path(door.path).exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_host_that_is_lent_is_called_past_who_started_it_and_its_end_is_seen() -> None:
    async def run() -> None:
        host, door = await SubprocessHost.start(), Door()
        with knock(door.path) as connection:
            host.lend(connection)
        line = await EnvironmentLine.behind(door)
        assert await line.call(b'{"op": "hello"}') == b'{"ok": true}'
        assert not line.is_closed
        os.kill(host.pid, signal.SIGTERM)
        assert await line.call(b'{"op": "hello"}') in (None, b'{"ok": true}')
        host.kill()
        await host._buried()
        assert line.is_closed
        assert await line.call(b'{"op": "hello"}') is None
        line.close()

    asyncio.run(run())
