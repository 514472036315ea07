"""Wrappers with a plan in graphs of torch.compile."""

from typing import Any

import torch

from effinfer import ops
from effinfer.integrations.torch_library import Numbers, register

_PAGED = (
    ops.BatchDecodeWithPagedKVCacheWrapper,
    ops.BatchPrefillWithPagedKVCacheWrapper,
    ops.MultiLevelCascadeAttentionWrapper,
)
_wrappers = Numbers("[planned_attention] wrapper", "Attention")


def _run(
    q: torch.Tensor, keys: list[torch.Tensor], wrapper: int, lse_base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    planned = _wrappers[wrapper]
    caches = (tuple(keys) if len(keys) > 1 else keys[0],) if isinstance(planned, _PAGED) else keys
    out, lse = planned.run(q, *caches, return_lse=True, lse_base=lse_base)
    return out, lse


def _fake(
    q: torch.Tensor, keys: list[torch.Tensor], wrapper: int, lse_base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    latent = isinstance(_wrappers[wrapper], ops.BatchMLAPagedAttentionWrapper)
    dims = q.shape[-1] if latent else keys[-1].shape[-1]
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], dims)), lse


register(
    "planned_attention(Tensor q, Tensor[] keys, int wrapper, str lse_base) -> (Tensor, Tensor)",
    _run,
    _fake,
)
register(
    "append_paged_kv_cache(Tensor append_key, Tensor append_value, Tensor batch_indices, "
    "Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_indices, "
    'Tensor kv_indptr, Tensor kv_last_page_len, str kv_layout="NHD") -> ()',
    lambda k, v, batch, positions, k_cache, v_cache, *pages: ops.append_paged_kv_cache(
        k, v, batch, positions, (k_cache, v_cache), *pages
    ),
    None,
)


class Attention(torch.nn.Module):
    """run() of a wrapper of `effinfer.ops`, which is planned before each step, outside the graph.

    Args:
        wrapper: any class of `effinfer.ops` with plan() and run().
        return_lse, lse_base: as of its run().

    forward(q, *keys) takes what run() takes by position, a paged cache as one tensor or as two:
    `attention(q, k_cache, v_cache)`.
    """

    def __init__(self, wrapper: Any, *, return_lse: bool = False, lse_base: str = "log2") -> None:
        super().__init__()
        self.wrapper = wrapper
        self.return_lse = return_lse
        self.lse_base = lse_base
        self.number = _wrappers.add(wrapper)

    def forward(self, q: torch.Tensor, *keys: torch.Tensor) -> Any:
        out, lse = torch.ops.effinfer.planned_attention(q, keys, self.number, self.lse_base)
        return (out, lse) if self.return_lse else out
