"""The texts of the section `speculation`: token ids, made by rule from files of this repository.

A code edit is a source file with a name replaced throughout and a few lines changed: what a model
gives back when asked for it. A summary is clauses of a document's paragraphs, joined by words that
are not of it: long runs of words that the document has, and turns that nobody can copy. Neither was
written by a model. Answers and open text are SmolLM2's own, sampled while the section runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Tokens = list[int]

CODE_TOKENS = 400
SUMMARY_PROMPT = 1500
SUMMARY_TOKENS = 200
# A file, a name that it uses often, and what the name becomes.
EDITS = (
    ("csrc/runtime/scheduler.cpp", "chunk", "portion"),
    ("csrc/runtime/speculative/verify.cpp", "rows", "lines"),
    ("bench/worker.py", "answer", "reply"),
    ("csrc/core/philox.h", "counter", "position"),
    ("bench/fidelity.py", "spec", "candidate"),
    ("python/effinfer/hub/progress.py", "path", "location"),
    ("csrc/runtime/step_batch.cpp", "sequence", "stream"),
    ("python/effinfer/text/state.py", "text", "passage"),
    ("csrc/runtime/sampling_params.cpp", "params", "settings"),
    ("tools/make_stubs.py", "name", "label"),
)
DOCUMENTS = ("architecture", "operators", "ternary", "performance", "techniques", "add_an_op")
# Sentences that text begins with, for SmolLM2 to go on.
OPENINGS = (
    "The lighthouse keeper had not spoken to anyone in weeks when",
    "To plan a vegetable garden for a small balcony, begin with",
    "In the second half of the nineteenth century, railways changed",
    "My grandmother kept a notebook of recipes, and on its first page",
    "The most common mistake in an introductory physics course is",
    "Late in the evening the two engineers were still arguing about",
    "A good teacher of music knows that",
    "The river divides the old town from",
)
# Questions that SmolLM2 answers: what it answers to the first ones proposers have seen before the
# others are measured.
EARLIER_QUESTIONS = 16
QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for better sleep.",
    "What is the difference between a comet and an asteroid?",
    "Write a short poem about autumn leaves.",
    "How does a bicycle stay upright?",
    "Explain photosynthesis to a ten-year-old.",
    "What should I pack for a week in the mountains?",
    "Who invented the printing press, and why did it matter?",
    "How do I make a simple tomato sauce?",
    "What are the advantages of learning a second language?",
    "Describe a day in the life of a nurse.",
    "How do vaccines work?",
    "Write an email that asks for a day off.",
    "What is inflation, and who decides about it?",
    "How do I teach a dog to sit?",
    "What makes a good password?",
    "Tell me a story about a lighthouse keeper.",
    "How do I plan a vegetable garden for a small balcony?",
    "How did railways change life in the nineteenth century?",
    "Write a letter from a grandmother about her recipes.",
    "What mistakes do beginners in physics make?",
    "Describe an argument between two engineers.",
    "What makes a good teacher of music?",
    "Describe a town divided by a river.",
    "How do I write the first page of a novel?",
    "Why do cats purr?",
    "What happens in a recession?",
    "How is glass made?",
    "Plan a birthday party for a child of six.",
    "What did people eat in the Middle Ages?",
    "How can a small shop compete with a large one?",
    "Explain how a refrigerator keeps food cold.",
    "What is the best way to prepare for an interview?",
    "Write a dialogue between the sun and the moon.",
    "How do rivers shape a landscape?",
    "What should I know before I adopt a dog?",
)
JOINTS = (
    "In short,", "It adds that", "Another point:", "The author also says that", "Besides,",
    "Note that", "What follows is that", "Readers should know that", "Put simply,",
    "A last remark is that",
)  # fmt: skip
OWN_WORDS = {
    "only": "just", "each": "every", "because": "since", "needs": "requires", "gives": "yields",
    "makes": "produces", "takes": "uses", "so": "hence", "which": "that", "may": "can",
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it."""

    name: str
    prompt: Tokens
    output: Tokens
    seed: int = 0  # that it was sampled with


def distinct_share(tokens: Tokens) -> float:
    """Of the runs of four tokens, those that are different from all others before them."""
    runs = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(runs)) / max(len(runs), 1)


def edited(source: str, old: str, new: str) -> str:
    """The name replaced wherever it is a part of a word; every ninth line that can bear one gets a
    comment, and every eleventh comment goes."""
    renamed = re.sub(old.capitalize(), new.capitalize(), re.sub(old, new, source))
    mark = "#" if "\ndef " in source or "\nclass " in source and "{" not in source else "//"
    lines: list[str] = []
    for number, line in enumerate(renamed.splitlines()):
        bare = line.strip()
        if number % 11 == 10 and bare.startswith(mark):
            continue
        bears = number % 9 == 8 and bare and not bare.startswith((mark, '"', "*"))
        lines.append(f"{line}  {mark} {new}, from line {number + 1}" if bears else line)
    return "\n".join(lines)


def code_edits(llm: Any, count: int) -> list[Text]:
    """The first files whose edited text is long enough."""
    texts = []
    for file, old, new in EDITS:
        source = (ROOT / file).read_text()
        question = (
            f"Here is a file:\n\n```\n{source}```\n\nRewrite it with `{old}` renamed to `{new}`. "
            "Answer with the file alone."
        )
        answer = llm.tokenize("```\n" + edited(source, old, new), add_special=False)
        if len(answer) < CODE_TOKENS:
            continue
        prompt = llm.chat_tokens([{"role": "user", "content": question}])
        texts.append(Text(file, prompt, answer[:CODE_TOKENS]))
    return texts[:count]


def prose(document: str) -> list[str]:
    """Its paragraphs, without tables, lists, headings and code."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / f"{document}.md").read_text(), flags=re.DOTALL)
    blocks = (" ".join(block.split()) for block in text.split("\n\n"))
    return [b for b in blocks if len(b) > 80 and not b.startswith(("|", "#", "-", "!", "<", "`"))]


def summary_of(paragraphs: list[str]) -> str:
    """Of each paragraph how its first sentence begins and, with words of our own, its last one."""
    parts = []
    for number, paragraph in enumerate(paragraphs):
        sentences = [s.rstrip(".:").split() for s in re.split(r"(?<=\.)\s+", paragraph)]
        parts.append(" ".join(sentences[0][:20]) + ".")
        if len(sentences) > 1:
            words = [OWN_WORDS.get(word, word) for word in sentences[-1][:14]]
            words[0] = words[0].lower()
            parts.append(f"{JOINTS[number % len(JOINTS)]} {' '.join(words)}.")
    return " ".join(parts)


def summaries(llm: Any, count: int) -> list[Text]:
    """The documents' prose in pieces of so many tokens, cut at paragraphs."""
    texts, paragraphs, size = [], [], 0
    for paragraph in (p for document in DOCUMENTS for p in prose(document)):
        paragraphs.append(paragraph)
        size += len(llm.tokenize(paragraph, add_special=False))
        if size < SUMMARY_PROMPT:
            continue
        question = "Summarise this text:\n\n" + "\n\n".join(paragraphs)
        prompt = llm.chat_tokens([{"role": "user", "content": question}])
        answer = llm.tokenize(summary_of(paragraphs), add_special=False)
        if len(answer) >= SUMMARY_TOKENS:
            texts.append(Text(f"docs, part {len(texts) + 1}", prompt, answer[:SUMMARY_TOKENS]))
        paragraphs, size = [], 0
    return texts[:count]
