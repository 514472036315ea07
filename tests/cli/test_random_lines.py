"""Whatever is typed: an exit code that means something, a few lines, never a traceback."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference import tiny

COUNT = 500
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("lines")
    config = tiny.FAMILIES["llama"]
    whole = tiny.write_gguf(config, folder / "tiny.gguf")
    tiny.write_gguf(config, folder / "chat.gguf", chat_template=TEMPLATE)
    (folder / "folder").mkdir()
    tiny.write_folder(tiny.FAMILIES["qwen3"], folder / "folder")
    (folder / "broken.gguf").write_bytes(whole.read_bytes()[:3000])
    (folder / "text").write_text("the cat and the hat, " * 8)
    (folder / "bytes").write_bytes(b"abc\xff\xfe")
    program = subprocess.run(
        [sys.executable, "-m", "tests.cli.random_lines", str(folder), "2026", str(COUNT)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "EFFINFER_CACHE": str(folder / "cache"),
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
        },
        timeout=600,
    )
    assert program.returncode == 0, program.stderr[-2000:]
    return [json.loads(line) for line in program.stdout.splitlines()]


def test_every_line_ended(ended):
    assert len(ended) == COUNT
    codes = collections.Counter(end["code"] for end in ended)
    assert set(codes) == {0, 1, 2, 130}
    assert min(codes.values()) >= COUNT // 50, codes  # none of the endings is rare


def test_no_traceback_and_few_lines(ended):
    for end in ended:
        lines = end["stderr"].splitlines()
        assert "Traceback" not in end["stderr"], end
        assert "internal error" not in end["stderr"], end
        if "-v" in end["words"] or "/clear" in end["stderr"]:
            continue  # they asked for more
        assert len(lines) <= 3, end
        assert end["code"] == 0 or end["code"] == 130 or lines, end


def test_json_is_json_on_every_ending(ended):
    asked = [end for end in ended if "--json" in end["words"] and "-h" not in end["words"]]
    assert len(asked) > COUNT // 20
    for end in asked:
        if "--" in end["words"][: end["words"].index("--json")]:
            continue  # text of the prompt
        objects = [json.loads(line) for line in end["stdout"].splitlines()]
        if "chat" not in end["words"]:  # which answers each question with one
            assert len(objects) == 1, end
        if end["code"]:
            assert "error" in objects[-1], end
