"""Connections that ask for nothing, or for half of something."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn

from effinfer.serve import body, protocol
from effinfer.serve.app import make_app
from effinfer.serve.served import Served


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, int]]:
    """The address of a server in this event loop, whose model is being loaded."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(Served(names=["none"])),
        http=protocol.impatient_protocol(),
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await running


def test_a_silent_connection_is_closed_and_others_are_not(monkeypatch):
    monkeypatch.setattr(protocol, "_SECONDS", 0.3)

    async def main() -> None:
        async with serving() as address:
            silent, _ = await asyncio.open_connection(*address)
            slow, slow_writer = await asyncio.open_connection(*address)
            slow_writer.write(b"GET /health HTT")
            asking, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await asking.readline()
            for reader in (silent, slow):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            text = b""
            while b"503" not in text:  # no model is loaded
                text += await asyncio.wait_for(asking.read(1000), 5)
            writer.close()

    asyncio.run(main())


def test_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(body, "_SECONDS", 0.3)
    head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    async def main() -> None:
        async with serving() as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(f'{head}Content-Length: 100\r\n\r\n{{"content": "'.encode())
            text = await asyncio.wait_for(reader.read(), 5)  # to the end: it closes the connection
            assert text.startswith(b"HTTP/1.1 408 ") and b"timeout_error" in text
            writer.close()

    asyncio.run(main())
