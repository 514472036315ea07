"""Several replicas of `effinfer serve` behind one address, with Ray Serve.

    pip install 'effinfer[serve,grammar,scale]'
    python examples/ray_serve.py --model smollm2-135m --replicas 2 --threads 1

Every replica is a process with a model of its own and the handlers of `effinfer serve`. A request
goes to the replica that has seen the longest beginning of its text, whose prefix cache then holds
the tokens; where that one is full, or nobody knows the text, to the one with the fewest requests.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from effinfer import AsyncLLM
from effinfer.serve.app import make_app
from effinfer.serve.body import MAX_BYTES
from effinfer.serve.served import Served

# About a page of the cache: 64 tokens.
BLOCK = 256
MOST_BLOCKS_OF_A_TEXT = 256
MOST_BLOCKS = 1 << 18
# Of the connection to the proxy, not of the request.
HOP_HEADERS = {b"content-length", b"transfer-encoding", b"connection"}


class Prefixes:
    """Who has seen which beginnings of texts; the ones used last are kept."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, ReplicaID] = OrderedDict()

    def find(self, text: str, among: set[ReplicaID]) -> ReplicaID | None:
        """The owner of the longest beginning that one of `among` has."""
        for key in reversed(self._keys(text)):
            if self._owners.get(key) in among:
                return self._owners[key]
        return None

    def add(self, text: str, owner: ReplicaID) -> None:
        for key in self._keys(text):
            self._owners[key] = owner
            self._owners.move_to_end(key)
        while len(self._owners) > MOST_BLOCKS:
            self._owners.popitem(last=False)

    def _keys(self, text: str) -> list[bytes]:
        """One of each whole block, which stands for all text up to its end."""
        keys, key = [], b""
        for end in range(BLOCK, min(len(text), BLOCK * MOST_BLOCKS_OF_A_TEXT) + 1, BLOCK):
            block = text[end - BLOCK : end].encode("utf-8", "surrogatepass")
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            keys.append(key)
        return keys


class PrefixRouter(RequestRouter):
    """Ray asks it for replicas in groups: of the first group whose replicas are not full, the one
    with the fewest requests is taken."""

    def initialize_state(self, **_: Any) -> None:
        self._prefixes = Prefixes()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        text = "" if pending_request is None else pending_request.kwargs["text"]
        owner = self._prefixes.find(text, set(replicas))
        if owner is None:
            return [random.sample(list(replicas.values()), len(replicas))]  # no favourite of equals
        return [[replicas.pop(owner)], list(replicas.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        self._prefixes.add(pending_request.kwargs["text"], replica_id)


@serve.deployment
class Replica:
    """One model, and the handlers of `effinfer serve`."""

    def __init__(self, model: str, alias: str, api_key: str | None, options: dict[str, Any]):
        self._llm = AsyncLLM(model, **options)
        served = Served(names=[alias], api_key=api_key, llm=self._llm)
        self._app = make_app(served)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(self, scope: dict[str, Any], body: bytes, text: str) -> AsyncIterator[Any]:
        """(status, headers), and then the bytes of the answer as they come. `text` is the router's.
        A caller that goes cancels the request."""
        del text
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not given:
                await asyncio.Event().wait()  # until this task is cancelled
            return given.pop()

        handling = asyncio.create_task(self._app(scope, receive, sent.put))
        handling.add_done_callback(lambda _: sent.put_nowait({"type": "end"}))
        try:
            while (message := await sent.get())["type"] != "end":
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], (b"x-replica", self._name)]
                elif message.get("body"):
                    yield message["body"]
        finally:
            handling.cancel()


def text_of(body: bytes) -> str:
    """What the model will read first: of requests that begin alike, it begins alike."""
    try:
        given = json.loads(body)
        parts = [
            given.get(name) for name in ("tools", "instructions", "messages", "input", "prompt")
        ]
    except (ValueError, AttributeError, RecursionError):
        return ""  # the replica says what is wrong with it
    return json.dumps([part for part in parts if part is not None], ensure_ascii=False)


front = FastAPI(openapi_url=None)


@serve.deployment
@serve.ingress(front)
class Front:
    """Reads requests, so that the router knows their texts, and passes answers on."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    @front.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(self, request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            if len(body) <= MAX_BYTES:  # with a byte too many, the replica refuses it
                body += chunk
        kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")
        scope = {key: request.scope[key] for key in kept}
        scope["headers"] = [h for h in request.scope["headers"] if h[0] not in HOP_HEADERS]
        if body:
            scope["headers"].append((b"content-length", str(len(body)).encode()))
        answers = self._replicas.answer.remote(scope, bytes(body), text=text_of(bytes(body)))
        status, headers = await anext(answers)

        async def rest() -> AsyncIterator[bytes]:
            try:
                async for part in answers:
                    yield part
            finally:
                answers.cancel()

        response = StreamingResponse(rest(), status)
        response.raw_headers = [tuple(h) for h in headers if h[0] not in HOP_HEADERS]
        return response


def application(
    model: str, *, replicas: int, alias: str, api_key: str | None, options: dict[str, Any]
) -> serve.Application:
    """`options` are AsyncLLM's; a replica has `max_sequences` requests at most."""
    most = options.setdefault("max_sequences", 64)
    served = Replica.options(
        num_replicas=replicas,
        max_ongoing_requests=most,
        ray_actor_options={"num_cpus": options.get("threads") or 1},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )
    # It does little beside a model.
    fronts = Front.options(
        max_ongoing_requests=most * replicas + 256, ray_actor_options={"num_cpus": 0}
    )
    return fronts.bind(served.bind(model, alias, api_key, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--alias", help="what clients call it; default: as --model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": given.host, "port": given.port})
    app = application(
        given.model,
        replicas=given.replicas,
        alias=given.alias or given.model,
        api_key=os.environ.get("EFFINFER_API_KEY"),
        options={"threads": given.threads, "max_seq_len": given.max_seq_len},
    )
    serve.run(app, blocking=True)


if __name__ == "__main__":
    main()
