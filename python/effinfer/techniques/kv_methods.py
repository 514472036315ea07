"""Methods of the keys and values that generated tokens read: which stay, which are visited, and in
how many bits."""

from effinfer.techniques.h2o import H2O
from effinfer.techniques.kivi import KIVI
from effinfer.techniques.kv_compose import KVCompose
from effinfer.techniques.mlkv import MLKV
from effinfer.techniques.quest import Quest
from effinfer.techniques.raas import RaaS
from effinfer.techniques.snapkv import SnapKV
from effinfer.techniques.streaming_llm import StreamingLLM
from effinfer.techniques.window_kv import WindowKV

__all__ = [
    "H2O",
    "KIVI",
    "KV_METHODS",
    "MLKV",
    "KVCompose",
    "Quest",
    "RaaS",
    "SnapKV",
    "StreamingLLM",
    "WindowKV",
]

KV_METHODS = (
    H2O,
    KIVI,
    KVCompose,
    MLKV,
    Quest,
    RaaS,
    SnapKV,
    StreamingLLM,
    WindowKV,
)
