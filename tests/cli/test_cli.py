"""The command line as a person or a script sees it: stdout, stderr and exit codes."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from effinfer import _core
from effinfer.testing import make_model
from tests.model_files import smollm2_path
from tests.reference import tiny

Result = subprocess.CompletedProcess
PROMPT = "The capital of France is"


def effinfer(*arguments: object, stdin: str = "", **environment: str) -> Result:
    return subprocess.run(
        [sys.executable, "-m", "effinfer", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def check_error(result: Result, code: int, *words: str) -> None:
    """One line that says what is wrong, nothing on stdout, no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_generate_prints_text_and_statistics():
    greedy = ("--max-tokens", 8, "--temperature", 0)
    result = effinfer("generate", PROMPT, *greedy)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "tok/s" in result.stderr and "tok/s" not in result.stdout
    again = effinfer("generate", "-", *greedy, "--quiet", stdin=PROMPT)
    assert again.stdout == result.stdout
    assert again.stderr == ""


def test_generate_json_is_one_object(tiny_model):
    result = effinfer("generate", "-m", tiny_model, "th", "-n", 5, "--ignore-eos", "--json")
    value = json.loads(result.stdout)
    assert len(value["token_ids"]) == 5
    assert value["finish_reason"] == "length"
    assert value["metrics"]["prompt_tokens"] == 1
    assert value["metrics"]["output_tokens"] == 5


def test_a_text_without_a_seed_is_repeated_by_the_seed_that_it_tells(tiny_model):
    options = ("generate", "-m", tiny_model, "th", "-n", 20, "--temperature", 1.0, "--json", "-q")
    first, second = (json.loads(effinfer(*options).stdout) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = json.loads(effinfer(*options, "--seed", first["seed"]).stdout)
    assert again["text"] == first["text"]


def test_options_of_ternary_models(tmp_path):
    model = make_model("bitnet-tiny", tmp_path / "bitnet.gguf")
    options = ("generate", "-m", model, "th", "-n", 5, "--seed", 1, "--ignore-eos", "-q")
    texts = {
        effinfer(*options, "--ternary-packing", packing, "--head", "q8_0").stdout
        for packing in ("auto", "t2", "t1_6")
    }
    assert len(texts) == 1
    check_error(effinfer(*options, "--ternary-packing", "t3"), 2, "ternary_packing", "t1_6")


def test_generate_stops_before_a_text(tiny_model):
    options = ("-m", tiny_model, "th", "-n", 12, "--temperature", 0, "--ignore-eos", "--json", "-q")
    text = json.loads(effinfer("generate", *options).stdout)["text"]
    stop = text[3:5]
    value = json.loads(effinfer("generate", *options, "--stop", stop).stdout)
    assert value["text"] == text[: text.find(stop)]
    assert value["finish_reason"] == "stop"


def test_a_seed_gives_a_text(tiny_model):
    def text(seed: int) -> str:
        options = ("--temperature", 1.5, "--top-p", 0.9, "--seed", seed, "--ignore-eos", "-q")
        return effinfer("generate", "-m", tiny_model, "th", "-n", 16, *options).stdout

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", ""], 2, ["prompts[0]"]),
        (["generate", "x", "--temperature", "-1"], 2, ["temperature"]),
        (["generate", "x", "--precision", "f64"], 2, ["precision", "f32"]),
        (["generate", "x", "--kv-dtype", "q9"], 2, ["kv_dtype", "bf16"]),
        (["generate", "x", "-m", "/nowhere/model.gguf"], 1, ["/nowhere/model.gguf"]),
        (["generate", "x", "-m", __file__], 1, ["GGUF"]),
        (["generate"], 2, ["prompt"]),
        (["generate", "x", "--colour", "red"], 2, ["--colour"]),
        (["sing"], 2, ["sing"]),
        (["pull", "gpt-17"], 2, ["smollm2-135m"]),
        (["pull"], 2, ["smollm2-135m"]),
        (["inspect", "/nowhere/model.gguf"], 1, ["/nowhere/model.gguf"]),
        (["compile", "/nowhere/model.gguf", "-o", "out.gguf"], 1, ["/nowhere/model.gguf"]),
        (["perplexity", "/nowhere/text"], 2, ["/nowhere/text"]),
        (["bench", "--repeat", "0"], 2, ["--repeat"]),
        (["bench", "--prompt-file", __file__], 2, ["--prompt-file", "--speculate"]),
        (["generate", "x", "--speculate", "oracle"], 2, ["speculation", "recycling"]),
    ],
)
def test_errors_are_short_and_have_codes(arguments, code, words):
    check_error(effinfer(*arguments), code, *(word.lstrip("-") for word in words))


