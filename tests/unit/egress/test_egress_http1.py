"""Messages: read strictly, written anew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress import http1
from ringfence.egress.http1 import BadMessage, Incomplete, Reader, parse_request, parse_response


class Bytes:
    """A stream that gives these bytes, in pieces of a size."""

    def __init__(self, data: bytes, size: int = 65536) -> None:
        self.data, self.size = data, size

    async def read(self, limit: int = 65536) -> bytes:
        size = min(self.size, limit)
        piece, self.data = self.data[:size], self.data[size:]
        return piece

    async def write(self, data: Any) -> None: ...
    async def eof(self) -> None: ...
    async def close(self) -> None: ...


def request(head: bytes, size: int = 65536) -> http1.RequestHead:
    return parse_request(asyncio.run(Reader(Bytes(head, size)).head()))


GOOD = b"POST /x?y HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nX-A: 1 \t2\r\nX-Empty:\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 65536])
def test_a_proper_request(size: int) -> None:
    head = request(GOOD, size)
    assert (head.method, head.target, head.length, head.host, head.keep) == (
        "POST",
        "/x?y",
        3,
        "a.example",
        True,
    )
    assert head.headers == [("X-A", "1 \t2"), ("X-Empty", "")]


SMUGGLING = {
    "both lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
    "the same length twice": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\n",
    "a list of lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 4\r\n\r\n",
    "a length with a sign": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\n",
    "a negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "a hexadecimal length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x4\r\n\r\n",
    "an empty length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n",
    "a length in other digits": "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\n\r\n".encode("latin-1"),  # noqa: E501
    "chunked twice": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",  # noqa: E501
    "chunked, chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n",
    "gzip, chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "chunked, identity": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
    "xchunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n",
    "vertical tab before chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    "space before colon": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 4\r\n\r\n",
    "tab before colon": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\t: chunked\r\n\r\n",
    "folded header": b"POST / HTTP/1.1\r\nHost: a\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\n",
    "folded first header": b"POST / HTTP/1.1\r\n Host: a\r\n\r\n",
    "underscore": b"POST / HTTP/1.1\r\nHost: a\r\nContent_Length: 4\r\n\r\n",
    "LF alone": b"POST / HTTP/1.1\r\nHost: a\nContent-Length: 4\r\n\r\n",
    "CR alone": b"POST / HTTP/1.1\r\nHost: a\rContent-Length: 4\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nHost: a\r\nX\x00: b\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n",
    "empty name": b"GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "the same host twice": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tab": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "four words": b"GET / x HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "small HTTP": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "small method": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "method with brackets": b"G(T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "line before": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "Connection takes Host": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close, Host\r\n\r\n",
    "Connection takes a credential": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Authorization\r\n\r\n",
    "another Expect": b"GET / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLING)
def test_what_could_be_read_in_two_ways_is_refused(name: str) -> None:
    with pytest.raises(BadMessage):
        request(SMUGGLING[name])


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nX: " + b"a" * 70000 + b"\r\n\r\n", b"a" * 70000])
def test_a_head_without_end_is_cut_off(data: bytes) -> None:
    with pytest.raises(BadMessage) as caught:
        request(data)
    assert caught.value.status == 431


def test_too_many_headers() -> None:
    lines = b"".join(b"X%d: y\r\n" % number for number in range(300))
    with pytest.raises(BadMessage) as caught:
        request(b"GET / HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n")
    assert caught.value.status == 431


def body(data: bytes, length: int, size: int = 65536) -> bytes:
    async def read() -> bytes:
        return b"".join([piece async for piece in Reader(Bytes(data, size)).body(length)])

    return asyncio.run(read())


@pytest.mark.parametrize("size", [1, 2, 5, 65536])
def test_bodies(size: int) -> None:
    assert body(b"abcdef", 4, size) == b"abcd"
    assert body(b"3\r\nabc\r\n0a;x=y\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n", -1, size) == b"abc0123456789"
    assert body(b"to the end", -2, size) == b"to the end"


@pytest.mark.parametrize(
    "data",
    [
        b"3\nabc\r\n0\r\n\r\n", b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"-3\r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n", b"3 3\r\nabc\r\n0\r\n\r\n", b"\r\nabc\r\n0\r\n\r\n",  # noqa: E501
        b" 3\r\nabc\r\n0\r\n\r\n", b"3;a\x00\r\nabc\r\n0\r\n\r\n", b"3;" + b"a" * 400 + b"\r\nabc\r\n0\r\n\r\n",  # noqa: E501
        b"1" * 20 + b"\r\n", b"0\r\nbad trailer\r\n\r\n", b"0\r\n X: y\r\n\r\n", b"3\r\nabc\n0\r\n\r\n",
    ],
)  # fmt: skip
def test_chunks_that_could_be_read_in_two_ways(data: bytes) -> None:
    with pytest.raises(BadMessage):
        body(data, -1)


@pytest.mark.parametrize(
    ("data", "length"), [(b"abc", 4), (b"3\r\nab", -1), (b"3\r\nabc\r\n", -1), (b"", -1)]
)
def test_a_body_that_ends_early(data: bytes, length: int) -> None:
    with pytest.raises(Incomplete):
        body(data, length)


def test_hop_by_hop_headers_stay_behind() -> None:
    head = request(
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, X-Private\r\nX-Private: 1\r\nProxy-Authorization: x\r\n"  # noqa: E501
        b"Keep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nX-Kept: 2\r\n\r\n"
    )
    assert head.headers == [("X-Kept", "2")] and head.upgrade == ""


def test_responses() -> None:
    head = parse_response(["HTTP/1.1 200 OK", "Content-Length: 5"], "GET")
    assert (head.status, head.length, head.keep) == (200, 5, True)
    assert parse_response(["HTTP/1.1 200 OK", "Content-Length: 5"], "HEAD").length == 0
    assert parse_response(["HTTP/1.1 204 No Content"], "GET").length == 0
    assert parse_response(["HTTP/1.1 304 ", "Content-Length: 5"], "GET").length == 0
    head = parse_response(["HTTP/1.0 200 OK"], "GET")
    assert (head.length, head.keep) == (-2, False)
    for lines in (
        ["HTTP/1.1 200 OK", "Content-Length: 5", "Transfer-Encoding: chunked"],
        ["HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 5"],
        ["HTTP/1.1 2000 OK"], ["ICY 200 OK"], ["HTTP/1.1  200 OK"], ["HTTP/1.1 200 OK", "a b: c"],
    ):  # fmt: skip
        with pytest.raises(BadMessage):
            parse_response(lines, "GET")


@given(st.binary(max_size=200), st.sampled_from([b"", b"GET / HTTP/1.1\r\nHost: a\r\n"]))
def test_what_is_read_is_written_as_it_was_understood(data: bytes, start: bytes) -> None:
    """Whatever gets through is one message for a second strict reader, with the same meaning."""
    try:
        head = request(start + data + b"\r\n\r\n")
    except (BadMessage, Incomplete):
        return
    if head.method == "CONNECT":
        return
    written = http1.write_request(head.method, "/", "a", head.headers, head.length)
    again = request(written)
    assert (again.method, again.host, again.headers) == (head.method, "a", head.headers)
    assert again.length == head.length
