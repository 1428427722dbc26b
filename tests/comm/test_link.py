"""Times on a link, by arithmetic alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.comm.link import SEGMENT_BYTES, Link, LinkModel, Visible

MODEL = LinkModel(latency_us=10, gbit=8)
"""One byte a nanosecond."""
LATENCY = 10_000


def link() -> Link:
    return Link(MODEL)


def test_a_message_is_visible_at_post_plus_latency_plus_bytes_over_bandwidth() -> None:
    assert link().send(500, 2_000, "a") == [Visible("a", 500 + LATENCY + 2_000)]


def test_without_a_bandwidth_only_the_latency_counts() -> None:
    assert Link(LinkModel(latency_us=1.5, gbit=None)).send(0, 1 << 30, "a") == [Visible("a", 1_500)]


def test_a_message_waits_for_the_wire_but_latencies_overlap() -> None:
    wire = link()
    wire.send(0, 1_000, "a")
    assert wire.send(10, 500, "b") == [Visible("b", 1_500 + LATENCY)]
    assert wire.send(90_000, 500, "c") == [Visible("c", 90_500 + LATENCY)]


def test_a_message_without_bytes_costs_the_latency() -> None:
    assert link().send(7, 0, "a") == [Visible("a", 7 + LATENCY)]


def test_a_small_message_passes_between_two_segments_and_delays_the_rest_by_its_own_time() -> None:
    wire = link()
    big = 4 * SEGMENT_BYTES
    assert wire.send(0, big, "big") == [Visible("big", big + LATENCY)]
    during_the_second = SEGMENT_BYTES + 100
    assert wire.send(during_the_second, 1_000, "small") == [
        Visible("big", big + 1_000 + LATENCY),
        Visible("small", 2 * SEGMENT_BYTES + 1_000 + LATENCY),
    ]


def test_a_small_message_behind_the_last_segment_delays_nothing() -> None:
    wire = link()
    big = 2 * SEGMENT_BYTES
    wire.send(0, big, "big")
    assert wire.send(big - 1, 1_000, "small") == [Visible("small", big + 1_000 + LATENCY)]


def test_large_messages_go_one_after_the_other() -> None:
    wire = link()
    big = 3 * SEGMENT_BYTES + 5
    wire.send(0, big, "first")
    assert wire.send(1, big, "second") == [Visible("second", 2 * big + LATENCY)]
    assert wire.send(2, 10, "small") == [
        Visible("first", big + 10 + LATENCY),
        Visible("second", 2 * big + 10 + LATENCY),
        Visible("small", SEGMENT_BYTES + 10 + LATENCY),
    ]


MESSAGES = st.lists(
    st.tuples(st.integers(0, 300_000), st.integers(0, 5 * SEGMENT_BYTES)), min_size=1, max_size=12
)


@settings(max_examples=40)
@given(MESSAGES)
def test_the_wire_carries_every_byte_once_and_never_two_at_a_time(
    messages: list[tuple[int, int]],
) -> None:
    wire, now, visible, posted = link(), 0, {}, {}
    for key, (pause, size) in enumerate(messages):
        now += pause
        posted[key] = now, size
        for which, at_ns in wire.send(now, size, key):
            # What was there cannot be delayed, and nothing comes earlier than was said.
            before = visible.get(which)
            assert before is None or before - LATENCY >= now
            assert at_ns >= (before or 0)
            visible[which] = at_ns
    for key, (at, size) in posted.items():
        assert visible[key] >= at + size + LATENCY
    ends = sorted((at_ns - LATENCY, key) for key, at_ns in visible.items())
    carried = 0
    for end, key in ends:
        carried += posted[key][1]
        began = min(at for at, _ in posted.values())
        assert end >= began + carried
    last_post = max(at for at, _ in posted.values())
    assert ends[-1][0] <= last_post + sum(size for _, size in posted.values())
