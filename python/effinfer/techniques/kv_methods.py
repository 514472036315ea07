"""Methods that choose which keys stay in the cache."""

from effinfer.techniques.h2o import H2O
from effinfer.techniques.snapkv import SnapKV
from effinfer.techniques.streaming_llm import StreamingLLM
from effinfer.techniques.window_kv import WindowKV

__all__ = ["KV_METHODS", "H2O", "SnapKV", "StreamingLLM", "WindowKV"]

KV_METHODS = (H2O, SnapKV, StreamingLLM, WindowKV)
