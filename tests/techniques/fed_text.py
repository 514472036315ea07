"""What methods that encode, choose or drop keys and values cost: perplexity of a text that is fed
token by token to SmolLM2, from its beginning or behind a prompt, and bytes."""

from pydoc_data import topics

import numpy as np

from effinfer import LLM, SamplingParams
from effinfer.techniques import Technique
from tests.model_files import smollm2_path

PAGE = 64
NAMES = sorted(topics.topics)


def text_of(names: list[str]) -> str:
    return "\n".join(topics.topics[name] for name in names)


def perplexity(techniques: list[Technique], tokens: list[int], first: int) -> float:
    """Of tokens that are fed one by one."""
    llm = LLM(smollm2_path(), techniques=techniques)
    logits = np.asarray(llm.engine.logits(tokens, phase="decode"))[first - 1 : -1].astype(float)
    logits -= logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, np.array(tokens[first:])[:, None], 1)[:, 0]
    return float(np.exp(np.mean(np.log(np.exp(logits).sum(-1)) - chosen)))


class Forced:
    """A constraint that lets one text through."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.at = tokens, 0

    def fill(self, mask: np.ndarray) -> None:
        token = self.tokens[min(self.at, len(self.tokens) - 1)]
        mask[:] = 0
        mask[token // 32] = np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        self.at += 1
        return True

    def rollback(self, count: int) -> None:
        self.at -= count

    def ended(self) -> bool:
        return False


def likelihoods_behind(llm: LLM, tokens: list[int], prompt: int) -> np.ndarray:
    """Logarithms, of the tokens behind a prompt of so many, which are generated one by one."""
    follows = tokens[prompt:]
    params = SamplingParams(temperature=0.0, max_tokens=len(follows), ignore_eos=True, logprobs=0)
    llm.engine.add(tokens[:prompt], params.to_core(), Forced(follows))
    found: list[float] = []
    while llm.engine.has_work():
        for output in llm.engine.step():
            found += [entry.logprob for entry in output.tokens]
    return np.array(found)


def page_share(technique: Technique) -> float:
    """Bytes of encoded pages by those of 16 bits, and at most one in 16 bits."""
    llm = LLM(smollm2_path(), techniques=[technique], prefix_cache=False)
    llm.engine.add([7] * (4 * PAGE), SamplingParams(max_tokens=3, ignore_eos=True).to_core())
    used = []
    while llm.engine.has_work():
        llm.engine.step()
        used.append(llm.engine.kv_cache.used_bytes)
    page: float = used[0] / 4  # before the prompt's are encoded
    return (used[1] - page) / (4 * page)
