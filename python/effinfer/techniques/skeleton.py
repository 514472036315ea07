"""Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation (Ning et al. 2023,
arXiv:2307.15337): the model first writes the points of an answer, a few words each, and then all of
them at once, in one batch. Lossy: an answer is a list whose points do not know each other's text.

The paper measures batches on GPUs and asks a router whether a question is of that kind, which here
is the caller's choice. Points share the pages of what their prompts begin with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.requests.parameters import complete
from effinfer.sampling import SamplingParams
from effinfer.techniques.chain_proposer import check_sizes

if TYPE_CHECKING:
    from effinfer.llm import LLM

_POINT = re.compile(r"^\s*(\d+)[.)]\s*(\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class SkeletonOutput:
    text: str
    skeleton: list[str]  # its points
    points: list[str]  # what became of them; empty: the skeleton had none
    skeleton_tokens: int
    point_tokens: list[int]


class SkeletonOfThought:
    """`SkeletonOfThought(llm).generate("How do I learn to swim?")`.

    Args:
        llm: with a chat template or without.
        most_points: that are written; a model may list more.
        skeleton_tokens: for the list.
    """

    def __init__(self, llm: LLM, *, most_points: int = 8, skeleton_tokens: int = 96) -> None:
        self.llm, self.most_points, self.skeleton_tokens = llm, most_points, skeleton_tokens
        check_sizes(self, {"most_points": 1, "skeleton_tokens": 1})

    def generate(
        self, question: str, params: SamplingParams | None = None, **keywords: Any
    ) -> SkeletonOutput:
        """max_tokens is of each point. A skeleton without a point is the whole answer. Throws as
        LLM.generate()."""
        params = complete(params, keywords, lambda: self.llm.default_params)
        listing = replace(params, max_tokens=self.skeleton_tokens)
        asked = (
            f"{question}\n\nGive only the skeleton of the answer, not the answer: a numbered "
            "list of 3 to 8 points, 3 to 5 words each."
        )
        (listed,) = self.llm.generate([self._prompt(asked, "1.")], listing)
        lines = _POINT.findall(f"1.{listed.text}")
        skeleton = [f"{number}. {text}" for number, text in lines[: self.most_points]]
        if not skeleton:
            text = f"1.{listed.text}"
            return SkeletonOutput(text, [], [], len(listed.token_ids), [])
        # What differs stands last, so that the pages before it are shared.
        task = (
            f"{question}\n\nThe skeleton of the answer is:\n" + "\n".join(skeleton) + "\n\n"
            "Write one point of it, in one or two short sentences, and no other: point "
        )
        prompts = [self._prompt(task + point.split(".")[0], f"{point}") for point in skeleton]
        outputs = self.llm.generate(prompts, params)
        for output in (listed, *outputs):
            if output.error:
                raise _core.Error(f"[SkeletonOfThought] {output.error}")
        points = [f"{p}{o.text}".rstrip() for p, o in zip(skeleton, outputs, strict=True)]
        counts = [len(output.token_ids) for output in outputs]
        return SkeletonOutput("\n".join(points), skeleton, points, len(listed.token_ids), counts)

    def _prompt(self, task: str, begun: str) -> list[int]:
        """Token ids of a task, and of how its answer begins."""
        if not self.llm.has_chat_template:
            return self.llm.tokenize(f"{task}\n\n{begun}")
        ids = self.llm.chat_tokens([{"role": "user", "content": task}])
        return [*ids, *self.llm.tokenize(begun, add_special=False)]
