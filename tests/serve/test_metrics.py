"""What Prometheus scrapes, and the log."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from effinfer.outputs import RequestMetrics, RequestOutput, SpeculationMetrics
from effinfer.serve.metrics import Metrics
from tests.serve.process import Server

DOC = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
OPTIONS = {"model": "smol", "prompt": "The capital of France is", "temperature": 0}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name.removeprefix("effinfer_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(server: Server) -> Samples:
    with server.http as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def requests(route: str, reason: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return "requests_total", (("reason", reason), ("route", route))


def test_requests_are_counted_by_route_and_reason(server: Server):
    before = scraped(server)
    server.client.completions.create(**OPTIONS, max_tokens=5)
    server.client.completions.create(**OPTIONS, max_tokens=5, n=3)
    with pytest.raises(openai.BadRequestError):
        server.client.completions.create(**OPTIONS, max_tokens=-1)
    with server.http as http:
        http.get("/no/such/route")
    after = scraped(server)
    changes = {key: value - before.get(key, 0) for key, value in after.items()}
    assert changes[requests("/v1/completions", "length")] == 4
    assert changes[requests("/v1/completions", "400")] == 1
    assert changes[requests("other", "404")] == 1  # not the path, which a client writes
    assert changes[("prompt_tokens_total", ())] == 2 * 5
    assert changes[("generated_tokens_total", ())] == 4 * 5
    assert changes[("steps_total", ())] >= 10
    assert 0 < after[("pages_free", ())] <= after[("pages_total", ())]
    for name in ("time_to_first_token", "time_between_tokens", "request"):
        assert changes[(f"{name}_seconds_count", ())] == 4
    total = changes[("request_seconds_sum", ())]
    assert 0 < changes[("time_to_first_token_seconds_sum", ())] < total


def test_every_name_in_the_documents_is_there(server: Server):
    section = DOC.read_text().partition("## Metrics")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    found = {name for name, _ in scraped(server)}
    assert len(names) >= 15
    histograms = {name for name in names if name.endswith("_seconds")}
    assert names - histograms | {f"{name}_bucket" for name in histograms} <= found


def test_drafts_are_counted():
    metrics = Metrics(lambda: None)
    counts = RequestMetrics(
        prompt_tokens=3,
        cached_tokens=2,
        output_tokens=9,
        preemptions=0,
        time_to_first_token_s=0.1,
        total_s=0.5,
        speculation=SpeculationMetrics(drafted=7, accepted=4),
    )
    metrics.ended("/r", RequestOutput("x", [1] * 9, "stop", counts))
    found = samples(metrics.text().decode())
    assert found[("drafted_tokens_total", ())] == 7
    assert found[("accepted_tokens_total", ())] == 4
    assert found[("cached_tokens_total", ())] == 2


def test_a_line_for_each_request_without_its_text(server: Server):
    prompt = "Zebras and xylophones are"
    answer = server.client.completions.create(model="smol", prompt=prompt, max_tokens=12, seed=1)
    (line,) = (line for line in server.log().splitlines() if answer.id in line)
    found = re.search(
        r"/v1/completions cmpl-\w+ (\w+) prompt=(\d+) cached=0 generated=(\d+) "
        r"first=(\d+\.\d+) total=(\d+\.\d+)$",
        line,
    )
    assert found is not None, line
    assert found[1] == answer.choices[0].finish_reason
    assert int(found[2]) == answer.usage.prompt_tokens
    assert int(found[3]) == answer.usage.completion_tokens
    assert 0 < float(found[4]) <= float(found[5])
    log = server.log()
    assert "ebras" not in log and answer.choices[0].text.strip() not in log
