"""The items of a response, as they grow, and the events that tell of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from effinfer.serve.parsing import Delta
from effinfer.serve.tools.calls import CallDelta


class ResponseItems:
    """Output items; an open one grows until another kind of text comes."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open = ""  # type of the last item while it may grow
        self._number = 0

    def event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

    def add(self, delta: Delta) -> Iterator[str]:
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        # The rest of a call that had begun comes before content, a new one behind it.
        rest = [part for part in delta.calls if not part.is_first]
        for part in rest:
            yield from self._grow_call(part)
        if delta.content:
            yield from self._grow("message", delta.content)
        for part in delta.calls[len(rest) :]:
            yield from self._begin_call(part)

    def close(self) -> Iterator[str]:
        """Ends the item that grows."""
        if not self._open:
            return
        item, place = self._last()
        if self._open == "function_call":
            name, given = item["name"], item["arguments"]
            yield self.event(f"{_CALL}.done", **place, name=name, arguments=given)
        else:
            yield from self._close_text(item, place)
        if "status" in item:
            item["status"] = "completed"
        self._open = ""
        yield self._item_event("done", item)

    def _close_text(self, item: dict[str, Any], place: dict[str, Any]) -> Iterator[str]:
        name = _TEXTS[self._open]
        (part,) = item["content"]
        yield self.event(f"response.{name}.done", **place, content_index=0, **_done(part))
        yield self.event("response.content_part.done", **place, content_index=0, part=part)

    def _grow(self, kind: str, text: str) -> Iterator[str]:
        if self._open != kind:
            yield from self.close()
            yield from self._begin(kind)
        item, place = self._last()
        item["content"][0]["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        name = f"response.{_TEXTS[kind]}.delta"
        yield self.event(name, **place, content_index=0, delta=text, **extra)

    def _begin(self, kind: str) -> Iterator[str]:
        self._open = kind
        item: dict[str, Any] = {"id": new_id(_PREFIXES[kind]), "type": kind}
        if kind == "message":
            item |= {"status": "in_progress", "role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        else:
            item |= {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        self.output.append(item)
        yield self._item_event("added", item)
        item["content"].append(part)
        _, place = self._last()
        yield self.event("response.content_part.added", **place, content_index=0, part=part)

    def _begin_call(self, part: CallDelta) -> Iterator[str]:
        yield from self.close()
        self._open = "function_call"
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": part.call.id,
            "name": part.call.name,
            "arguments": "",
        }
        self.output.append(item)
        yield self._item_event("added", item)
        yield from self._grow_call(part)

    def _grow_call(self, part: CallDelta) -> Iterator[str]:
        item, place = self._last()
        item["arguments"] += part.arguments
        yield self.event(f"{_CALL}.delta", **place, delta=part.arguments)

    def _item_event(self, what: str, item: dict[str, Any]) -> str:
        index = len(self.output) - 1
        return self.event(f"response.output_item.{what}", output_index=index, item=item)

    def _last(self) -> tuple[dict[str, Any], dict[str, Any]]:
        item = self.output[-1]
        return item, {"item_id": item["id"], "output_index": len(self.output) - 1}


_CALL = "response.function_call_arguments"
_PREFIXES = {"message": "msg", "reasoning": "rs"}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _done(part: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    return {"text": part["text"], **extra}
