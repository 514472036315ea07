"""Connections that ask for nothing."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from effinfer.serve import protocol
from effinfer.serve.app import make_app
from effinfer.serve.served import Served


def test_a_silent_connection_is_closed_and_others_are_not(monkeypatch):
    monkeypatch.setattr(protocol, "_SECONDS", 0.3)

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            make_app(Served(names=["none"])),
            http=protocol.impatient_protocol(),
            lifespan="off",
            log_config=None,
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        address = listener.getsockname()
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
        server.should_exit = True
        await running

    asyncio.run(main())
