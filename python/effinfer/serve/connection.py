"""A request ends with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from effinfer.requests.async_generation import AsyncGeneration


@asynccontextmanager
async def closed_on_disconnect(
    receive: Receive, generation: AsyncGeneration
) -> AsyncIterator[None]:
    """Cancels the generation when the client goes, and when the block ends."""
    watcher = asyncio.create_task(_watch(receive, generation))
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()


async def _watch(receive: Receive, generation: AsyncGeneration) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()
