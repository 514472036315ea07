"""The page to chat, in a real browser: `make test-browser`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from effinfer import LLM, SamplingParams
from tests.serve.browser import Browser, find_browser
from tests.serve.process import KEY, Server

PATH = find_browser()
pytestmark = pytest.mark.skipif(
    PATH is None, reason="no Chromium on the PATH (Debian: apt-get install chromium-headless-shell)"
)
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)?.textContent ?? ''"
STATUS = "document.querySelector('#status').textContent"


@pytest.fixture
def page(server: Server) -> Iterator[Browser]:
    assert PATH is not None
    with Browser(PATH) as browser:
        browser.open(server.url + "/")
        browser.click("summary")
        for field, value in (("#key", KEY), ("#temperature", "0"), ("#max-tokens", "48")):
            browser.type(field, value)
        browser.click("summary")
        yield browser
        assert all(url.startswith(server.url) for url in browser.requested())


def test_an_answer_streams(page: Browser, llm: LLM):
    question = "Tell me a story about <b>the sea</b>."
    page.type("#input", question, enter=True)
    lengths = set()
    while not page.evaluate(STATUS):
        lengths.add(len(page.evaluate(LAST)))
        time.sleep(0.01)
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    first = llm.chat(messages, params).text
    assert page.evaluate(LAST) == first
    assert len(lengths - {0, len(first)}) >= 3, "it was not seen to grow"
    status = page.evaluate(STATUS)
    found = re.fullmatch(r"48 tokens, ([\d.]+) a second", status)
    assert found and 0 < float(found[1]) < 1e5, status
    # What users and models write is text, and the next question knows of it.
    shown = page.evaluate("document.querySelector('.message.user').textContent")
    assert shown == question
    assert page.evaluate("document.querySelectorAll('#messages b').length") == 0
    page.type("#input", "Go on.")
    page.click("#send")
    page.wait_for(f"document.querySelectorAll('.message.assistant').length == 2 && {STATUS}")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
    assert page.evaluate(LAST) == llm.chat(messages, params).text
    page.click("#clear")
    assert page.evaluate("document.querySelector('#messages').children.length") == 0
    # Before it had the key, it asked for the model's name; browsers with windows ask for an icon.
    others = [c for c in page.complaints() if "401" not in c and "favicon" not in c]
    assert not others, others


def test_the_stop_button(page: Browser, server: Server):
    page.click("summary")
    page.type("#max-tokens", "900")
    page.click("summary")
    page.type("#input", "Tell me a long story about the sea.", enter=True)
    page.wait_for(f"({LAST}).length > 20")
    assert page.evaluate(STATUS) == ""
    assert page.evaluate("document.querySelector('#send').hidden")
    assert server.metric("requests_running") == 1
    page.click("#stop")
    page.wait_for(f"{STATUS} === 'stopped'", 2)
    server.wait_until_idle(1)
    text = page.evaluate(LAST)
    assert page.evaluate("document.querySelector('#stop').hidden")
    time.sleep(0.2)
    assert page.evaluate(LAST) == text != ""


def test_an_error_is_shown(page: Browser):
    page.click("summary")
    page.type("#key", "wrong")
    page.click("summary")
    page.type("#input", "Hi", enter=True)
    page.wait_for("document.querySelector('.message.error')?.textContent.includes('API key')")
    assert page.evaluate("document.querySelectorAll('.message.assistant').length") == 0
    page.wait_for("!document.querySelector('#send').hidden")
