"""Requests that are refused before their bodies were read: the client reads the refusal."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time

import pytest

from effinfer.serve.body import BodyEnd
from tests.serve.process import KEY, Server

LARGE = 20 << 20  # far more than sockets hold


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)


def post(
    connection: http.client.HTTPConnection, path: str, key: str, body: bytes, **headers: str
) -> tuple[int, str | None]:
    """Sends all of the body before it reads: (status, Connection header)."""
    fixed = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, body, {**fixed, **headers})
    response = connection.getresponse()
    assert json.loads(response.read())["error"]["message"]
    return response.status, response.getheader("connection")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/completions", "wrong", 401),
        ("/v1/nothing", KEY, 404),
        ("/metrics", KEY, 405),
        ("/v1/completions", KEY, 413),
    ],
)
def test_a_large_body(server: Server, path: str, key: str, status: int):
    for _ in range(3):
        # One that wants no other request has its connection closed behind the answer.
        connection = connect(server)
        found, _ = post(connection, path, key, b"x" * LARGE, Connection="close")
        assert found == status
        connection.close()
    connection = connect(server)
    for _ in range(2):  # the connection goes on
        assert post(connection, path, key, b"x" * LARGE) == (status, None)
    connection.close()
    assert "Traceback" not in server.log()


def test_a_body_that_is_too_large_to_read_before_it_is_refused(server: Server):
    connection = connect(server)
    found = post(connection, "/v1/completions", KEY, b"x" * (100 << 20))
    assert found == (413, "close")
    assert "Traceback" not in server.log()


def test_what_is_thrown_away_is_bounded():
    async def main() -> list[int]:
        sizes = []
        scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}

        async def receive() -> dict[str, object]:
            sizes[-1] += 1 << 20
            return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

        end = BodyEnd(scope, receive)
        for read in (end.discard, end.linger):
            sizes.append(0)
            await read()
            assert not end.reached
        return sizes

    before, behind = asyncio.run(main())
    assert 64 << 20 <= before <= 66 << 20
    assert 512 << 20 <= behind <= 514 << 20


def test_what_is_not_read_to_its_end_closes_the_connection(server: Server):
    connection = connect(server)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Authorization", "Bearer wrong")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders(b"x")
    response = connection.getresponse()
    assert (response.status, response.getheader("connection")) == (401, "close")
    connection.close()


def test_a_client_that_asks_before_it_sends(server: Server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as asking:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
        begin = time.monotonic()
        asking.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert asking.recv(100).startswith(b"HTTP/1.1 401")
        assert time.monotonic() - begin < 5