def test_a_model_without_a_template_cannot_chat(tiny_model):
    check_error(effinfer("chat", "-m", tiny_model, "hello"), 2, "chat template")


def test_an_unknown_isa_is_an_error(tiny_model):
    check_error(effinfer("info", EFFINFER_ISA="sse9"), 2, "sse9", "portable")


def test_chat_answers_once():
    result = effinfer("chat", "Say hello.", "--temperature", 0, "-n", 12)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "<|im_" not in result.stdout


def test_chat_reads_questions_from_stdin():
    result = effinfer("chat", "--json", "-n", 6, stdin="Hello.\n\nWho are you?\n/exit\nmore\n")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 2
    # The second prompt holds the first question and answer.
    first, second = (answer["metrics"]["prompt_tokens"] for answer in answers)
    assert second > first + answers[0]["metrics"]["output_tokens"]


def read_until(
    terminal: int, text: str, ask: Callable[[], None] = lambda: None, seconds: float = 60.0
) -> str:
    """Reads up to `text`; `ask` is called first and again whenever the terminal stays silent."""
    seen = b""
    end = time.monotonic() + seconds
    ask()
    while text.encode() not in seen and time.monotonic() < end:
        if not select.select([terminal], [], [], 2.0)[0]:
            ask()
            continue
        try:
            seen += os.read(terminal, 4096)
        except OSError:
            break
    assert text.encode() in seen, seen.decode(errors="replace")
    return seen.decode(errors="replace")


