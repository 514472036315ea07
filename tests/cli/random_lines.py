"""Random command lines, run one after another in this process:  random_lines.py FOLDER SEED COUNT

FOLDER has what they name. Prints a JSON object for each line: what was typed, and how it ended.
"""

import json
import random
import signal
import sys
from pathlib import Path

from tests.cli.in_process import run_line

COMMANDS = (
    ["generate"] * 6 + ["chat"] * 5 + ["inspect", "inspect", "compile", "quantize", "bench"] * 2
    + ["perplexity", "perplexity", "info", "list", "pull", "remove", "serve", "genrate", "", "-"]
)  # fmt: skip
TEXTS = (
    "the", "the cat", "", "-", "--", "-x hello", "--hello", "ünï ☃ 🎉", "\udcff", "a\nb", "\t",
    "<|im_end|>", "th" * 3000, "%s %d {} $HOME", "null", "0",
)  # fmt: skip
NUMBERS = ("0", "1", "3", "-1", "0.5", "1e9", "nan", "inf", "99999999999999999999", "x", "", "07")
WORDS = (
    "auto",
    "f32",
    "q8_0",
    "t2",
    "dense",
    "minference",
    "cpu",
    "cuda:7",
    "none",
    "",
    "Ω",
    "a" * 300,
)
LINES = (
    b"", b"the", b"the\nthe cat\n", b"\xff\xfe", b"/help\n/regen\n", b"/exit\n",
    b"/load x\n/sing\n", b"the cat " * 400, b"/system a\nthe\n", b"\x00\n", b"\n\n",
)  # fmt: skip
OPTIONS = {
    "--temperature": NUMBERS, "--top-k": NUMBERS, "--top-p": NUMBERS, "--min-p": NUMBERS,
    "--typical-p": NUMBERS, "--repetition-penalty": NUMBERS, "--seed": NUMBERS, "-t": NUMBERS,
    "--max-seq-len": ("8", "64", *NUMBERS), "--ctx": ("8", "32", *NUMBERS), "--stop": TEXTS,
    "--system": TEXTS, "--precision": WORDS, "--kv-dtype": WORDS, "--prefill": WORDS,
    "--speculate": ("suffix", *WORDS), "--head": WORDS, "--type": ("q4_0", *WORDS),
    "--ternary-packing": WORDS, "--device": WORDS, "--tool-parser": WORDS, "--port": ("x", "-1"),
    "--n-predict": NUMBERS, "--temp": NUMBERS, "--temprature": NUMBERS, "--i2s-order": WORDS,
}  # fmt: skip
FLAGS = ("--json", "-q", "-h", "--ignore-eos", "--deterministic", "--list", "--graph", "--", "-z")


class Typist:
    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        names = ("tiny.gguf", "chat.gguf", "folder", "broken.gguf", "text", "bytes", "nothing")
        self.models = [str(folder / name) for name in names]
        self.models += ["", "/dev/null", "a/b/c/d", "org/repo", "hf:", "hf:a/b:Q9", "x\udcff"]

    def line(self) -> list[str]:
        pick = self.random.choice
        command = pick(COMMANDS)
        words = [command] if command else []
        if self.random.random() < 0.8:
            words += [pick(self.positional(command))]
        if command in ("compile", "quantize") and self.random.random() < 0.8:
            words += ["-o", pick([str(self.folder / "out.gguf"), "/nonexistent/x.gguf", ""])]
        if command in ("generate", "chat", "bench", "perplexity", "quantize"):
            # The first two are models; the default one would be fetched.
            good = self.random.random() < 0.7
            words += ["-m", pick(self.models[:2] if good else self.models)]
        for _ in range(pick((0, 0, 1, 1, 2, 3))):
            option = pick(list(OPTIONS))
            words += [option, pick(OPTIONS[option])]
        words += [pick(FLAGS) for _ in range(pick((0, 0, 1, 1, 2)))]
        if command == "serve":
            words += ["--port", "70000"]  # one that is right would not end
        return self.with_limits(command, words)

    def positional(self, command: str) -> list[str]:
        if command == "perplexity":
            return [str(self.folder / name) for name in ("text", "bytes", "nothing", "folder")]
        if command in ("inspect", "compile"):
            return self.models
        if command in ("pull", "remove"):
            return ["gpt-17", "org/repo", "a b", "", "hf:x"]
        return list(TEXTS)

    def with_limits(self, command: str, words: list[str]) -> list[str]:
        """Before what ends the options, so that a run is short."""
        limits = {
            "generate": ["-n", "3"],
            "chat": ["-n", "3"],
            "bench": ["--pp", "8", "--tg", "4", "--repeat", "1"],
        }.get(command, [])
        return words[:1] + limits + words[1:]


def interrupted(words: list[str], typist: Typist) -> list[str]:
    """A line that runs until a Ctrl-C, which comes soon."""
    extra = typist.random.choice([[], ["--json"], ["-q"], ["-v"]])
    return ["bench", "-m", typist.models[0], "--pp", "64", "--repeat", "1000000", *extra]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    typist = Typist(folder, seed)
    signal.signal(signal.SIGALRM, interrupt)
    for number in range(count):
        words = typist.line()
        if number % 25 == 7:
            words = interrupted(words, typist)
            # One that comes while Python runs a destructor is lost: another follows.
            signal.setitimer(signal.ITIMER_REAL, typist.random.uniform(0.02, 0.2), 10.0)
        ended = run_line(words, typist.random.choice(LINES))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"words": words, **vars(ended)}), flush=True)


if __name__ == "__main__":
    main()
