"""Names of hub repositories, and their files from a hub that runs here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effinfer import _core, hub
from effinfer.hub.repository_files import choose
from effinfer.hub.repository_name import is_name, parse
from tests.http_server import Handler, served
from tests.reference import tiny

QUANTS = [
    "README.md",
    "mmproj-model-F16.gguf",
    "imatrix.gguf",
    "Model-1B-Q8_0.gguf",
    "Model-1B-Q4_K_M.gguf",
    "Model-1B-UD-Q4_K_M.gguf",
    "Model-1B-IQ4_XS.gguf",
    "BF16/Model-1B-BF16-00001-of-00002.gguf",
    "BF16/Model-1B-BF16-00002-of-00002.gguf",
]
FOLDER = ["model.safetensors", "consolidated.safetensors", "config.json", "tokenizer.json", "a.png"]


@pytest.mark.parametrize(
    ("text", "repo", "file", "tag"),
    [
        ("org/repo", "org/repo", None, None),
        ("hf:org/repo", "org/repo", None, None),
        ("org/repo-1.5B_x:Q4_K_M", "org/repo-1.5B_x", None, "Q4_K_M"),
        ("hf:org/repo:q8_0", "org/repo", None, "q8_0"),
        ("hf:org/repo/folder/file.gguf", "org/repo", "folder/file.gguf", None),
    ],
)
def test_names(text, repo, file, tag):
    assert is_name(text)
    name = parse(text)
    assert (name.repo, name.file, name.tag) == (repo, file, tag)


@pytest.mark.parametrize("text", ["model.gguf", "a/b/model.gguf", "/a/b", "./a/b", "", "a b/c"])
def test_paths_are_no_names(text):
    assert not is_name(text)


@pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:org//file", "hf:/a/b", "hf:org/repo:"])
def test_malformed_names(name):
    with pytest.raises(_core.InvalidArgumentError, match=r"hf:org/repo:Q4_K_M"):
        hub.resolve(name)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("org/repo", ["Model-1B-Q4_K_M.gguf"]),
        ("org/repo:q8_0", ["Model-1B-Q8_0.gguf"]),
        ("org/repo:UD-Q4_K_M", ["Model-1B-UD-Q4_K_M.gguf"]),
        ("org/repo:IQ4_XS", ["Model-1B-IQ4_XS.gguf"]),
        ("org/repo:BF16", QUANTS[-2:]),
        ("hf:org/repo/imatrix.gguf", ["imatrix.gguf"]),
        (f"hf:org/repo/{QUANTS[-2]}", QUANTS[-2:]),
    ],
)
def test_a_name_stands_for_files(name, chosen):
    assert choose(parse(name), QUANTS) == chosen


def test_the_only_model_needs_no_type():
    assert choose(parse("org/repo"), ["ggml.gguf", "README.md"]) == ["ggml.gguf"]


def test_a_folder_is_taken_whole_without_weights_twice():
    assert choose(parse("org/repo"), FOLDER) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("org/repo:Q2_K", QUANTS, "BF16, IQ4_XS, Q4_K_M, Q8_0, UD-Q4_K_M"),
        ("hf:org/repo/other.gguf", QUANTS, "no such file"),
        ("org/repo", ["README.md"], "config.json"),
        ("org/repo:Q4_0", FOLDER, "GGUF"),
        ("org/repo:BF16", QUANTS[:-1], "lacks BF16/Model-1B-BF16-00002-of-00002"),
        ("org/repo", ["a-IQ1_S.gguf", "a-IQ2_S.gguf"], "IQ1_S, IQ2_S"),
    ],
)
def test_what_a_repository_lacks_is_named(name, files, words):
    with pytest.raises(_core.FileError, match=words):
        choose(parse(name), files)


class Hub(Handler):
    """One repository, tiny/model; answers as huggingface_hub expects them."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/tiny/model":
            siblings = [{"rfilename": name, "size": len(d)} for name, d in self.files.items()]
            facts = {"id": "tiny/model", "sha": "a" * 40, "siblings": siblings}
            self.answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})
            return
        name = path.removeprefix("/tiny/model/resolve/main/")
        if name in self.files:
            headers = {"X-Repo-Commit": "a" * 40, "ETag": f'"{name}"'}
            self.answer(200, self.files[name], headers)
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    return {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # where nobody listens
        "HF_HUB_DISABLE_XET": "1",
        "EFFINFER_CACHE": str(tmp_path / "cache"),
    }


def effinfer(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "effinfer", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def gguf(tmp_path) -> bytes:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path / "tiny.gguf").read_bytes()


def test_a_repository_is_fetched_once_listed_and_removed(environment, gguf, tmp_path):
    pytest.importorskip("huggingface_hub")
    handler = type("Repository", (Hub,), {"files": {"m-Q8_0.gguf": b"x", "m-Q4_K_M.gguf": gguf}})
    with served(handler) as address:
        online = {**environment, "HF_ENDPOINT": address}
        pulled = effinfer(online, "pull", "tiny/model")
        assert pulled.returncode == 0, pulled.stderr
        assert pulled.stderr.count("download tiny/model") == 1  # a bar
        path = Path(pulled.stdout.strip())
        assert path.read_bytes() == gguf and path.name == "m-Q4_K_M.gguf"
        missing = effinfer(online, "pull", "tiny/other")
        assert missing.returncode == 1 and "tiny/other" in missing.stderr
        assert len(missing.stderr.splitlines()) == 1
    # The hub is gone now; what it gave is still here.
    options = ("th", "-n", "3", "--ignore-eos", "--json", "-q")
    text = effinfer(environment, "generate", "-m", "hf:tiny/model", *options)
    assert text.returncode == 0, text.stderr
    assert len(json.loads(text.stdout)["token_ids"]) == 3
    rows = json.loads(effinfer(environment, "list", "--json").stdout)
    assert [row["pulled"] for row in rows if row["name"] == "tiny/model"] == [True]
    removed = effinfer(environment, "remove", "tiny/model", "--json")
    assert json.loads(removed.stdout)["freed_bytes"] >= len(gguf)
    assert not path.exists()


@pytest.mark.alone
def test_a_hub_that_cannot_be_reached_shows_soon(environment):
    pytest.importorskip("huggingface_hub")
    started = time.monotonic()
    result = effinfer(environment, "generate", "hi", "-m", "hf:tiny/model:Q4_K_M")
    assert time.monotonic() - started < 10
    assert result.returncode == 1 and "HF_HUB_OFFLINE" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    result = effinfer(offline, "generate", "hi", "-m", "tiny/model")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "no such file or folder" in result.stderr


def test_a_repository_with_a_folder_is_loaded(environment, tmp_path):
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    folder = tiny.write_folder(tiny.FAMILIES["qwen3"], tmp_path)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with served(type("Repository", (Hub,), {"files": files})) as address:
        online = {**environment, "HF_ENDPOINT": address}
        facts = effinfer(online, "inspect", "tiny/model", "--json")
    assert facts.returncode == 0, facts.stderr
    assert json.loads(facts.stdout)["architecture"] == "qwen3"


def test_without_the_library_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(_core.UnsupportedError, match=r"effinfer\[hub\]"):
        hub.resolve("hf:org/repo/file.gguf")
    with pytest.raises(_core.UnsupportedError, match="no such file or folder"):
        hub.resolve("org/repo")
