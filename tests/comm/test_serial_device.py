from interlace.comm.serial_device import SerialDevice


def test_a_collective_runs_once_it_is_first_in_every_members_queue() -> None:
    device = SerialDevice(2, slots=1)
    device.enqueue(0, "a", (0, 1))
    assert not device.is_done(0, "a")
    device.enqueue(1, "a", (0, 1))
    assert device.is_done(0, "a")
    assert device.is_done(1, "a")


def test_reversed_order_never_finishes_on_one_slot_and_does_on_two() -> None:
    for slots, done in ((1, False), (2, True)):
        device = SerialDevice(2, slots=slots)
        for rank, order in enumerate(("ab", "ba")):
            for entry in order:
                device.enqueue(rank, entry, (0, 1))
        assert [device.is_done(rank, entry) for rank in (0, 1) for entry in "ab"] == [done] * 4


def test_a_collective_waits_behind_one_that_misses_a_member() -> None:
    device = SerialDevice(3, slots=1)
    device.enqueue(0, "all", (0, 1, 2))
    device.enqueue(1, "all", (0, 1, 2))
    for rank in (0, 1):
        device.enqueue(rank, "pair", (0, 1))
    assert not device.is_done(0, "pair")
    device.enqueue(2, "all", (0, 1, 2))
    assert device.is_done(0, "pair")
    assert device.is_done(1, "pair")


def test_it_runs_what_can_run_whether_or_not_anybody_asks() -> None:
    device = SerialDevice(2, slots=1)
    for entry in range(5):
        device.enqueue(0, entry, (0, 1))
    for entry in range(5):
        device.enqueue(1, entry, (0, 1))
    assert device.is_done(0, 4)
