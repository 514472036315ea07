"""The server's app in this process, on a model that says what a script has it say."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import openai
import tokenizers
from tokenizers import AddedToken, decoders, models

from effinfer.async_llm import AsyncLLM
from effinfer.requests.engine_thread import EngineThread
from effinfer.sampling import SamplingParams
from effinfer.serve.app import make_app
from effinfer.serve.served import Served
from effinfer.techniques import Installed
from effinfer.text.chat import ChatTemplate
from effinfer.text.tokenizer import Tokenizer
from effinfer.text.trust import chat_tokens
from tests.scripted_engine import STOP, ScriptedEngine

TEMPLATE = "^{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CONTROL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
Result = TypeVar("Result")


def make_tokenizer() -> Tokenizer:
    """A token for each letter."""
    vocab = {letter: index for index, letter in enumerate(string.printable)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return Tokenizer(backend)


class ScriptedLLM(AsyncLLM):
    def __init__(self, says: str, template: str, end: int = STOP) -> None:
        tokenizer = make_tokenizer()
        (first,) = tokenizer.encode("^", add_special=False)
        script = tokenizer.encode(says, add_special=False)
        engine: Any = ScriptedEngine({first: [*script, end]})
        engine.max_seq_len, engine.vocab_size = 4096, tokenizer.vocab_size
        chat = ChatTemplate(template)
        self.prompts: list[str] = []

        def tokens(messages: Any, **variables: Any) -> list[int]:
            ids = chat_tokens(tokenizer, chat, messages, variables)
            self.prompts.append(tokenizer.decode(ids))
            return ids

        self._llm: Any = SimpleNamespace(
            tokenizer=tokenizer,
            chat_template=chat,
            engine=engine,
            chat_tokens=tokens,
            grammars=None,
            techniques=Installed(),
            default_params=SamplingParams(),
        )
        self._thread = EngineThread(engine, 64)


def with_client(
    says: str,
    use: Callable[[openai.AsyncOpenAI, ScriptedLLM], Awaitable[Result]],
    template: str = TEMPLATE,
    end: int = STOP,
) -> Result:
    """What `use` returns; the model says `says` to everything, and then `end` of a script."""

    async def main() -> Result:
        llm = ScriptedLLM(says, template, end)
        transport = httpx.ASGITransport(make_app(Served(names=["fake"], llm=llm)))
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://fake/v1", api_key="none", http_client=http, max_retries=0
            )
            try:
                return await use(client, llm)
            finally:
                llm._thread.close()

    return asyncio.run(main())
