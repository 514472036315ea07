"""The process: a socket, uvicorn, the model, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from effinfer.async_llm import AsyncLLM
from effinfer.serve.app import make_app
from effinfer.serve.protocol import impatient_protocol
from effinfer.serve.served import Served, logger

# The engine's thread needs the interpreter for microseconds a step, and would wait for the event
# loop's turn to end, which lasts 5 ms by default: longer than a step of a small model.
_SWITCH_SECONDS = 0.0005
_POLL_SECONDS = 0.05
# Longer than proxies keep theirs by default: who closes first must not be the server.
_KEEP_ALIVE_SECONDS = 75


@dataclass(frozen=True)
class ServerOptions:
    host: str
    port: int
    drain_seconds: float


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would end the process by the signal, and at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(served: Served, load: Callable[[], AsyncLLM], options: ServerOptions) -> int:
    """Serves until a signal; returns the exit status. Throws OSError for an address that cannot be
    had, and what `load` throws."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    _allow_connections()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    with listener:
        return asyncio.run(_run(served, load, options, listener))


async def _run(
    served: Served,
    load: Callable[[], AsyncLLM],
    options: ServerOptions,
    listener: socket.socket,
) -> int:
    # It tells every connection that the client broke, and every request.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    config = uvicorn.Config(
        make_app(served),
        http=impatient_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    first = asyncio.create_task(signals.get())
    try:
        served.llm = await asyncio.to_thread(load)
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = listener.getsockname()[1]
        logger.info("serving %s on http://%s:%d", served.name, host, port)
        await asyncio.wait({first, running}, return_when=asyncio.FIRST_COMPLETED)
        await _drain(served, options.drain_seconds, signals)
    finally:
        if served.llm is not None:
            await asyncio.to_thread(served.llm.close)
        server.should_exit = True
        await running
    return 130 if first.done() and first.result() == signal.SIGINT else 0


async def _drain(served: Served, seconds: float, signals: asyncio.Queue[int]) -> None:
    """Until the last request has ended, for some seconds, or until another signal."""
    served.is_draining = True
    logger.info("shutting down: %d requests run", served.open_requests)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while served.open_requests and loop.time() < end and signals.empty():
        await asyncio.sleep(_POLL_SECONDS)


def _allow_connections() -> None:
    """As many as the system lets this process have: the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
