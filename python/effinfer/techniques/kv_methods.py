"""Methods of the keys and values that generated tokens read: which stay, which are visited, and in
how many bits."""

from effinfer.techniques.act_qkv import ActQKV
from effinfer.techniques.attention_predictor import AttentionPredictor
from effinfer.techniques.chelsea import Chelsea
from effinfer.techniques.comm_vq import CommVQ
from effinfer.techniques.cskv import CSKV
from effinfer.techniques.double_sparsity import DoubleSparsity
from effinfer.techniques.gear import GEAR
from effinfer.techniques.h2o import H2O
from effinfer.techniques.infllm_v2 import InfLLMV2
from effinfer.techniques.keyformer import Keyformer
from effinfer.techniques.kivi import KIVI
from effinfer.techniques.kv_compose import KVCompose
from effinfer.techniques.longgen import LongGen
from effinfer.techniques.magic_pig import MagicPIG
from effinfer.techniques.mlkv import MLKV
from effinfer.techniques.quest import Quest
from effinfer.techniques.qwen_1m import Qwen1M
from effinfer.techniques.raas import RaaS
from effinfer.techniques.snapkv import SnapKV
from effinfer.techniques.squeezed_attention import SqueezedAttention
from effinfer.techniques.streaming_llm import StreamingLLM
from effinfer.techniques.streaming_vlm import StreamingVLM
from effinfer.techniques.subgen import SubGen
from effinfer.techniques.token_butler import TokenButler
from effinfer.techniques.token_select import TokenSelect
from effinfer.techniques.window_kv import WindowKV
from effinfer.techniques.xkv import XKV
from effinfer.techniques.zero_tuning import ZeroTuning

__all__ = [
    "CSKV",
    "GEAR",
    "H2O",
    "KIVI",
    "KV_METHODS",
    "MLKV",
    "XKV",
    "ActQKV",
    "AttentionPredictor",
    "Chelsea",
    "CommVQ",
    "DoubleSparsity",
    "InfLLMV2",
    "KVCompose",
    "Keyformer",
    "LongGen",
    "MagicPIG",
    "Quest",
    "Qwen1M",
    "RaaS",
    "SnapKV",
    "SqueezedAttention",
    "StreamingLLM",
    "StreamingVLM",
    "SubGen",
    "TokenButler",
    "TokenSelect",
    "WindowKV",
    "ZeroTuning",
]

KV_METHODS = (
    ActQKV,
    AttentionPredictor,
    Chelsea,
    CommVQ,
    CSKV,
    DoubleSparsity,
    GEAR,
    H2O,
    InfLLMV2,
    KIVI,
    KVCompose,
    Keyformer,
    LongGen,
    MagicPIG,
    MLKV,
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
    XKV,
    ZeroTuning,
)
