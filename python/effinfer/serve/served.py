"""What the routes share: the model, its names, how far the server is."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from effinfer.async_llm import AsyncLLM
from effinfer.serve.errors import ApiError
from effinfer.serve.metrics import Metrics
from effinfer.serve.token_texts import TokenTexts

logger = logging.getLogger("effinfer.serve")


@dataclass
class Served:
    names: list[str]  # of the model: what answers say, then what requests may say too
    api_key: str | None = None
    log_text: bool = False
    tool_parser: str | None = None  # instead of the one that the chat template tells
    llm: AsyncLLM | None = None  # None until it is loaded
    is_draining: bool = False
    open_requests: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)
    _token_texts: TokenTexts | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.llm)

    @property
    def name(self) -> str:
        return self.names[0]

    def model(self, name: str | None = None) -> AsyncLLM:
        """The model, if it is the one that a request names. Throws ApiError."""
        if self.llm is None:
            raise ApiError(503, "the model is being loaded", code="loading")
        if self.llm.failure:
            raise ApiError(503, f"the engine stopped: {self.llm.failure}", code="engine_stopped")
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: expected {self.name!r}, got {name[:100]!r}",
                param="model",
                code="model_not_found",
            )
        return self.llm

    @property
    def token_texts(self) -> TokenTexts:
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.model().tokenizer)
        return self._token_texts
