"""What meets a new user: prompts, hints, errors, help, notes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.in_process import effinfer
from tests.reference import tiny

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "tiny.gguf"
    return tiny.write_gguf(tiny.FAMILIES["llama"], path, chat_template=TEMPLATE)


def options(model) -> tuple[object, ...]:
    return ("-m", model, "-n", 4, "--ignore-eos", "--temperature", 0)


def test_a_pipe_is_the_prompt(model):
    given = effinfer("generate", "the", *options(model), "-q")
    assert given.code == 0 and given.stderr == ""
    for stdin in (b"the", b"the\n"):
        assert effinfer("generate", *options(model), "-q", stdin=stdin) == given
        assert effinfer("generate", "-", *options(model), "-q", stdin=stdin) == given
    assert effinfer("generate", "the", *options(model), "-q", stdin=b"other") == given
    assert "standard input is empty" in effinfer("generate", *options(model)).stderr


def test_a_prompt_that_begins_with_a_dash(model):
    for prompt in ("-x hello", "--hello world"):
        ended = effinfer("generate", prompt, *options(model))
        assert ended.code == 2 and "after `--`" in ended.stderr
        assert effinfer("generate", *options(model), "--", prompt).code == 0


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--n-predict", "--max-tokens"),
        ("--temp", "--temperature"),
        ("--repeat-penalty", "--repetition-penalty"),
        ("-c", "--max-seq-len"),
        ("--n-gpu-layers", "--gpu-layers"),
        ("--temprature", "--temperature"),
    ],
)
def test_options_of_others_are_explained(option, meant):
    ended = effinfer("generate", "hi", option, "1")
    assert ended.code == 2 and meant in ended.stderr
    assert len(ended.stderr.splitlines()) == 2


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["perplexity", "FILE"]])
def test_text_that_is_not_utf8_is_one_line(model, chat_model, tmp_path, command):
    (tmp_path / "text").write_bytes(b"abc\xff\xfe")
    arguments = [str(tmp_path / "text") if a == "FILE" else a for a in command]
    ended = effinfer(*arguments, "-m", chat_model, stdin=b"abc\xff\xfe\n")
    assert ended.code == 1 and ended.stdout == ""
    (line,) = [line for line in ended.stderr.splitlines() if "a model that chats" not in line]
    assert "expected UTF-8 text, got byte 0xff at 3" in line


def test_json_is_one_object_on_every_ending(model, tmp_path):
    for arguments, code, words in [
        (["generate", "the", "-m", "/nowhere.gguf"], 1, "/nowhere.gguf"),
        (["generate", "the", "--temperature", "-1"], 2, "temperature"),
        (["generate", "the", "--temprature", "1"], 2, "--temprature"),
        (["bench", "-m", model, "--repeat", "0"], 2, "repeat"),
        (["inspect", tmp_path], 1, "config.json"),
        (["pull", "gpt-17"], 2, "gpt-17"),
        (["remove", "gpt-17"], 2, "gpt-17"),
    ]:
        ended = effinfer(*arguments, "--json")
        assert ended.code == code
        value = json.loads(ended.stdout)
        assert set(value) == {"error", "error_type"} and words in value["error"]
        assert value["error"] in " ".join(ended.stderr.split())


@pytest.mark.alone
def test_ctrl_c_with_json_gives_the_text_so_far():
    program = subprocess.Popen(
        [sys.executable, "-m", "effinfer", "generate", "Once", "-n", "8000", "--ignore-eos"]
        + ["--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert program.stderr is not None
    assert "chat" in program.stderr.readline()  # the note before the text
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    stdout, stderr = program.communicate(timeout=30)
    assert program.returncode == 130 and "Traceback" not in stderr
    value = json.loads(stdout)
    assert value["finish_reason"] == "cancelled" and value["text"]


def test_raw_text_of_a_model_that_chats_is_noted_once(model, chat_model):
    noted = effinfer("generate", "the", *options(chat_model)).stderr
    assert noted.count("`effinfer chat`") == 1
    assert "chat" not in effinfer("generate", "the", *options(model)).stderr
    assert effinfer("generate", "the", *options(chat_model), "-q").stderr == ""


def test_verbose(model):
    quiet = effinfer("generate", "the", *options(model), "-q")
    some = effinfer("generate", "the", *options(model), "-q", "-v")
    more = effinfer("generate", "the", *options(model), "-q", "-vv")
    assert quiet.stdout == some.stdout == more.stdout
    assert quiet.stderr == ""
    assert "compiled llama" in some.stderr and "loaded" in some.stderr
    assert "length after 4 tokens" in more.stderr and "after 4 tokens" not in some.stderr


def test_threads_that_are_not_there_are_one_note(model):
    ended = effinfer("generate", "the", *options(model), "-q", "--threads", 999)
    assert ended.code == 0
    (line,) = ended.stderr.splitlines()
    assert "999 asked for" in line


def test_help_is_tidy():
    whole = effinfer("--help").stdout
    for command in ("generate", "chat", "serve", "pull", "list", "remove", "perplexity"):
        assert command in whole
        text = effinfer(command, "--help").stdout
        assert "--verbose" in text and "bool" not in text
    assert "bool" not in whole
    for line in whole.splitlines():  # a summary is a whole sentence
        if line.startswith(("│ perplexity", "│ bench")):
            assert line.rstrip(" │").endswith(".")
    assert effinfer().stdout == whole


def test_perplexity_is_one_number(model, tmp_path):
    text = tmp_path / "text"
    text.write_text("the cat and the hat, " * 8)
    arguments = ("perplexity", "-m", model, text, "--ctx", 32)
    ended = effinfer(*arguments)
    value = json.loads(effinfer(*arguments, "--json", "-q").stdout)
    assert float(ended.stdout) == pytest.approx(value["perplexity"], rel=1e-4)
    (line,) = ended.stderr.splitlines()
    assert f"{value['tokens']} of {value['text_tokens']} tokens scored" in line
    assert effinfer(*arguments, "-q").stderr == ""


def test_info_has_a_row_a_thing():
    rows = [line.split()[0] for line in effinfer("info").stdout.splitlines()]
    assert len(rows) == len(set(rows))


def test_errors_name_what_the_user_named(model):
    for command in (["compile", model], ["quantize", "-m", model, "--type", "q8_0"]):
        ended = effinfer(*command, "-o", "/nonexistent/x.gguf")
        assert ended.code == 1
        assert "/nonexistent/x.gguf: No such file" in ended.stderr and ".tmp" not in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
    ended = effinfer("quantize", "-m", model, "--type", "q9", "-o", "x.gguf")
    assert ended.code == 2 and len(ended.stderr.splitlines()) == 1  # no bar before it


def test_a_pipe_that_closes_leaves_no_traceback(model):
    command = f"{sys.executable} -m effinfer generate the -m {model} -n 200 | head -c 5"
    ended = subprocess.run(
        command, shell=True, capture_output=True, env=dict(os.environ), timeout=60
    )  # bytes: five of them may end within a character
    assert b"Traceback" not in ended.stderr
