"""The meeting of a cell's ranks, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from sweepack.ddp.meeting import Line, Meeting


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.close()


def until(meeting: Meeting, members: int) -> None:
    for _ in range(100):
        if len(meeting.members) == members:
            return
        meeting.look(0.1)
    raise AssertionError(f"{len(meeting.members)} of {members} came")


def joined(meeting: Meeting, rank: int) -> Line:
    line = Line(["127.0.0.1"], meeting.port, 5)
    line.say(token=meeting.token, rank=rank)
    return line


def test_what_either_side_says_reaches_the_other(meeting: Meeting) -> None:
    lines = [joined(meeting, rank) for rank in range(3)]
    until(meeting, 3)
    for member in meeting.members:
        member.send(go={"port": member.rank})
    assert [line.hear(5) for line in lines] == [{"go": {"port": rank}} for rank in range(3)]
    lines[1].say(end={"metrics": {"x": "y" * 3_000_000}})
    while not any(member.end for member in meeting.members):
        meeting.look(0.1)
    ended = next(member for member in meeting.members if member.end)
    assert ended.rank == 1 and ended.end and len(ended.end["metrics"]["x"]) == 3_000_000


def test_strangers_and_those_without_the_token_are_no_members(meeting: Meeting) -> None:
    with socket.create_connection(("127.0.0.1", meeting.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with socket.create_connection(("127.0.0.1", meeting.port)) as other:
            other.sendall(b"5\n")
        Line(["127.0.0.1"], meeting.port, 5).say(token="guessed", rank=0)
        line = joined(meeting, 0)
        until(meeting, 1)
        for _ in range(3):
            meeting.look(0.05)
    assert [member.rank for member in meeting.members] == [0]
    meeting.members[0].send(go={})
    assert line.hear(5) == {"go": {}}


def test_either_side_notices_that_the_other_has_gone(meeting: Meeting) -> None:
    first, second = joined(meeting, 0), joined(meeting, 1)
    until(meeting, 2)
    first._socket.shutdown(socket.SHUT_RDWR)
    while not any(member.gone for member in meeting.members):
        meeting.look(0.1)
    assert [member.rank for member in meeting.members if member.gone] == [0]
    heard: list[object] = []
    waiting = threading.Thread(target=lambda: heard.append(second.hear()))
    waiting.start()
    meeting.close()
    waiting.join(5)
    assert heard == [None]


def test_the_address_that_answers_is_taken_and_what_was_tried_is_told() -> None:
    meeting = Meeting()
    line = Line(["nowhere.invalid", "127.0.0.1"], meeting.port, 10)
    assert line.address == "127.0.0.1"
    port = meeting.port
    meeting.close()
    with pytest.raises(ConnectionError, match=r"cannot reach the launcher at port .*127\.0\.0\.1: .*refused"):
        Line(["127.0.0.1"], port, 1)
