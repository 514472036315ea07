"""HTTP connections that do not wait for ever for a request."""

from __future__ import annotations

import asyncio
from typing import Any

_SECONDS = 30.0


def impatient_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol, which closes a connection whose first request has not come in time; later
    requests have uvicorn's own limit, and bodies that of read_body()."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class ImpatientProtocol(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(_SECONDS, self._close_if_silent)

        def connection_lost(self, error: Exception | None) -> None:
            self._deadline.cancel()
            super().connection_lost(error)

        def _close_if_silent(self) -> None:
            if self.cycle is None:  # no request has begun
                self.transport.close()

    return ImpatientProtocol
