"""What Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from effinfer.outputs import RequestOutput

if TYPE_CHECKING:
    from effinfer.async_llm import AsyncLLM

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _EngineCollector(Collector):
    """Numbers that the engine keeps, read when they are scraped."""

    def __init__(self, llm: Callable[[], AsyncLLM | None]) -> None:
        self._llm = llm

    def collect(self) -> Iterable[Metric]:
        llm = self._llm()
        if llm is None:
            return
        stats = llm.engine.stats()
        gauges = {
            "requests_running": ("requests that have pages", stats["running"]),
            "requests_waiting": ("requests that wait for their first step", stats["waiting"]),
            "pages_total": ("pages of the KV cache, of 64 tokens", stats["total_pages"]),
            "pages_free": ("pages that hold neither requests nor prefixes", stats["free_pages"]),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"effinfer_{name}", text, value)
        yield CounterMetricFamily("effinfer_steps", "steps of the engine", stats["steps"])
        yield CounterMetricFamily(
            "effinfer_preemptions", "requests that lost their pages", stats["preemptions"]
        )


class Metrics:
    def __init__(self, llm: Callable[[], AsyncLLM | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(llm))
        names = ["route", "reason"]
        self._requests = self._counter("requests", "requests by route and how they ended", names)
        self._prompt = self._counter("prompt_tokens", "tokens of prompts")
        self._cached = self._counter("cached_tokens", "of these, found in the prefix cache")
        self._generated = self._counter("generated_tokens", "tokens of answers")
        self._drafted = self._counter("drafted_tokens", "drafts that were verified")
        self._accepted = self._counter("accepted_tokens", "of these, accepted")
        self._first = self._histogram("time_to_first_token_seconds", "from queue to first token")
        self._between = self._histogram(
            "time_between_tokens_seconds", "mean of a request", _TOKEN_SECONDS
        )
        self._whole = self._histogram("request_seconds", "from queue to last token")

    def refused(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def ended(self, route: str, output: RequestOutput) -> None:
        """Counts one answer."""
        metrics = output.metrics
        self._requests.labels(route, output.finish_reason).inc()
        if output.index == 0:  # the others share it
            self._prompt.inc(metrics.prompt_tokens)
            self._cached.inc(metrics.cached_tokens)
        self._generated.inc(len(output.token_ids))
        self._drafted.inc(metrics.speculation.drafted)
        self._accepted.inc(metrics.speculation.accepted)
        if metrics.output_tokens:
            self._first.observe(metrics.time_to_first_token_s)
            self._whole.observe(metrics.total_s)
        if metrics.decode_tok_s:
            self._between.observe(1 / metrics.decode_tok_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"effinfer_{name}", text, list(labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"effinfer_{name}", text, buckets=buckets, registry=self._registry)
