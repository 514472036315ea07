"""Published methods of efficient inference, a file each, on the primitives of the engine.

`LLM(model, techniques=[...])` takes Techniques, or their names; `effinfer techniques` lists them.
For one sparse prefill `prefill=` is a short form:

    LLM("model.gguf", techniques=[XAttention(threshold=0.95)])
    LLM("model.gguf", prefill="minference")

`LLM(model, speculation=...)` takes proposers of drafts, or a name:

    LLM("model.gguf", speculation=Speculation([SuffixDecoding(), TokenRecycling(width=4)]))
"""

from effinfer.techniques.aded import ADED
from effinfer.techniques.bild import BiLD
from effinfer.techniques.bita import BiTA
from effinfer.techniques.chimera import Chimera
from effinfer.techniques.code_swift import CodeSwift
from effinfer.techniques.dense_store import DenseStore
from effinfer.techniques.draft_model import DraftModel, LayerRewrite
from effinfer.techniques.dresd import DReSD
from effinfer.techniques.dynamic_exit import DEL
from effinfer.techniques.eagle import Eagle
from effinfer.techniques.easy_spec import EasySpec
from effinfer.techniques.eesd import EESD
from effinfer.techniques.first import FiRST
from effinfer.techniques.glide import GliDe
from effinfer.techniques.gumiho import Gumiho
from effinfer.techniques.heads import Heads
from effinfer.techniques.hidden_transfer import HiddenTransfer
from effinfer.techniques.hydra import Hydra
from effinfer.techniques.hyper_attention import HyperAttention
from effinfer.techniques.installed import PREFILLS, Installed, as_prefill
from effinfer.techniques.kangaroo import Kangaroo
from effinfer.techniques.kv_methods import (
    CSKV,
    GEAR,
    H2O,
    KIVI,
    MLKV,
    XKV,
    ActQKV,
    AttentionPredictor,
    Chelsea,
    CommVQ,
    DoubleSparsity,
    InfLLMV2,
    Keyformer,
    KVCompose,
    LongGen,
    MagicPIG,
    Quest,
    Qwen1M,
    RaaS,
    SnapKV,
    SqueezedAttention,
    StreamingLLM,
    StreamingVLM,
    SubGen,
    TokenButler,
    TokenSelect,
    WindowKV,
    ZeroTuning,
)
from effinfer.techniques.long_spec import LongSpec
from effinfer.techniques.lookahead import Lookahead
from effinfer.techniques.m2r2 import M2R2
from effinfer.techniques.medusa import Medusa
from effinfer.techniques.minference import MInference
from effinfer.techniques.multi_sample import MultiSample
from effinfer.techniques.parallel_spec import ParallelSpec
from effinfer.techniques.pard import PARD
from effinfer.techniques.pass_rows import PaSS
from effinfer.techniques.ppd import PPD
from effinfer.techniques.prefill import SparsePrefill
from effinfer.techniques.preparation import (
    SPECULATIONS,
    DraftSource,
    Techniques,
    as_speculation,
    prepare,
    with_draft_model,
    with_layers,
)
from effinfer.techniques.prompt_lookup import PromptLookup
from effinfer.techniques.rapid import RAPID
from effinfer.techniques.recipes import DraftRecipe, SpeculationRecipe
from effinfer.techniques.registry import REGISTRY
from effinfer.techniques.rsd import RSD
from effinfer.techniques.s2_attention import S2Attention
from effinfer.techniques.sample_attention import SampleAttention
from effinfer.techniques.setup import EngineSetup, RequestSetup, hook
from effinfer.techniques.skeleton import SkeletonOfThought
from effinfer.techniques.skip_decode import SkipDecode
from effinfer.techniques.skip_layers import EarlyExit, SkipLayers
from effinfer.techniques.sparse_decode import SparseDecode
from effinfer.techniques.spec_reason import SpecReason
from effinfer.techniques.staged import StagedDraft
from effinfer.techniques.suffix_decoding import SuffixDecoding
from effinfer.techniques.target_extension import TargetExtension
from effinfer.techniques.technique import Meta, Technique
from effinfer.techniques.token_recycling import TokenRecycling
from effinfer.techniques.unified_skip import UnifiedSkip
from effinfer.techniques.vocab_trim import VocabTrim
from effinfer.techniques.xattention import XAttention

__all__ = [
    "ADED",
    "CSKV",
    "DEL",
    "EESD",
    "GEAR",
    "H2O",
    "KIVI",
    "M2R2",
    "MLKV",
    "PARD",
    "PPD",
    "PREFILLS",
    "RAPID",
    "REGISTRY",
    "RSD",
    "SPECULATIONS",
    "XKV",
    "ActQKV",
    "AttentionPredictor",
    "BiLD",
    "BiTA",
    "Chelsea",
    "Chimera",
    "CodeSwift",
    "CommVQ",
    "DReSD",
    "DenseStore",
    "DoubleSparsity",
    "DraftModel",
    "DraftRecipe",
    "DraftSource",
    "Eagle",
    "EarlyExit",
    "EasySpec",
    "EngineSetup",
    "FiRST",
    "GliDe",
    "Gumiho",
    "Heads",
    "HiddenTransfer",
    "Hydra",
    "HyperAttention",
    "InfLLMV2",
    "Installed",
    "KVCompose",
    "Kangaroo",
    "Keyformer",
    "LayerRewrite",
    "LongGen",
    "LongSpec",
    "Lookahead",
    "MInference",
    "MagicPIG",
    "Medusa",
    "Meta",
    "MultiSample",
    "PaSS",
    "ParallelSpec",
    "PromptLookup",
    "Quest",
    "Qwen1M",
    "RaaS",
    "RequestSetup",
    "S2Attention",
    "SampleAttention",
    "SkeletonOfThought",
    "SkipDecode",
    "SkipLayers",
    "SnapKV",
    "SqueezedAttention",
    "SparseDecode",
    "SparsePrefill",
    "SpecReason",
    "SpeculationRecipe",
    "StagedDraft",
    "StreamingLLM",
    "StreamingVLM",
    "SubGen",
    "SuffixDecoding",
    "TargetExtension",
    "Technique",
    "Techniques",
    "TokenButler",
    "TokenRecycling",
    "TokenSelect",
    "UnifiedSkip",
    "VocabTrim",
    "WindowKV",
    "XAttention",
    "ZeroTuning",
    "as_prefill",
    "as_speculation",
    "hook",
    "prepare",
    "with_draft_model",
    "with_layers",
]