def heed_interrupts() -> None:
    """A shell starts its background jobs, these tests perhaps among them, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_the_answer_and_not_the_program():
    terminal, slave = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "effinfer", "chat", "-n", "8000", "--ignore-eos", "--quiet"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    os.close(slave)
    try:
        read_until(terminal, "> ")
        os.write(terminal, b"Tell me a story.\n")
        read_until(terminal, "story.\r\n")
        read_until(terminal, " ")  # a word of the answer
        program.send_signal(signal.SIGINT)
        assert len(read_until(terminal, "> ")) < 8000  # a token has a character or more
        # At the prompt: a new prompt. A signal that comes before input() waits is heeded only when
        # the next one wakes it.
        read_until(terminal, "> ", lambda: program.send_signal(signal.SIGINT))
        os.write(terminal, b"/exit\n")
        assert program.wait(timeout=30) == 0
    finally:
        program.kill()
        os.close(terminal)


def test_ctrl_c_ends_generate_with_130():
    program = subprocess.Popen(
        [sys.executable, "-m", "effinfer", "generate", "Once", "-n", "8000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert program.stdout is not None
    assert program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=30)
    assert program.returncode == 130
    assert "Traceback" not in stderr


def test_info():
    value = json.loads(effinfer("info", "--json").stdout)
    assert value["version"] == _core.version()
    assert value["isa"] in value["available_isas"]
    assert value["threads"] >= 1 and value["threads_reason"]
    assert "cuda" in value["backends"]
    assert value["backends"]["cpu"].startswith("ready")
    assert {"int8", "f32"} <= set(value["matmul_kernels"])
    assert value["bf16_products"] == _core.describe_bf16()
    capped = effinfer("info", EFFINFER_ISA="portable", EFFINFER_THREADS="1").stdout
    assert "EFFINFER_ISA=portable" in capped and "EFFINFER_THREADS" in capped
    many = effinfer("info", EFFINFER_THREADS="1024").stdout
    assert "EFFINFER_THREADS=1024, limited by the" in many
    assert "f32: matmul.portable.f32" in capped and "bf16:" not in capped


def test_pull_of_a_cached_model_prints_its_path():
    path = smollm2_path()
    result = effinfer("pull", "smollm2-135m")
    assert (result.stdout.strip(), result.returncode) == (str(path), 0)
    value = json.loads(effinfer("pull", "smollm2-135m", "--json").stdout)
    assert value == {"name": "smollm2-135m", "path": str(path), "bytes": path.stat().st_size}
    names = [entry["name"] for entry in json.loads(effinfer("pull", "--list", "--json").stdout)]
    assert names == ["smollm2-135m", "gemma3-270m"]


def test_inspect(tiny_model):
    text = effinfer("inspect", tiny_model).stdout
    assert "blk.0.attn_q.weight" in text and "general.architecture = llama" in text
    value = json.loads(effinfer("inspect", tiny_model, "--json").stdout)
    shapes = {tensor["name"]: tensor["shape"] for tensor in value["tensors"]}
    assert shapes["token_embd.weight"] == [tiny.VOCAB_SIZE, 64]
    assert value["metadata"]["llama.block_count"] == 3
    graph = effinfer("inspect", tiny_model, "--graph").stdout
    assert _core.Graph.parse(graph).to_string() == value["graph"]


def test_inspect_shows_files_that_cannot_run(tmp_path):
    path = tmp_path / "other.gguf"
    config = tiny.FAMILIES["llama"]
    data = tiny.write_gguf(config, path).read_bytes()
    path.write_bytes(data.replace(b"llama", b"mamba", 1))
    result = effinfer("inspect", path)
    assert result.returncode == 0
    assert "blk.0.attn_q.weight" in result.stdout and "mamba" in result.stdout
    check_error(effinfer("inspect", path, "--graph"), 1, "mamba")


def test_inspect_reads_folders(tmp_path):
    folder = tiny.write_folder(tiny.FAMILIES["qwen3"], tmp_path)
    value = json.loads(effinfer("inspect", folder, "--json").stdout)
    assert value["architecture"] == "qwen3"
    assert "blk.0.attn_q_norm.weight" in [tensor["name"] for tensor in value["tensors"]]


def test_a_compiled_artifact_gives_the_same_text(tiny_model, tmp_path):
    artifact = tmp_path / "artifact.gguf"
    result = effinfer("compile", tiny_model, "-o", artifact, "--json")
    assert json.loads(result.stdout)["bytes"] == artifact.stat().st_size
    options = ("th", "-n", 12, "--seed", 1, "--ignore-eos", "-q")
    texts = [effinfer("generate", "-m", m, *options).stdout for m in (tiny_model, artifact)]
    assert texts[0] == texts[1] != ""
    check_error(effinfer("compile", artifact, "-o", artifact), 2, "--output")


def test_bench_prints_one_object_on_its_last_line(tiny_model):
    options = ("--pp", 16, "--tg", 4, "--repeat", 2, "--threads", 1, "--json")
    result = effinfer("bench", "-m", tiny_model, *options)
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout.splitlines()[-1])
    for key in ("pp_tok_s", "tg_tok_s"):
        assert 0 < value[key]["min"] <= value[key]["median"] <= value[key]["max"]
    assert value["threads"] == 1 and value["isa"] == _core.current_isa()
    assert value["model"] == str(tiny_model)
    assert value["load_s"] > 0 and value["peak_rss_bytes"] > 1 << 20


def test_perplexity(tiny_model, tmp_path):
    text = tmp_path / "text"
    text.write_text("the cat and the hat, " * 8)
    result = effinfer("perplexity", "-m", tiny_model, text, "--ctx", 32, "--json")
    value = json.loads(result.stdout)
    assert value["tokens"] > 100
    assert 1 < value["perplexity"] < 1e6
    plain = effinfer("perplexity", "-m", tiny_model, text, "--ctx", 32).stdout
    assert float(plain) == pytest.approx(value["perplexity"], rel=1e-3)
    text.write_text("t")
    check_error(effinfer("perplexity", "-m", tiny_model, text, "--ctx", 32), 2, "two tokens")


def test_techniques_are_listed_and_described():
    listed = effinfer("techniques")
    assert listed.returncode == 0
    assert "xattention" in listed.stdout and "suffix_decoding" in listed.stdout
    one = effinfer("techniques", "xattention")
    assert "XAttention" in one.stdout and "arXiv:2503.16428" in one.stdout
    assert "threshold = 0.9" in one.stdout
    facts = json.loads(effinfer("techniques", "minference", "--json").stdout)
    assert facts["exclusive"] == ["prefill.visits"] and facts["fields"]["vertical_size"] == "256"
    unknown = effinfer("techniques", "nothing")
    assert unknown.returncode != 0 and "expected one of" in unknown.stderr


def test_techniques_of_a_command(tiny_model):
    def told(*options: str) -> Result:
        return effinfer("generate", "a b", "-m", tiny_model, "-n", 2, *options)

    assert told("--techniques", "xattention").returncode == 0
    for both in ["xattention,minference"], ["xattention", "--techniques", "minference"]:
        refused = told("--techniques", *both)
        assert refused.returncode != 0 and "prefill.visits" in refused.stderr
    assert "expected one of" in told("--techniques", "nothing").stderr
