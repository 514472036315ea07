"""A model for event loops: what LLM is for threads."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.llm import LLM
from effinfer.outputs import RequestOutput
from effinfer.requests.arguments import (
    Prompt,
    as_prompts,
    encode_prompt,
    encode_prompts,
    pair_params,
)
from effinfer.requests.async_generation import AsyncGeneration, AsyncStream
from effinfer.requests.engine_thread import EngineThread
from effinfer.requests.parameters import complete, complete_all, split_variables
from effinfer.requests.prompt_request import PromptRequest, is_slow, one_answer, prepare
from effinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from effinfer.text.chat import ChatTemplate
    from effinfer.text.messages import Message
    from effinfer.text.tokenizer import Tokenizer

# Texts of more characters are tokenised in another thread, and so are all while one of them is: an
# event loop shall not stand still for more than about a millisecond.
_LONG_TEXT = 4096


class AsyncLLM:
    """A language model whose methods are awaited, from any number of event loops.

    One thread steps the engine while there is work and sleeps otherwise. A cancelled task cancels
    its request. A stream whose reader stops has at most 256 pieces waiting; then its request ends
    with finish_reason "error".
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_sequences: int = 64,
        max_waiting: int = 256,
        **options: Any,
    ) -> None:
        """Loads `model` as LLM does, with its options; it blocks, so an event loop that has other
        work awaits `asyncio.to_thread(AsyncLLM, ...)`. max_waiting: requests that wait beside the
        `max_sequences` that run; one more is refused with QueueFullError."""
        if type(max_waiting) is not int or max_waiting < 0:
            raise _core.InvalidArgumentError(
                f"[AsyncLLM] max_waiting: expected >= 0, got {max_waiting!r}"
            )
        self._llm = LLM(model, max_sequences=max_sequences, **options)
        self._thread = EngineThread(self._llm.engine, max_sequences + max_waiting)
        # Also when it is dropped, and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _close, self._thread, self._llm)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """LLM.generate(). Throws QueueFullError when not all prompts may wait."""
        complete = complete_all(params, keywords, lambda: self.default_params)
        requests = pair_params(as_prompts(prompts), complete)
        size = sum(len(prompt) for prompt, _ in requests if isinstance(prompt, str))
        if self._is_slow(size):
            encoded = await asyncio.to_thread(encode_prompts, self.tokenizer, requests)
        else:
            encoded = encode_prompts(self.tokenizer, requests)
        generation = await self.start(encoded, is_streamed=False)
        await generation.wait_for_all()
        return generation.outputs()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any
    ) -> AsyncStream:
        """The completion of one prompt piece by piece: `async for piece in llm.stream(...)`. The
        request is queued here, in the running event loop, after its grammar was compiled. Throws as
        generate(), and Error while iterating when the request fails."""
        params = complete(params, keywords, lambda: self.default_params)
        ids = encode_prompt(self.tokenizer, prompt)
        prompts = self._prepare([(ids, one_answer(params))])
        generation = AsyncGeneration(self._thread, self.tokenizer, prompts, is_streamed=True)
        return AsyncStream(generation, self)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> RequestOutput:
        """LLM.chat()."""
        keywords, variables = split_variables(variables)
        ids = await self.chat_tokens(messages, **variables)
        return (await self.generate([ids], params, **keywords))[0]

    async def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> AsyncStream:
        """chat() piece by piece: `async for piece in await llm.stream_chat(...)`."""
        keywords, variables = split_variables(variables)
        return self.stream(await self.chat_tokens(messages, **variables), params, **keywords)

    async def chat_tokens(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """LLM.chat_tokens()."""
        size = sum(len(str(message)) for message in messages)
        if self._is_slow(size):
            return await asyncio.to_thread(self._llm.chat_tokens, messages, **variables)
        return self._llm.chat_tokens(messages, **variables)

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """LLM.tokenize()."""
        options = {"add_special": add_special, "parse_special": parse_special}
        if self._is_slow(len(text)):
            return await asyncio.to_thread(self._llm.tokenize, text, **options)
        return self._llm.tokenize(text, **options)

    async def start(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        is_streamed: bool,
        keep_special: bool = False,
    ) -> AsyncGeneration:
        """Queues prompts whose answers one reader waits for: what generate() and chat() do.
        keep_special: control tokens that the model writes are in its text."""
        if any(is_slow(params) for _, params in requests):
            prompts = await asyncio.to_thread(self._prepare, requests)
        else:
            prompts = self._prepare(requests)
        return AsyncGeneration(
            self._thread,
            self.tokenizer,
            prompts,
            is_streamed=is_streamed,
            keep_special=keep_special,
        )

    def _prepare(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[PromptRequest]:
        grammars = self._llm.grammars
        requests = self._llm.techniques.requests(requests)
        return [prepare(ids, params, self.tokenizer, grammars) for ids, params in requests]

    def _is_slow(self, characters: int) -> bool:
        return characters > _LONG_TEXT or self.tokenizer.is_busy

    @property
    def default_params(self) -> SamplingParams:
        """LLM.default_params."""
        return self._llm.default_params

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._llm.chat_template

    @property
    def engine(self) -> _core.Engine:
        """Its thread steps it; nobody else may. Throws InvalidArgumentError after close()."""
        return self._llm.engine

    @property
    def failure(self) -> str:
        """Why the engine stopped by itself; "" while it works."""
        return self._thread.failure

    def close(self) -> None:
        """Cancels what runs, ends the thread, and frees the weights and the cache. It waits for the
        step that runs. Every later call throws InvalidArgumentError."""
        self._finalizer()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


def _close(thread: EngineThread, llm: LLM) -> None:
    thread.close()
    llm.close()
