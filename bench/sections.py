"""The sections of one model's sequence work: context, batch, verification, threads, lengths.

Each says what to ask whom; rounds.py asks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rounds import Question, Say, interleave
from worker import EngineSpec

from effinfer.testing import make_model

DEPTHS = (128, 1024, 4096)
REQUESTS = (1, 2, 4, 8)
STEP_TOKENS = (1, 2, 3, 4, 6, 8, 16)
PROMPTS = (128, 512, 1024, 2048)
SHORT_PROMPT = 32


@dataclass(frozen=True)
class Setting:
    model: Path
    vocab_size: int
    threads: int
    repeats: int
    decode_tokens: int
    prefill_tokens: int
    own: EngineSpec
    peers: list[EngineSpec]
    log: Path
    quick: bool = False  # short lengths: a test of the harness, not a measurement

    def load(self, context: int, **more: Any) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "threads": self.threads,
            "context": -(-(context + 64) // 256) * 256,
            **more,
        }

    def prompt(self, count: int, repeat: int) -> list[int]:
        """Random ids, new ones each repeat and the same for every engine."""
        source = random.Random(1000 * count + repeat)
        return [source.randrange(1000, self.vocab_size) for _ in range(count)]

    def only(self, *names: str) -> list[EngineSpec]:
        return [self.own, *(peer for peer in self.peers if peer.name in names)]

    def run(
        self, specs: list[EngineSpec], load: dict[str, Any], questions: list[Question], say: Say
    ) -> dict[str, Any]:
        return interleave(specs, load, questions, self.repeats, self.log, say)


def decode_question(setting: Setting, key: str, depth: int, count: int, again: bool) -> Question:
    """`again`: the same prompt in each repeat, which engines may keep."""

    def arguments(repeat: int) -> dict[str, Any]:
        return {"prompt": setting.prompt(depth, 0 if again else repeat), "count": count}

    return Question(key, "decode", arguments, count)


def prefill_question(setting: Setting, key: str, length: int) -> Question:
    def arguments(repeat: int) -> dict[str, Any]:
        return {"tokens": setting.prompt(length, repeat)}

    return Question(key, "prefill", arguments, length)


def context(setting: Setting, say: Say) -> dict[str, Any]:
    """Decode at a depth. The prompt stays in the engines' caches: only its first run fills them."""
    depths = DEPTHS[:1] if setting.quick else DEPTHS
    count = max(1, setting.decode_tokens // 2)
    load = setting.load(max(depths) + count, kv_dtype="bf16", prefix_cache=True)
    questions = [decode_question(setting, str(d), d, count, again=True) for d in depths]
    engines = setting.run(setting.only("llama.cpp"), load, questions, say)
    return {"decode_tokens": count, "depths": depths, "engines": engines}


def batch(setting: Setting, say: Say) -> dict[str, Any]:
    """Tokens per second of all requests together."""
    count = max(1, setting.decode_tokens // 2)

    def question(requests: int) -> Question:
        def arguments(repeat: int) -> dict[str, Any]:
            prompts = [setting.prompt(SHORT_PROMPT, 64 * i + repeat) for i in range(requests)]
            return {"prompts": prompts, "count": count}

        return Question(str(requests), "batch", arguments, count * requests)

    load = setting.load(SHORT_PROMPT + count, sequences=max(REQUESTS))
    questions = [question(requests) for requests in REQUESTS]
    engines = setting.run(setting.only("llama.cpp"), load, questions, say)
    return {"decode_tokens": count, "requests": REQUESTS, "engines": engines}


def verify(setting: Setting, say: Say) -> dict[str, Any]:
    """Seconds of one step of several tokens of one sequence, each with its logits."""
    steps = 4 if setting.quick else 24

    def question(tokens: int) -> Question:
        def arguments(repeat: int) -> dict[str, Any]:
            prompt = setting.prompt(SHORT_PROMPT, repeat)
            return {"prompt": prompt, "tokens": setting.prompt(tokens, repeat), "steps": steps}

        return Question(str(tokens), "verify", arguments)

    load = setting.load(SHORT_PROMPT + max(STEP_TOKENS))
    questions = [question(tokens) for tokens in STEP_TOKENS]
    engines = setting.run(setting.only("llama.cpp"), load, questions, say)
    return {"tokens": STEP_TOKENS, "engines": engines}


def threads(setting: Setting, say: Say) -> dict[str, Any]:
    """The same engine with one thread and with two, taking turns."""
    specs = [
        replace(
            spec,
            name=f"{spec.name}, {count} thread{'s' * (count > 1)}",
            load_options={**spec.load_options, "threads": count},
        )
        for spec in setting.only("llama.cpp")
        for count in (1, 2)
    ]
    questions = [
        decode_question(setting, "decode", SHORT_PROMPT, setting.decode_tokens, again=False),
        prefill_question(setting, "prefill", setting.prefill_tokens),
    ]
    longest = max(setting.prefill_tokens, SHORT_PROMPT + setting.decode_tokens)
    return {"engines": setting.run(specs, setting.load(longest), questions, say)}


def lengths(setting: Setting, say: Say) -> dict[str, Any]:
    """Prefill against the length of the prompt."""
    prompts = PROMPTS[:1] if setting.quick else PROMPTS
    questions = [prefill_question(setting, str(length), length) for length in prompts]
    engines = setting.run(
        setting.only("llama.cpp", "openvino"), setting.load(max(prompts)), questions, say
    )
    return {"prompts": prompts, "engines": engines}


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights in the shapes of a real one, and the bytes that a token reads."""

    name: str
    changes: dict[str, Any]
    vocab_size: int
    token_bytes: float

    def ask(self, setting: Setting, specs: list[EngineSpec], say: Say) -> dict[str, Any]:
        """Decoding, prefill, and how often a second memory delivers what a token reads."""
        path = setting.log.parent / f"{self.name}.gguf"
        if not path.exists():
            say("writing the model")
            make_model(self.name, path, **self.changes)
        count, length = setting.decode_tokens // 4, setting.prefill_tokens
        of_model = replace(setting, model=path, vocab_size=self.vocab_size)
        questions = [
            decode_question(of_model, "decode", SHORT_PROMPT, count, again=False),
            Question("memory", "bandwidth", lambda _: {"bytes": round(self.token_bytes)}, 1),
            prefill_question(of_model, "prefill", length),
        ]
        load = of_model.load(max(length, SHORT_PROMPT + count))
        engines = of_model.run(specs, load, questions, say)
        return {"decode_tokens": count, "prefill_tokens": length, "engines": engines}


VOCABULARY = 128256
# Ternary layers, read as t1_6, and the head, as q6_k.
BITNET = RandomModel(
    "bitnet-2b4t",
    {"type": "tq1_0", "head": "q6_k"},
    VOCABULARY,
    30 * (2 * 2560 * 2560 + 2 * 640 * 2560 + 3 * 6912 * 2560) * 1.625 / 8
    + VOCABULARY * 2560 * 210 / 256,
)
LARGE = RandomModel(
    "llama3.1-8b",
    {"type": "q4_k", "head": "q6_k"},
    VOCABULARY,
    32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096) * 144 / 256
    + VOCABULARY * 4096 * 210 / 256,
)


def bitnet(setting: Setting, say: Say) -> dict[str, Any]:
    """BitNet b1.58 2B4T."""
    return BITNET.ask(setting, [setting.own], say)


def large(setting: Setting, say: Say) -> dict[str, Any]:
    """Llama 3.1 8B, Q4_K with a Q6_K head: far larger than any cache."""
    return LARGE.ask(setting, setting.only("llama.cpp"), say)


SECTIONS = {
    "context": context,
    "batch": batch,
    "verify": verify,
    "threads": threads,
    "lengths": lengths,
    "bitnet": bitnet,
    "large": large,
}
