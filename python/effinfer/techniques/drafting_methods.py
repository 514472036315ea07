"""META of the methods that draft, verify or leave layers out, and of those that use two models:
which parameter of LLM takes them, and what they do to texts."""

import re
import sys
from typing import Any

from effinfer.techniques.aded import ADED
from effinfer.techniques.bild import BiLD
from effinfer.techniques.bita import BiTA
from effinfer.techniques.chimera import Chimera
from effinfer.techniques.code_swift import CodeSwift
from effinfer.techniques.draft_model import DraftModel
from effinfer.techniques.dresd import DReSD
from effinfer.techniques.dynamic_exit import DEL
from effinfer.techniques.eagle import Eagle
from effinfer.techniques.easy_spec import EasySpec
from effinfer.techniques.eesd import EESD
from effinfer.techniques.first import FiRST
from effinfer.techniques.glide import GliDe
from effinfer.techniques.gumiho import Gumiho
from effinfer.techniques.hidden_transfer import HiddenTransfer
from effinfer.techniques.hydra import Hydra
from effinfer.techniques.kangaroo import Kangaroo
from effinfer.techniques.long_spec import LongSpec
from effinfer.techniques.lookahead import Lookahead
from effinfer.techniques.m2r2 import M2R2
from effinfer.techniques.medusa import Medusa
from effinfer.techniques.multi_sample import MultiSample
from effinfer.techniques.parallel_spec import ParallelSpec
from effinfer.techniques.pard import PARD
from effinfer.techniques.pass_rows import PaSS
from effinfer.techniques.ppd import PPD
from effinfer.techniques.prompt_lookup import PromptLookup
from effinfer.techniques.rapid import RAPID
from effinfer.techniques.rsd import RSD
from effinfer.techniques.skeleton import SkeletonOfThought
from effinfer.techniques.skip_decode import SkipDecode
from effinfer.techniques.skip_layers import EarlyExit, SkipLayers
from effinfer.techniques.spec_reason import SpecReason
from effinfer.techniques.staged import StagedDraft
from effinfer.techniques.suffix_decoding import SuffixDecoding
from effinfer.techniques.technique import Meta, name_of
from effinfer.techniques.token_recycling import TokenRecycling
from effinfer.techniques.unified_skip import UnifiedSkip
from effinfer.techniques.vocab_trim import VocabTrim

# By family: what is lossless leaves the text, or its distribution, what it is.
_LOSSLESS: dict[str, tuple[type[Any], ...]] = {
    "speculation.lookup": (
        ADED,
        CodeSwift,
        Lookahead,
        MultiSample,
        PromptLookup,
        SuffixDecoding,
        TokenRecycling,
    ),
    "speculation.model": (DraftModel, StagedDraft, DEL, PARD),
    "speculation.exits": (EESD, Kangaroo, M2R2),
    "speculation.rows": (BiTA, PaSS, PPD),
    "speculation.states": (GliDe, HiddenTransfer, LongSpec, ParallelSpec),
    "speculation.retrieval": (DReSD,),
    "speculation.heads": (Chimera, Eagle, Gumiho, Hydra, Medusa),
    "speculation.draft_graph": (EasySpec, VocabTrim, SkipLayers, EarlyExit),
}
_LOSSY: dict[str, tuple[type[Any], ...]] = {
    "speculation.lossy": (BiLD, RAPID),
    "layers.skipping": (FiRST, SkipDecode, UnifiedSkip),
    "cascade.steps": (RSD, SpecReason),
    "requests.parallel": (SkeletonOfThought,),
}
_NEEDS = {
    "speculation.model": ("draft_model",),
    "speculation.heads": ("heads",),
    "speculation.exits": ("trained_parts",),
    "speculation.rows": ("trained_parts",),
    "speculation.states": ("trained_parts",),
    "speculation.retrieval": ("datastore",),
    "speculation.lossy": ("draft_model",),
    "cascade.steps": ("second_model",),
}
_PRIMITIVES = {
    "speculation.lookup": ("drafts", "trees"),
    "speculation.model": ("drafts", "draft_steps"),
    "speculation.heads": ("drafts", "taps"),
    "speculation.exits": ("drafts", "taps"),
    "speculation.rows": ("drafts", "trees"),
    "speculation.states": ("drafts", "taps"),
    "speculation.retrieval": ("drafts", "taps"),
    "speculation.draft_graph": ("drafts", "graph"),
    "speculation.lossy": ("drafts", "verifier"),
    "layers.skipping": ("graph",),
    "cascade.steps": ("requests",),
    "requests.parallel": ("requests",),
}
_NAMES = {
    BiLD: "bild",
    BiTA: "bita",
    DEL: "dynamic_exit",
    DReSD: "dresd",
    FiRST: "first",
    GliDe: "glide",
    M2R2: "m2r2",
    PaSS: "pass",
}
# Of files with two methods, the second.
_PAPERS = {
    EarlyExit: (
        "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding",
        "2404.16710",
    )
}


def _paper(kind: type[Any]) -> tuple[str, str]:
    """As the file's docstring begins: title, authors in brackets, number."""
    text = " ".join((sys.modules[kind.__module__].__doc__ or "").split())
    number = re.search(r"arXiv:(\d{4}\.\d{4,5})", text)
    return text.split(" (")[0], number[1] if number else ""


def _meta(kind: type[Any], family: str, effect: str) -> Meta:
    paper, arxiv = _PAPERS.get(kind) or _paper(kind)
    return Meta(
        paper=paper,
        arxiv=arxiv,
        family=family,
        primitives=_PRIMITIVES[family],
        effect=effect,
        needs=("attention", *_NEEDS.get(family, ())),
        differs="docs/techniques.md",
        name=_NAMES.get(kind, ""),
    )


def drafting_methods() -> dict[str, type[Any]]:
    """By name; their classes have META from then on."""
    found: dict[str, type[Any]] = {}
    for effect, families in (("lossless", _LOSSLESS), ("approximate", _LOSSY)):
        for family, kinds in families.items():
            for kind in kinds:
                if "META" not in vars(kind):
                    setattr(kind, "META", _meta(kind, family, effect))  # noqa: B010
                found[name_of(kind)] = kind
    return found
