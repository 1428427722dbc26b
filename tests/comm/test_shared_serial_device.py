"""The serial device of processes: each works out from all logs what has run."""

import os
import random
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.comm.byte_windows import NoWait, ends
from tests.comm.test_post_order import request, ticket

from interlace.comm.serial_device import SerialDevice
from interlace.comm.shared_memory import SharedMemory
from interlace.comm.shared_serial_device import OnSerialDevice, SharedSerialDevice
from interlace.comm.windows import Unshared

LOG_BYTES = 1 << 19


def devices(num_ranks: int, slots: int) -> list[SharedSerialDevice]:
    logs = [memoryview(bytearray(LOG_BYTES)) for _ in range(num_ranks)]
    return [SharedSerialDevice(rank, logs, slots) for rank in range(num_ranks)]


def test_reversed_order_never_finishes_on_one_slot_and_does_on_two() -> None:
    for slots, done in ((1, False), (2, True)):
        both = devices(2, slots)
        posted = [
            [device.enqueue(name, (0, 1)) for name in order]
            for device, order in zip(both, ("ab", "ba"), strict=True)
        ]
        for device, entries in zip(both, posted, strict=True):
            assert [device.is_done(entry) for entry in entries] == [done, done]


def test_a_collective_waits_behind_one_that_misses_a_member() -> None:
    zero, one, two = devices(3, slots=1)
    for device in (zero, one):
        device.enqueue("all", (0, 1, 2))
    pair = [device.enqueue("pair", (0, 1)) for device in (zero, one)]
    assert not zero.is_done(pair[0])
    two.enqueue("all", (0, 1, 2))
    assert zero.is_done(pair[0])
    assert one.is_done(pair[1])


@pytest.mark.parametrize("seed", range(20))
def test_every_process_finds_what_the_device_of_one_process_finds(seed: int) -> None:
    draw = random.Random(seed)
    groups = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 1, 2, 3)]
    order = [(f"{nth}", draw.choice(groups)) for nth in range(60)]
    lists = [[entry for entry in order if rank in entry[1]] for rank in range(4)]
    for mine in lists:  # two neighbours change places on some rank: with one slot that may hang
        at = draw.randrange(len(mine) - 1)
        if draw.random() < 0.3:
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
    slots = draw.choice([1, 2])
    one, many = SerialDevice(4, slots), devices(4, slots)
    names: dict[str, bytes] = {}
    left = [list(mine) for mine in lists]
    while any(left):
        rank = draw.choice([rank for rank in range(4) if left[rank]])
        entry, members = left[rank].pop(0)
        one.enqueue(rank, entry, members)
        names[entry] = many[rank].enqueue(entry, members)
        if draw.random() < 0.2:
            many[draw.randrange(4)].is_done(b"")
    for rank, mine in enumerate(lists):
        for entry, _ in mine:
            assert many[rank].is_done(names[entry]) == one.is_done(rank, entry)


@pytest.mark.slow
def test_more_entries_than_the_log_holds_go_through() -> None:
    both = devices(2, slots=1)
    for nth in range(10_000):
        entries = [device.enqueue(f"{nth}", (0, 1)) for device in both]
        assert all(device.is_done(e) for device, e in zip(both, entries, strict=True))


def test_a_communicator_on_the_device_is_done_once_both_are() -> None:
    both, waiter = devices(2, slots=1), NoWait()
    decode, prefill = (
        [
            OnSerialDevice(end, device, path=path, role="ep", members=(0, 1), waiter=waiter)
            for end, device in zip(ends(2, path=path), both, strict=True)
        ]
        for path in ("decode", "prefill")
    )
    first = decode[0].post(request(), ticket(0))
    second = prefill[0].post(request(), ticket(1, "prefill"))
    prefill[1].post(request(), ticket(1, "prefill"))
    decode[1].post(request(), ticket(0))
    assert not prefill[0].poll(second)
    assert not decode[0].poll(first)


def joined(rank: int, told: Sequence[list[str]], meeting: threading.Barrier, unseen: int) -> str:
    """What joining came to on this rank, which cannot find the memory of rank `unseen`."""
    rounds = iter(told)

    def tell(text: str) -> list[str]:
        said = next(rounds)
        said[rank] = text
        meeting.wait()
        return ["0 0" if said is told[0] and peer == unseen else said[peer] for peer in (0, 1)]

    try:
        SharedSerialDevice.join(rank, tell, 1).close()
    except Unshared as error:
        return str(error)
    return "joined"


@pytest.mark.parametrize(
    ("unseen", "outcome"), [(-1, "joined"), (0, "rank 1 cannot open memory of rank 0")]
)
def test_ranks_join_or_are_all_refused(unseen: int, outcome: str) -> None:
    told, meeting = [["", ""], ["", ""]], threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda r: joined(r, told, meeting, unseen if r else -1), (0, 1)))
    assert said[0] == said[1]
    assert outcome in said[0]


def test_a_rank_that_was_killed_leaves_the_others_a_device_that_works() -> None:
    memories = [SharedMemory.create(LOG_BYTES) for _ in range(3)]
    logs = [memory.buffer for memory in memories]
    pid = os.fork()
    if not pid:
        device = SharedSerialDevice(2, logs, 1)
        device.enqueue("all", (0, 1, 2))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    zero, one = (SharedSerialDevice(rank, logs, 1) for rank in (0, 1))
    for name, members in (("all", (0, 1, 2)), ("pair", (0, 1))):
        entries = [device.enqueue(name, members) for device in (zero, one)]
        assert zero.is_done(entries[0])
        assert one.is_done(entries[1])
