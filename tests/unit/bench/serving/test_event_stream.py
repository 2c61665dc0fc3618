"""Server-sent events, cut in every possible way."""

import pytest

from gapless.bench.serving.event_stream import EventStream

STREAM = (
    'data: {"a": "é"}\n\n'
    ": a comment\ndata:no space\r\ndata: second line\r\n\r\n"
    "event: x\ndata\n\n"
    "id: 3\n\n"
    "data: [DONE]\n\n"
)
EVENTS = ['{"a": "é"}', "no space\nsecond line", "", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_events_do_not_depend_on_how_bytes_are_cut(size: int, line_end: str) -> None:
    data = STREAM.replace("\r\n", "\n").replace("\n", line_end).encode()
    stream, events = EventStream(), []
    for begin in range(0, len(data), size):
        events += stream.feed(data[begin : begin + size])
    if line_end == "\r":
        # The last return may be half of a line's end; with one byte more it is known.
        events += stream.feed(b":")
    assert events == EVENTS


def test_line_ends_may_be_mixed() -> None:
    assert EventStream().feed(STREAM.encode()) == EVENTS


def test_one_space_after_the_colon_is_not_data_and_others_are() -> None:
    assert EventStream().feed(b"data:  two before, one after \n\n") == [" two before, one after "]


def test_an_event_without_its_end_is_not_given_out() -> None:
    stream = EventStream()
    assert stream.feed(b"data: half") == []
    assert stream.feed(b" of it\n") == []
    assert stream.feed(b"\n") == ["half of it"]
