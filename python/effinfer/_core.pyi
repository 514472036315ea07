"""
The native core of effinfer.
"""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
import typing_extensions

class Error(Exception): ...
class CancelledError(Error): ...
class DeviceError(Error, RuntimeError): ...
class FileError(Error, OSError): ...
class FormatError(Error, ValueError): ...
class InternalError(Error, RuntimeError): ...
class InvalidArgumentError(Error, ValueError): ...
class OutOfMemoryError(Error, MemoryError): ...
class UnsupportedError(Error, RuntimeError): ...
class ConflictError(InvalidArgumentError): ...

class Queue:
    """
    What operators on a GPU run in: a stream that somebody else has made.
    """
    def __init__(self, device: str = "cuda", stream: int = 0) -> None:
        """
        `stream`: a cudaStream_t as a number; 0 is the legacy default stream.
        """
    def synchronize(self) -> None:
        """
        Waits for all that the stream has.
        """
    def upload(self, array: DeviceArray, values: numpy.typing.NDArray[typing.Any]) -> None:
        """
        Writes values of the host to an array.
        """
    def zero(self, array: DeviceArray) -> None:
        """
        Writes zeros to an array of the device.
        """
    @property
    def device(self) -> str: ...
    @property
    def stream(self) -> int: ...

class DeviceArray:
    """
    An array in the memory of a GPU.
    """
    @staticmethod
    def empty(
        shape: collections.abc.Sequence[int], dtype: numpy.dtype[typing.Any], queue: Queue
    ) -> DeviceArray: ...
    @staticmethod
    def from_numpy(array: numpy.typing.NDArray[typing.Any], device: str = "cuda") -> DeviceArray:
        """
        A copy in the memory of a GPU.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: typing.Any = None,
        copy: bool | None = None,
    ) -> typing_extensions.CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __getitem__(self, index: typing.Any) -> DeviceArray: ...
    def __init__(
        self,
        pointer: int,
        shape: collections.abc.Sequence[int],
        strides: collections.abc.Sequence[int] | None,
        dtype: numpy.dtype[typing.Any],
        index: int,
        owner: typing.Any,
        read_only: bool = False,
        stream: int = 0,
    ) -> None:
        """
        Over memory of "cuda:<index>" that `owner` keeps alive; strides in elements.
        """
    def reshape(self, shape: collections.abc.Sequence[int]) -> DeviceArray:
        """
        Over the same memory.
        """
    def swapaxes(self, first: int, second: int) -> DeviceArray: ...
    def to_numpy(self) -> numpy.typing.NDArray[typing.Any]:
        """
        A copy, once the array's stream has done all that it has to.
        """
    @property
    def __cuda_array_interface__(self) -> dict[str, typing.Any]: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> numpy.dtype[typing.Any]: ...
    @property
    def is_contiguous(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def ndim(self) -> int: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def strides(self) -> tuple[typing.Any, ...]:
        """
        In bytes, as numpy's.
        """

class ThreadPool:
    @staticmethod
    def pinned(cores: collections.abc.Sequence[int], threads: int = 0) -> ThreadPool:
        """
        A member for each of these cores, or for the first `threads`, pinned to it.
        """
    def __init__(self, threads: int = 0, *, oversubscribe: bool = False) -> None:
        """
        `threads` members (0: as info() says), but no more than CPUs unless `oversubscribe`.
        """
    @property
    def reason(self) -> str:
        """
        Why it has that size.
        """
    @property
    def size(self) -> int: ...

class WeightSource:
    """
    Named weights of a model.
    """
    def __contains__(self, arg0: typing.Any) -> bool: ...
    def dequantize(self, name: typing.Any) -> numpy.typing.NDArray[numpy.float32]:
        """
        A weight as float32 array in its shape.
        """
    def dtype(self, name: typing.Any) -> str:
        """
        Name of a weight's dtype.
        """
    def rows(
        self, name: typing.Any, rows: collections.abc.Sequence[int]
    ) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The bytes of some rows of a matrix, uint8: a matrix of its dtype with these rows.
        """
    def shape(self, name: typing.Any) -> tuple[typing.Any, ...]:
        """
        Shape of a weight, in elements.
        """

class MemoryWeights(WeightSource):
    """
    Weights in numpy arrays, which are referenced and not copied.
    """
    def __init__(self) -> None: ...
    def add(
        self,
        name: typing.Any,
        array: numpy.typing.NDArray[typing.Any],
        dtype: str,
        shape: collections.abc.Sequence[int],
        *,
        path: typing.Any = None,
        offset: int = 0,
    ) -> None:
        """
        Adds or replaces a weight. `array` is C-contiguous, of any element type, and holds the bytes of a `dtype` tensor of that shape (elements, not blocks). `path`: the array is a read-only mapping of this file from byte `offset` on; its pages are dropped once they are packed, and the packed form may be kept on disk. Never give it for an array that can be written.
        """

class LayeredWeights(MemoryWeights):
    """
    MemoryWeights in front of another source, whose other names it has.
    """
    def __init__(self, base: WeightSource) -> None: ...

class GgufStrings:
    """
    A sequence of str over a metadata array.
    """
    def __getitem__(self, arg0: int) -> str: ...
    def __len__(self) -> int: ...

class GgufTensor:
    """
    What a file says of a tensor.
    """
    @property
    def dtype(self) -> typing.Any:
        """
        Name of the dtype, or None when effinfer does not read this type.
        """
    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...
    @property
    def type_name(self) -> str: ...

class GgufFile(WeightSource):
    """
    A memory-mapped GGUF file. FileError, FormatError.
    """
    def __init__(self, path: typing.Any) -> None: ...
    def array_size(self, key: typing.Any) -> int:
        """
        Number of elements of an array.
        """
    def get(self, key: typing.Any, default: typing.Any = None) -> typing.Any:
        """
        A metadata value: int, float, bool, str, list of str, or a read-only numpy array (without a copy where the file has it aligned). `default` when absent.
        """
    def keys(self) -> list[typing.Any]:
        """
        Metadata keys in file order.
        """
    def metadata(self) -> dict[str, typing.Any]:
        """
        All metadata as a dict; string arrays are GgufStrings, decoded when indexed.
        """
    def string_bytes(self, key: typing.Any) -> list[typing.Any]:
        """
        A string array as list of bytes.
        """
    def strings(self, key: typing.Any) -> list[typing.Any]:
        """
        A string array as list of str; bytes that are not UTF-8 become surrogate escapes.
        """
    def strings_where(self, key: typing.Any, numbers: typing.Any, value: float) -> dict[int, str]:
        """
        Index -> str: of a string array, those where the array `numbers` holds `value`.
        """
    def tensor_bytes(self, name: typing.Any) -> numpy.typing.NDArray[typing.Any]:
        """
        A tensor's bytes: a read-only uint8 array over the mapping.
        """
    def tensors(self) -> list[typing.Any]:
        """
        Descriptions of all tensors in file order.
        """
    def value_type(self, key: typing.Any) -> str:
        """
        "int", "float", "bool", "string" or "array[u32]" and the like. KeyError when absent.
        """
    @property
    def alignment(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...

class GgufWriter:
    """
    A GGUF file, written metadata first, then all tensor descriptions, then their data; it appears with commit(), complete or not at all.
    """
    def __init__(self, path: typing.Any) -> None: ...
    def add_tensor(
        self, name: typing.Any, dtype: str, shape: collections.abc.Sequence[int]
    ) -> None: ...
    def commit(self) -> None: ...
    def copy_metadata(self, source: GgufFile) -> None:
        """
        All metadata of a GgufFile, but for its alignment.
        """
    def remove(self, key: typing.Any) -> None: ...
    def set(self, key: typing.Any, value: typing.Any) -> None:
        """
        Metadata: int, float (32 bits), bool, str, list of str, or an array of int32, uint32, float32 or bool.
        """
    def write(self, data: numpy.typing.NDArray[typing.Any]) -> None:
        """
        The next bytes of the tensors' data, of one tensor at most.
        """

class Graph:
    """
    A graph of operators over symbolic sizes.
    """
    @staticmethod
    def parse(text: str) -> Graph:
        """
        Reads the text form; FormatError with line and column.
        """
    def __eq__(self, arg0: typing.Any) -> bool: ...
    def __str__(self) -> str: ...
    def to_string(self) -> str:
        """
        The text form, which parse() reads back.
        """
    def verify(self) -> None:
        """
        Raises FormatError naming the node that is wrong.
        """
    @property
    def metadata(self) -> dict[str, typing.Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def nodes(self) -> list[typing.Any]:
        """
        Dicts of op, inputs, outputs, attributes.
        """
    @property
    def outputs(self) -> list[str]: ...
    @property
    def values(self) -> dict[str, typing.Any]:
        """
        By name: dtype, shape, weight_name.
        """
    @property
    def weight_names(self) -> list[str]:
        """
        The weights that it reads, as their source names them.
        """

class GraphBuilder:
    """
    Builds a graph node by node; effinfer.graph has the readable form.
    """
    def __init__(self, name: str) -> None: ...
    def finish(self, outputs: collections.abc.Sequence[int]) -> Graph: ...
    def input(self, name: str, dtype: str, shape: list[typing.Any]) -> int: ...
    def node(
        self, op: str, inputs: collections.abc.Sequence[int], attributes: dict[str, typing.Any] = {}
    ) -> list[int]: ...
    def rename(self, value: int, name: str) -> None: ...
    def set_metadata(self, key: str, value: typing.Any) -> None: ...
    def value(self, id: int) -> dict[str, typing.Any]: ...
    def weight(self, name: str, dtype: str, shape: collections.abc.Sequence[int]) -> int: ...

class KvCache:
    """
    The paged KV cache: 64-token pages, prefixes in a radix tree.
    """

    page_size: typing.ClassVar[int] = 64
    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "bf16",
        num_pages: int,
        index_unit: int = 0,
        index_means: bool = False,
        index_bits: int = 0,
    ) -> None: ...
    def append(self, sequence: int, tokens: typing.Any) -> None: ...
    def can_append(self, sequence: int, count: int) -> bool: ...
    def can_rollback(self, sequence: int, count: int) -> bool: ...
    def check_integrity(self) -> None: ...
    def clear_prefixes(self) -> None: ...
    def commit(self, sequence: int, count: int) -> None: ...
    def committed(self, sequence: int) -> int: ...
    def create(self, tokens: typing.Any) -> tuple[int, int]:
        """
        A sequence for a prompt: (id, tokens found in the prefix cache).
        """
    def encoded_pages(self, sequence: int) -> int:
        """
        How many of the sequence's first pages take 4 or 2 bits a number.
        """
    def evict(self, sequence: int, begin: int, end: int, group: int = 0) -> None: ...
    def export_sequence(self, sequence: int) -> bytes: ...
    def fork(self, sequence: int) -> int: ...
    def import_sequence(self, blob: str) -> int: ...
    def is_prefix(self, sequence: int) -> bool: ...
    def k_page(self, layer: int, page: int) -> numpy.typing.NDArray[typing.Any]:
        """
        A writable view: uint8 [num_kv_heads, bytes].
        """
    def keep(self, sequence: int, rows: typing.Any) -> None:
        """
        Of the tokens that are not committed keeps and commits those with these indices.
        """
    def length(self, sequence: int) -> int: ...
    def merge(
        self,
        sequence: int,
        head: int,
        into: int,
        slots: collections.abc.Sequence[int],
        weights: collections.abc.Sequence[float],
        group: int = 0,
    ) -> None: ...
    def next_position(self, sequence: int) -> int: ...
    def pages(self, sequence: int, group: int = 0) -> list[int]:
        """
        Page ids of a group of layers; -1: a page that a window has freed.
        """
    def publish(self, sequence: int) -> None: ...
    def release(self, sequence: int, keep_prefix: bool = True) -> None: ...
    def reorder(
        self,
        sequence: int,
        slots: collections.abc.Sequence[collections.abc.Sequence[int]],
        group: int = 0,
    ) -> None:
        """
        Puts all slots into another order: one list for all heads, or one for each (layer, KV head).
        """
    def reposition(
        self, sequence: int, from_slots: collections.abc.Sequence[int], delta: int
    ) -> None: ...
    def retain(
        self,
        sequence: int,
        slots: collections.abc.Sequence[collections.abc.Sequence[int]],
        group: int = 0,
    ) -> None:
        """
        Keeps these slots: one list for all heads, or one for each (layer, KV head).
        """
    def rollback(self, sequence: int, count: int) -> None: ...
    def sequence_bytes(self, sequence: int) -> int:
        """
        Bytes of the pages that a sequence holds, shared ones included.
        """
    def slots(self, sequence: int, group: int = 0) -> int: ...
    def tokens(self, sequence: int) -> list[int]: ...
    def v_page(self, layer: int, page: int) -> numpy.typing.NDArray[typing.Any]:
        """
        A writable view: uint8 [num_kv_heads, bytes].
        """
    @property
    def available_pages(self) -> int: ...
    @property
    def cached_prefix_pages(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...

class Profile:
    """
    Times, bytes and operations of every kernel call of steps.
    """
    def overlapped_share(self, beside: Profile) -> float:
        """
        The share of its steps' time in which a step of another profile ran, too.
        """
    def summary(self, phase: str) -> dict[str, typing.Any]:
        """
        Sums over the steps of a phase; `kernels` has a row for each kernel and kind of
        weights, the longest first.
        """
    def trace_json(self) -> str:
        """
        Chrome's trace-event format, for Perfetto.
        """
    @property
    def device(self) -> str:
        """
        "cpu" or "cuda:0".
        """
    @property
    def dropped_steps(self) -> int:
        """
        Steps that ran after the memory for records was used up.
        """
    @property
    def num_layers(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def threads(self) -> int:
        """
        1 of a GPU, which times calls itself.
        """

class PackCacheReport:
    """
    What a load had of the pack cache.
    """
    @property
    def path(self) -> str:
        """
        Of the cached file; "" when it has no name.
        """
    @property
    def reason(self) -> str:
        """
        Why it is not a hit.
        """
    @property
    def state(self) -> str:
        """
        "off", "absent" (only of find_pack_cache), "hit", "stored" or "failed".
        """

class FrontLayers:
    """
    The first layers of a model on a device of their own.
    """
    def __init__(
        self, device: str, *, count: int | None = None, pool: ThreadPool | None = None
    ) -> None:
        """
        count: how many; None: what memory and its rates say. pool: the CPU's threads; None:
        those of the other layers.
        """

class CompileOptions:
    """
    How compile() is to build an executable.
    """
    def __init__(
        self,
        *,
        precision: str = "fast",
        deterministic: bool = False,
        kv_dtype: str | None = None,
        max_seq_len: int | None = None,
        max_sequences: int = 64,
        disabled_passes: collections.abc.Set[str] = set(),
        pack_cache: typing.Any = None,
        tuning_cache: typing.Any = None,
        ternary_packing: str = "auto",
        device: str = "cpu",
        front: FrontLayers | None = None,
        max_tokens: int = 512,
        max_rows: int = 64,
    ) -> None: ...

class Executable:
    """
    A compiled graph: packed weights, an arena, a flat list of kernel calls.
    """
    def explain(self) -> str:
        """
        What runs in each phase and why, the packed weights, the arena.
        """
    def make_cache(self, num_pages: int) -> KvCache:
        """
        A KV cache of the shape that run() takes.
        """
    def output(self, name: str) -> numpy.typing.NDArray[numpy.float32]:
        """
        float32 [T or R, size]: an output as the last step left it.
        """
    def run(
        self,
        *,
        token_ids: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        positions: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        qo_indptr: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        kv_indptr: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        kv_indices: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        kv_len: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        logit_rows: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        cache: KvCache,
        phase: str = "decode",
        ancestors: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64] | None = None,
        tree_start: typing.Annotated[numpy.typing.ArrayLike, numpy.int32] | None = None,
        dense: typing.Annotated[numpy.typing.ArrayLike, numpy.uint8] | None = None,
        float_inputs: collections.abc.Mapping[
            str, typing.Annotated[numpy.typing.ArrayLike, numpy.float32]
        ] = {},
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        One step: appends K and V to the cache, returns float32 logits [R, vocab]. ancestors:
        uint64 [T] when the rows of a sequence are a tree of drafts, a bit for each of the
        tree's tokens that a row descends from, and its own; all 0: a chain. tree_start: int32
        [S], the tokens of the sequences that their trees begin with; by default the step's
        first ones. dense: uint8 [S], 1 for sequences whose rows visit all keys, whatever the
        graph's indices choose. float_inputs: float32 [T, size] of each float input of the graph.
        """
    @property
    def arena_bytes(self) -> int: ...
    @property
    def graph(self) -> Graph:
        """
        The graph after all passes.
        """
    @property
    def output_names(self) -> list[str]:
        """
        The graph's outputs behind the logits.
        """
    @property
    def pack_cache(self) -> PackCacheReport: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def placement(self) -> str:
        """
        Which layers are on which of two devices, and why; else "".
        """
    @property
    def vocab_size(self) -> int: ...

class SamplingParams:
    """
    How tokens are chosen. Filters run in the order: logit_bias, bad_words,
    penalties, DRY, top_n_sigma, temperature, top_k, typical_p, top_p, min_p,
    XTC, mirostat, draw.
    """

    ignore_eos: bool
    def __copy__(self) -> SamplingParams: ...
    def __deepcopy__(self, arg0: dict[str, typing.Any]) -> SamplingParams: ...
    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        typical_p: float = 1.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: collections.abc.Mapping[int, float] = {},
        bad_words: collections.abc.Sequence[collections.abc.Sequence[int]] = [],
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_sequence_breakers: collections.abc.Sequence[int] = [],
        top_n_sigma: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.10000000149011612,
        mirostat: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.10000000149011612,
        seed: int = 0,
        max_tokens: int = 128,
        stop_token_ids: collections.abc.Sequence[int] = [],
        ignore_eos: bool = False,
        logprobs: int = -1,
        prompt_logprobs: int = -1,
        speculation: bool = True,
        techniques: collections.abc.Sequence[str] | None = None,
    ) -> None: ...
    def __repr__(self) -> str: ...
    def is_plain(self) -> bool:
        """
        Whether temperature, top-k, typical, top-p and min-p alone choose, and no log-probability
        is told.
        """
    def validate(self, vocab_size: int = 0) -> None: ...
    @property
    def bad_words(self) -> list[list[int]]:
        """
        as tokens
        """
    @bad_words.setter
    def bad_words(self, arg0: collections.abc.Sequence[collections.abc.Sequence[int]]) -> None: ...
    @property
    def dry_allowed_length(self) -> int: ...
    @dry_allowed_length.setter
    def dry_allowed_length(self, arg0: int) -> None: ...
    @property
    def dry_base(self) -> float: ...
    @dry_base.setter
    def dry_base(self, arg0: float) -> None: ...
    @property
    def dry_multiplier(self) -> float: ...
    @dry_multiplier.setter
    def dry_multiplier(self, arg0: float) -> None: ...
    @property
    def dry_penalty_last_n(self) -> int: ...
    @dry_penalty_last_n.setter
    def dry_penalty_last_n(self, arg0: int) -> None: ...
    @property
    def dry_sequence_breakers(self) -> list[int]:
        """
        token ids, ascending
        """
    @dry_sequence_breakers.setter
    def dry_sequence_breakers(self, arg0: collections.abc.Sequence[int]) -> None: ...
    @property
    def frequency_penalty(self) -> float: ...
    @frequency_penalty.setter
    def frequency_penalty(self, arg0: float) -> None: ...
    @property
    def logit_bias(self) -> dict[int, float]: ...
    @logit_bias.setter
    def logit_bias(self, arg1: collections.abc.Mapping[int, float]) -> None: ...
    @property
    def logprobs(self) -> int:
        """
        -1: none; n: of the token and the n likeliest
        """
    @logprobs.setter
    def logprobs(self, arg0: int) -> None: ...
    @property
    def max_tokens(self) -> int: ...
    @max_tokens.setter
    def max_tokens(self, arg0: int) -> None: ...
    @property
    def min_p(self) -> float: ...
    @min_p.setter
    def min_p(self, arg0: float) -> None: ...
    @property
    def mirostat(self) -> int: ...
    @mirostat.setter
    def mirostat(self, arg0: int) -> None: ...
    @property
    def mirostat_eta(self) -> float: ...
    @mirostat_eta.setter
    def mirostat_eta(self, arg0: float) -> None: ...
    @property
    def mirostat_tau(self) -> float: ...
    @mirostat_tau.setter
    def mirostat_tau(self, arg0: float) -> None: ...
    @property
    def presence_penalty(self) -> float: ...
    @presence_penalty.setter
    def presence_penalty(self, arg0: float) -> None: ...
    @property
    def prompt_logprobs(self) -> int:
        """
        the same of the prompt's tokens
        """
    @prompt_logprobs.setter
    def prompt_logprobs(self, arg0: int) -> None: ...
    @property
    def repetition_penalty(self) -> float: ...
    @repetition_penalty.setter
    def repetition_penalty(self, arg0: float) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg0: int) -> None: ...
    @property
    def speculation(self) -> bool:
        """
        whether the engine may draft
        """
    @speculation.setter
    def speculation(self, arg0: bool) -> None: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @stop_token_ids.setter
    def stop_token_ids(self, arg0: collections.abc.Sequence[int]) -> None: ...
    @property
    def techniques(self) -> list[str] | None:
        """
        of the engine's, by name; None: all
        """
    @techniques.setter
    def techniques(self, arg0: collections.abc.Sequence[str] | None) -> None: ...
    @property
    def temperature(self) -> float: ...
    @temperature.setter
    def temperature(self, arg0: float) -> None: ...
    @property
    def top_k(self) -> int: ...
    @top_k.setter
    def top_k(self, arg0: int) -> None: ...
    @property
    def top_n_sigma(self) -> float: ...
    @top_n_sigma.setter
    def top_n_sigma(self, arg0: float) -> None: ...
    @property
    def top_p(self) -> float: ...
    @top_p.setter
    def top_p(self, arg0: float) -> None: ...
    @property
    def typical_p(self) -> float: ...
    @typical_p.setter
    def typical_p(self, arg0: float) -> None: ...
    @property
    def xtc_probability(self) -> float: ...
    @xtc_probability.setter
    def xtc_probability(self, arg0: float) -> None: ...
    @property
    def xtc_threshold(self) -> float: ...
    @xtc_threshold.setter
    def xtc_threshold(self, arg0: float) -> None: ...

class SampledToken:
    @property
    def logprob(self) -> float: ...
    @property
    def token(self) -> int: ...
    @property
    def top(self) -> list[typing.Any]: ...

class Mirostat:
    """
    What mirostat remembers of a text.
    """
    def __init__(self) -> None: ...
    @property
    def most_bits(self) -> float | None:
        """
        of surprise; None: nothing was drawn
        """
    @most_bits.setter
    def most_bits(self, arg0: float | None) -> None: ...

class Sampler:
    """
    From one row of logits to a token.
    """
    def __init__(self) -> None: ...
    def distribution(
        self,
        logits: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
        params: SamplingParams,
        prompt: typing.Any = (),
        output: typing.Any = (),
        index: int = 0,
        mirostat: Mirostat | None = None,
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        float32 [vocab]: the probabilities that sample() draws from.
        """
    def sample(
        self,
        logits: typing.Annotated[numpy.typing.ArrayLike, numpy.float32],
        params: SamplingParams,
        prompt: typing.Any = (),
        output: typing.Any = (),
        index: int = 0,
        mirostat: Mirostat | None = None,
    ) -> SampledToken: ...

class Draft:
    """
    Tokens guessed to follow a text: a chain, or a tree in which node i follows
    node parents[i] (an earlier one; -1: the text's last token). scores: believed
    probability of each token after its parent, in [0, 1].
    """
    def __init__(
        self, tokens: typing.Any = (), parents: typing.Any = None, scores: typing.Any = None
    ) -> None: ...
    def __len__(self) -> int: ...
    def add(self, token: int, parent: int = -1, score: float = 0.5) -> int:
        """
        Adds a node; returns its number.
        """
    def candidates_of(self, row: int) -> dict[int, float]:
        """
        The same; {}: they were chosen.
        """
    def child(self, parent: int, token: int) -> int:
        """
        The child of a node with that token, or -1.
        """
    def set_candidates(self, row: int, probabilities: collections.abc.Mapping[int, float]) -> None:
        """
        What the children of a row were drawn from, a probability for each token that could
        have been. Row 0 is the root's, row i + 1 that of node i.
        """
    @property
    def draw(self) -> str:
        """
        How children got their tokens: "none" (they were chosen), "with_replacement" or
        "without_replacement" (drawn, in their order).
        """
    @draw.setter
    def draw(self, arg1: str) -> None: ...
    @property
    def parents(self) -> list[int]: ...
    @property
    def scores(self) -> list[float]: ...
    @property
    def tokens(self) -> list[int]: ...

class Proposer:
    """
    A native proposer.
    """
    @property
    def name(self) -> str: ...

class Verifier:
    """
    A native verifier.
    """
    @property
    def guarantee(self) -> str: ...
    @property
    def name(self) -> str: ...

class DraftController:
    """
    A native controller.
    """
    @property
    def name(self) -> str: ...

class ReplayVerifier(Verifier):
    """
    Emits given texts, whatever the logits say: for measurements.
    """
    def __init__(self) -> None: ...
    def set(self, request: int, text: typing.Any) -> None:
        """
        The output of a request, as token ids.
        """

class TokenRows:
    """
    The rows of a request in a step, while verify() runs: row 0 is of its
    last token, row i + 1 of the draft's node i.
    """
    def distribution(self, row: int, vocab_size: int) -> numpy.typing.NDArray[numpy.float32]:
        """
        float32 [vocab_size] that sample() draws from.
        """
    def emit(self, row: int, token: int) -> bool:
        """
        The token that follows a row: row 0 first, then that of a node whose token was
        emitted last. False: the request has ended.
        """
    def sample(self, row: int) -> int:
        """
        The token that plain decoding would draw.
        """
    def uniform(self, draw: int) -> float:
        """
        In [0, 1), of the token that is emitted next; draw 0 is sample()'s.
        """
    @property
    def request(self) -> int: ...

class Speculation:
    """
    How an engine speculates: proposers whose drafts are merged, a verifier
    (None: match) and a controller (None: by cost), native or Python.
    """
    def __init__(
        self,
        proposers: collections.abc.Sequence[typing.Any],
        verifier: typing.Any = None,
        controller: typing.Any = None,
    ) -> None: ...

class Triggers:
    """
    Which triggers of a hook fired.
    """
    @property
    def every(self) -> int:
        """
        tokens; 0: it did not
        """
    @property
    def over_budget(self) -> int:
        """
        slots; 0: it did not
        """
    @property
    def page_filled(self) -> bool: ...
    @property
    def prompt_end(self) -> bool: ...

class StepEvent:
    """
    What a step did to one sequence.
    """
    @property
    def count(self) -> int:
        """
        how many there are
        """
    @property
    def fired(self) -> Triggers: ...
    @property
    def first(self) -> int:
        """
        the first of the step's slots
        """
    @property
    def request(self) -> int: ...

class SequenceState:
    """
    One sequence between two steps; good while a hook runs.
    """
    def evict(self, begin: int, end: int, group: int = 0) -> None:
        """
        Drops slots [begin, end), not all; later ones move up. Multiples of 64 of them cost least.
        """
    def first_head(self, group: int) -> int:
        """
        Of the heads of planes those before a group without a window; of num_whole_groups: all. Throws InvalidArgumentError for another group.
        """
    def keep_top(
        self,
        plane: str,
        count: int,
        first: int = 0,
        last: int = 0,
        pool: int = 1,
        pooling: str = "max",
        group: int = -1,
    ) -> None:
        """
        Keeps of each (layer without a window, KV head) the `count` slots that have most in a plane, of equal ones the earlier, among them the sequence's `first` and `last` ones; all where there are no more. pool, pooling: a slot counts as much as the greatest ("max") or the average ("avg") of so many around it. group: whose heads choose, of those without a window; -1: all of them do. Throws what plane() and retain() throw.
        """
    def keys(self, head: int, group: int = 0) -> numpy.typing.NDArray[numpy.float32]:
        """
        The keys of a head (layer of the group * num_kv_heads + KV head), rotated as they lie in the cache: float32 [slots, head_dim]. Throws InvalidArgumentError for a head that there is not; so does values().
        """
    def merge(
        self,
        head: int,
        into: int,
        slots: collections.abc.Sequence[int],
        weights: collections.abc.Sequence[float],
        group: int = 0,
    ) -> None:
        """
        Makes key and value of slot `into` of a head (layer of the group * num_kv_heads + KV head) the sums of those of `slots`, times `weights`; drops none. slots: strictly increasing; weights: one for each, finite.
        """
    def merge_slots(
        self, into: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], weights: str
    ) -> None:
        """
        Of each (layer without a window, KV head) slot i goes into slot into[head][i], an array of int32 [heads, slots]; those that go into themselves stay, as many in each head. Keys and values become means of what goes into a slot, by how often it counts: e to the power of plane `weights`, whose numbers become those of the sums. Throws InvalidArgumentError for another array, and what plane(), merge() and retain() throw.
        """
    def plane(self, name: str) -> numpy.typing.NDArray[numpy.float32]:
        """
        A copy of the numbers of its slots that have this name, float32 [layers without a window * num_kv_heads, slots]: those of a technique that sums what keys get of attention (a graph's attention_mass). Of several groups of such layers there are as many slots as the longest has; behind those of a shorter one are zeros. Throws InvalidArgumentError for a name that it lacks.
        """
    def reorder(
        self, slots: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], group: int = 0
    ) -> None:
        """
        Slot i of each (layer of the group, KV head) becomes what slot slots[head][i] was: int32 [heads, slots], each row all slots once. Throws as retain().
        """
    def reposition(self, from_slots: collections.abc.Sequence[int], delta: int) -> None:
        """
        Rotates the keys from a slot on (one for each group, or one for all) by `delta` positions, and moves the next position by as many. Each rotation rounds to the type of the cache.
        """
    def retain(
        self, slots: collections.abc.Sequence[collections.abc.Sequence[int]], group: int = 0
    ) -> None:
        """
        Keeps these slots of a group of layers without a window: one list for all heads, or one for each (layer of the group, KV head), strictly increasing, all of one length of at least 1. Throws InvalidArgumentError, and OutOfMemoryError where there is no page for a copy of a shared one, with nothing changed; so do evict(), merge() and reposition().
        """
    def set_plane(
        self, name: str, values: typing.Annotated[numpy.typing.ArrayLike, numpy.float32]
    ) -> None:
        """
        Sets the numbers of its slots that have this name, an array as plane() gives. New slots have 0. Throws InvalidArgumentError for another shape, and what plane() throws.
        """
    def slots(self, group: int) -> int:
        """
        Of a group. Throws InvalidArgumentError for one that is not there.
        """
    def tokens(self, count: int) -> list[int]:
        """
        The last `count` tokens of the prompt and the output that were computed, all where there are no more; those whose slots were dropped are among them.
        """
    def values(self, head: int, group: int = 0) -> numpy.typing.NDArray[numpy.float32]:
        """
        The values of a head: float32 [slots, head_dim].
        """
    @property
    def id(self) -> int: ...
    @property
    def length(self) -> int:
        """
        Slots whose keys and values are written.
        """
    @property
    def next_position(self) -> int:
        """
        Of the token that is computed next.
        """
    @property
    def num_groups(self) -> int:
        """
        Of layers that keep the same tokens.
        """
    @property
    def num_heads(self) -> int:
        """
        Of the groups without a window: their layers times num_kv_heads.
        """
    @property
    def num_whole_groups(self) -> int:
        """
        Of these the first ones, which are without a window: one, but where a technique's facts ask for more ("layer_groups").
        """
    @property
    def output_tokens(self) -> int:
        """
        Generated, the last of which has no slot yet.
        """
    @property
    def prompt_tokens(self) -> int: ...

class StepHook:
    """
    A hook of the core, which runs without Python.
    """
    @property
    def technique(self) -> str: ...

class StepOutput:
    """
    What one or more steps did for one request.
    """
    @property
    def error(self) -> str: ...
    @property
    def finish_reason(self) -> typing.Any:
        """
        None, or "stop", "length", "cancelled", "error"
        """
    @property
    def prompt(self) -> list[SampledToken]:
        """
        list[SampledToken]: of the prompt's tokens from the second on, each once
        """
    @property
    def request(self) -> int: ...
    @property
    def stop_token(self) -> bool:
        """
        whether the last token ends the text without being part of it
        """
    @property
    def token_ids(self) -> list[typing.Any]:
        """
        New tokens in order; a token that stopped the request is the last one.
        """
    @property
    def tokens(self) -> list[SampledToken]:
        """
        list[SampledToken]: with log-probabilities
        """
    @property
    def warning(self) -> str:
        """
        why drafts were refused, the first time
        """

class Engine:
    """
    Continuous batching of requests over one model: a graph and its weights.
    """
    def __init__(
        self,
        graph: Graph,
        weights: WeightSource,
        pool: ThreadPool | None = None,
        *,
        precision: str = "fast",
        deterministic: bool = False,
        kv_dtype: str | None = None,
        max_seq_len: int | None = None,
        max_sequences: int = 64,
        disabled_passes: collections.abc.Set[str] = set(),
        pack_cache: typing.Any = None,
        tuning_cache: typing.Any = None,
        ternary_packing: str = "auto",
        device: str = "cpu",
        front: FrontLayers | None = None,
        num_pages: int | None = None,
        max_batch_tokens: int = 512,
        prefix_cache: bool = True,
        kv_coding: tuple[int, int] = (0, 128),
        speculation: Speculation | None = None,
        hooks: collections.abc.Sequence[typing.Any] = (),
    ) -> None: ...
    def add(self, prompt: typing.Any, params: SamplingParams, constraint: typing.Any = None) -> int:
        """
        Queues a request; returns its id. `constraint` says which tokens may come next, between
        steps: fill(mask) sets bit t % 32 of word t / 32 of a uint32 array for each, accept(token)
        returns whether it may come and goes on, rollback(count) takes tokens back, ended() is
        whether nothing may follow.
        """
    def add_answers(
        self,
        prompt: typing.Any,
        params: collections.abc.Sequence[SamplingParams],
        constraints: collections.abc.Sequence[typing.Any] = [],
    ) -> list[int]:
        """
        Queues several answers to one prompt, which share its pages; returns their ids.
        `constraints`: none, or one (or None) an answer.
        """
    def cancel(self, request: int) -> None:
        """
        Ends a request at the next step.
        """
    def explain(self) -> str: ...
    def forget(self, request: int) -> None:
        """
        Drops a finished request's metrics.
        """
    def has_work(self) -> bool: ...
    def log_likelihoods(
        self, tokens: typing.Any, phase: str = "prefill"
    ) -> numpy.typing.NDArray[numpy.float64]:
        """
        float64 [len(tokens) - 1]: log p of each token but the first, in bounded memory.
        """
    def logits(
        self, tokens: typing.Any, phase: str = "prefill"
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        float32 [len(tokens), vocab] of a whole sequence, for evaluation.
        """
    def metrics(self, request: int) -> dict[str, typing.Any]: ...
    def start_profile(self, max_steps: int) -> None:
        """
        Records the next `max_steps` steps.
        """
    def stats(self) -> dict[str, typing.Any]: ...
    def step(self) -> list[StepOutput]:
        """
        Runs one step: list[StepOutput].
        """
    def step_many(self, max_steps: int = 1048576, max_seconds: float = 0.05) -> list[StepOutput]:
        """
        Runs steps until a request ends or has its first token, or a limit is reached:
        list[StepOutput], one entry a request.
        """
    def take_draft_profiles(self) -> dict[str, Profile]:
        """
        The same of what drafts on a device of its own, by name.
        """
    def take_front_profile(self) -> Profile | None:
        """
        The same of the first layers, where they are on a device of their own.
        """
    def take_profile(self) -> Profile:
        """
        Ends recording: the Profile of what ran since start_profile().
        """
    @property
    def arena_bytes(self) -> int: ...
    @property
    def cores(self) -> list[int]:
        """
        Those on which its threads may run.
        """
    @property
    def graph_text(self) -> str: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_cache(self) -> KvCache: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def pack_cache(self) -> PackCacheReport: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def placement(self) -> str:
        """
        Which layers are on which of two devices, and why; else "".
        """
    @property
    def threads(self) -> int: ...
    @property
    def tuning_trouble(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...

class PackedMatrix:
    """
    A weight matrix in the layout of the kernels.
    """
    def __init__(
        self,
        data: numpy.typing.NDArray[typing.Any],
        dtype: str,
        shape: tuple[int, int],
        pool: ThreadPool | None = None,
        ternary: str | None = None,
    ) -> None:
        """
        Packs the bytes of a [rows, cols] tensor of a weight dtype ("f32", "q4_0", ...); ternary ones as "t2" or "t1_6" for int8_token.
        """
    def to(self, device: str) -> PackedMatrix:
        """
        A copy in the memory of a GPU.
        """
    def unpack(self) -> numpy.typing.NDArray[numpy.float32]:
        """
        The values of the tensor, float32 [rows, cols], bit for bit.
        """
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...

class PagedKv:
    """
    Keys and values of one layer in pages of 64 tokens, in the order of the attention kernels; dtype f32, f16, bf16 or i8.
    """

    page_size: typing.ClassVar[int] = 64
    def __init__(
        self, num_pages: int, num_kv_heads: int, head_dim: int, dtype: str = "bf16"
    ) -> None: ...
    def to_numpy(self) -> tuple[typing.Any, ...]:
        """
        (k, v), float32 [num_pages, num_kv_heads, 64, head_dim].
        """
    @property
    def dtype(self) -> str: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def num_pages(self) -> int: ...

class Visits:
    """
    Lists of the keys that blocks of rows visit, of one batch; empty at first.
    """
    def __init__(
        self,
        qo_indptr: numpy.typing.NDArray[typing.Any],
        kv_len: numpy.typing.NDArray[typing.Any],
        num_qo_heads: int,
        num_kv_heads: int,
        *,
        generated: bool = False,
        weighted: bool = False,
    ) -> None: ...
    @property
    def blocks(self) -> numpy.typing.NDArray[typing.Any]:
        """
        int32 [B, 4]: sequence, first row, rows, position of the first.
        """
    @property
    def log_weights(self) -> typing.Any:
        """
        float32 [B, num_kv_heads, 64 W], writable: what is added to a token's logits; None where each counts once.
        """
    @property
    def words(self) -> numpy.typing.NDArray[typing.Any]:
        """
        uint64 [B, num_kv_heads, W], writable: a bit for each token.
        """

class FixedPlans:
    """
    A GPU's memory for plans that take each other's place.
    """
    def __init__(self, most_listed: int, most_mask_bytes: int) -> None: ...

class AttentionPlan:
    """
    Which rows of a batch visit which keys: made once for any number of run() with tensors of those shapes.
    """
    def __init__(
        self,
        qo_indptr: numpy.typing.NDArray[typing.Any],
        kv_indptr: numpy.typing.NDArray[typing.Any],
        kv_indices: typing.Any,
        kv_len: numpy.typing.NDArray[typing.Any],
        *,
        page_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool = False,
        window_left: int = -1,
        sink_tokens: int = 0,
        decode: bool = False,
        mask: typing.Any = None,
        mask_indptr: typing.Any = None,
        lists: typing.Any = None,
        blocks: typing.Any = None,
        span_masks: typing.Any = None,
        mask_row_stride: int = 0,
    ) -> None: ...
    def kernel(self, q_dtype: str, kv_dtype: str) -> str:
        """
        The kernel variant that run() takes.
        """
    def put(self, memory: FixedPlans, queue: Queue) -> None:
        """
        Into memory whose addresses stay, behind all that the queue has.
        """
    def run(
        self,
        q: numpy.typing.NDArray[typing.Any] | DeviceArray,
        k: typing.Any,
        v: typing.Any,
        out: numpy.typing.NDArray[typing.Any] | DeviceArray,
        lse: typing.Any = None,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        lse_base: str = "log2",
        alibi_slopes: typing.Any = None,
        k_scale: typing.Any = 1.0,
        v_scale: typing.Any = 1.0,
        q_rope: typing.Any = None,
        k_rope: typing.Any = None,
        sink_logits: typing.Any = None,
        layout: str = "NHD",
        pool: ThreadPool | Queue | None = None,
    ) -> None: ...
    @property
    def num_products(self) -> int:
        """
        Products of a query head's row with a key, masked ones included.
        """
    @property
    def num_rows(self) -> int: ...

def a_shape_lists(
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    num_kv_heads: int,
    block_size: int,
    causal: bool,
    sink_tokens: int,
    local_tokens: int,
    pool: ThreadPool | None = None,
) -> tuple[typing.Any, ...]: ...
def add(
    a: numpy.typing.NDArray[typing.Any] | DeviceArray,
    b: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def ancestor_mask(
    parents: numpy.typing.NDArray[typing.Any],
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
) -> tuple[typing.Any, ...]:
    """
    (packed bits, bytes where each sequence starts) of trees of drafts.
    """

def append_paged_kv_cache(
    append_key: numpy.typing.NDArray[typing.Any] | DeviceArray,
    append_value: numpy.typing.NDArray[typing.Any] | DeviceArray,
    batch_indices: numpy.typing.NDArray[typing.Any] | DeviceArray,
    positions: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k_cache: numpy.typing.NDArray[typing.Any] | DeviceArray,
    v_cache: numpy.typing.NDArray[typing.Any] | DeviceArray,
    kv_indices: numpy.typing.NDArray[typing.Any] | DeviceArray,
    kv_indptr: numpy.typing.NDArray[typing.Any] | DeviceArray,
    kv_last_page_len: numpy.typing.NDArray[typing.Any] | DeviceArray,
    kv_layout: str = "NHD",
    mla: bool = False,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def apply_rope(
    q: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k: numpy.typing.NDArray[typing.Any] | DeviceArray,
    cos_sin_cache: numpy.typing.NDArray[typing.Any] | DeviceArray,
    positions: typing.Any,
    interleaved: bool,
    q_out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k_out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def apply_rope_pos_ids(
    q: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k: numpy.typing.NDArray[typing.Any] | DeviceArray,
    inv_freq: numpy.typing.NDArray[typing.Any],
    factor: float,
    positions: numpy.typing.NDArray[typing.Any] | DeviceArray,
    interleaved: bool,
    q_out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k_out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def apply_token_bitmask(
    logits: numpy.typing.NDArray[typing.Any] | DeviceArray,
    bitmask: numpy.typing.NDArray[typing.Any] | DeviceArray,
    indices: typing.Any = None,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def attention_scores(
    q: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k: typing.Any,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: typing.Any,
    kv_len: numpy.typing.NDArray[typing.Any],
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    diagonals: typing.Any = None,
    *,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool = True,
    window_left: int = -1,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
    k_scale: typing.Any = 1.0,
    reduce: str = "sum",
    positions: typing.Any = None,
    lse: typing.Any = None,
    lse_base: str = "log2",
    kv_layout: str = "NHD",
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def available_devices() -> list[str]: ...
def available_isas() -> list[str]: ...
def batch_indices_positions(
    append_indptr: numpy.typing.NDArray[typing.Any] | DeviceArray,
    seq_lens: numpy.typing.NDArray[typing.Any] | DeviceArray,
    batch_indices: numpy.typing.NDArray[typing.Any] | DeviceArray,
    positions: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def block_mask(
    indptr: numpy.typing.NDArray[typing.Any],
    indices: numpy.typing.NDArray[typing.Any],
    M: int,
    N: int,
    R: int,
    C: int,
    packed: numpy.typing.NDArray[typing.Any],
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    The bits of a packed mask by block, row and column.
    """

def block_score_lists(
    q: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k: numpy.typing.NDArray[typing.Any] | DeviceArray,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: typing.Any,
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool,
    sm_scale: float,
    kv_layout: str,
    block_size: int,
    sink_tokens: int,
    local_tokens: int,
    method: str,
    stride: int,
    num_blocks: int = 0,
    mass: float = 0.0,
    pool: ThreadPool | Queue | None = None,
) -> tuple[typing.Any, ...]: ...
def block_sparse_lists(
    indptr: numpy.typing.NDArray[typing.Any],
    indices: numpy.typing.NDArray[typing.Any],
    M: int,
    N: int,
    R: int,
    C: int,
    num_kv_heads: int,
    masked: bool = False,
) -> tuple[typing.Any, ...]:
    """
    (list_indptr, spans, lists, span_masks) of AttentionPlan.
    """

def block_visits(
    visits: Visits,
    q: numpy.typing.NDArray[typing.Any],
    kv: PagedKv,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    sm_scale: float | None = None,
    stride: int = 0,
    queries: str = "mean",
    pages: int = 0,
    mass: float = 0.0,
    keys: int = 0,
    share: float = 0.0,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    arithmetic: str = "f32",
    pool: ThreadPool | None = None,
) -> None: ...
def calibrate(pool: ThreadPool, folder: typing.Any) -> None:
    """
    Measures all of it anew, uses it and keeps it in the folder (None: nowhere).
    """

def can_quantize_to(dtype: str) -> bool: ...
def chain_speculative_sampling(
    draft_probs: numpy.typing.NDArray[typing.Any] | DeviceArray,
    draft_token_ids: numpy.typing.NDArray[typing.Any] | DeviceArray,
    target_probs: numpy.typing.NDArray[typing.Any] | DeviceArray,
    seed: numpy.typing.NDArray[typing.Any] | DeviceArray,
    offset: numpy.typing.NDArray[typing.Any] | DeviceArray,
    tokens: numpy.typing.NDArray[typing.Any] | DeviceArray,
    accepted: numpy.typing.NDArray[typing.Any] | DeviceArray,
    emitted: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def check_device(text: str, argument: str) -> None:
    """
    Raises InvalidArgumentError, about `argument`, for a device that this build lacks.
    """

def column_lists(
    op: str,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    num_kv_heads: int,
    block_size: int,
    causal: bool,
    sink_tokens: int,
    local_tokens: int,
    columns: numpy.typing.NDArray[typing.Any],
    num_columns: int = 0,
    column_mass: float = 0.0,
    slashes: typing.Any = None,
    num_slashes: int = 0,
    pool: ThreadPool | None = None,
) -> tuple[typing.Any, ...]: ...
def column_visits(
    visits: Visits,
    q: numpy.typing.NDArray[typing.Any],
    kv: PagedKv,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    sm_scale: float | None = None,
    last_rows: int = 64,
    row_stride: int = 0,
    columns: int = 0,
    column_mass: float = 0.0,
    slashes: int = 0,
    slash_mass: float = 0.0,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    arithmetic: str = "f32",
    pool: ThreadPool | None = None,
) -> None: ...
def compile(
    graph: Graph, weights: WeightSource, pool: ThreadPool, options: CompileOptions = ...
) -> Executable:
    """
    Runs the passes, packs the weights, plans the memory, selects the kernels.
    """

def compile_beside(
    first: Executable, graph: Graph, weights: WeightSource | None = None
) -> Executable:
    """
    Another graph over the weights that an executable has packed, on its pool and with its
    options; weights: None is the first's source.
    """

def convert_rows(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    factor: float = 1.0,
    op: str = "convert_rows",
    argument: str = "x",
    divisor: typing.Any = None,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def cost_controller(most_nodes: int = 24) -> DraftController: ...
def cpu_model() -> str: ...
def cpu_status() -> str:
    """
    Whether this build lacks kernels for some CPUs.
    """

def cuda_status() -> str:
    """
    Whether this build has CUDA kernels, and if not, why.
    """

def current_isa() -> str: ...
def cut_graph(graph: Graph, front_layers: int) -> tuple[Graph, Graph]:
    """
    A graph in two behind its first layers: (front, back). The front returns no logits but what
    are float inputs of the back.
    """

def default_threads() -> tuple[int, str]: ...
def dequantize(
    dtype: str, blocks: numpy.typing.NDArray[typing.Any], shape: collections.abc.Sequence[int]
) -> numpy.typing.NDArray[numpy.float32]:
    """
    Decodes the bytes of a tensor of `shape` (elements) to float32, bit-equal to the gguf package.
    """

def describe_bf16() -> str:
    """
    Which products of bfloat16 are chosen at the current level, and why not more.
    """

def describe_tuning() -> str:
    """
    How far ahead weights are asked for, in bytes into L2/L1, from how many rows ternary weights are unpacked, and why.
    """

def draft_model_proposer(
    graph: Graph,
    weights: WeightSource,
    *,
    of_target: bool = False,
    length: int = 7,
    width: int = 1,
    num_pages: int = 0,
    adaptive: bool = True,
    label: str = "draft_model",
    device: str = "",
    hidden: str = "",
    deeper: collections.abc.Sequence[Graph] = [],
) -> Proposer: ...
def embedding(
    ids: numpy.typing.NDArray[typing.Any],
    table: numpy.typing.NDArray[typing.Any],
    dtype: str,
    rows: int,
    cols: int,
    scale: float = 1.0,
    pool: ThreadPool | None = None,
) -> numpy.typing.NDArray[numpy.float32]: ...
def filter_rows(
    op: str,
    kind: str,
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out_kind: str,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    *,
    temperature: typing.Any = None,
    top_k: typing.Any = None,
    top_p: typing.Any = None,
    min_p: typing.Any = None,
    joint: bool = False,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def find_pack_cache(
    graph: Graph, weights: WeightSource, folder: typing.Any, pool: ThreadPool
) -> PackCacheReport:
    """
    What compile() with this folder would find.
    """

def fixed_controller(count: int) -> DraftController: ...
def from_dlpack(producer: typing.Any, argument: str, stream: int = 0) -> typing.Any:
    """
    An array over the memory of a DLPack producer: numpy's, or a DeviceArray whose contents are there for work in `stream`.
    """

def fused_add_rmsnorm(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    residual: numpy.typing.NDArray[typing.Any] | DeviceArray,
    weight: typing.Any,
    eps: float = 9.999999974752427e-07,
    weight_offset: float = 0.0,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def gelu(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def gelu_and_mul(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def gelu_tanh(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def gelu_tanh_and_mul(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def has_avx512_bf16() -> bool: ...
def has_fast_bf16() -> bool: ...
def hash_visits(
    visits: Visits,
    q: numpy.typing.NDArray[typing.Any],
    kv: PagedKv,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    bits: int = 8,
    tables: int = 40,
    seed: int = 0,
    means: typing.Any = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    pool: ThreadPool | None = None,
) -> None: ...
def isa_reason() -> str: ...
def keep_recent(
    *,
    sinks: int = 4,
    recent: int = 1020,
    stride: int = 64,
    reposition: bool = True,
    technique: str = "",
) -> StepHook:
    """
    A hook that keeps the first `sinks` slots and the last `recent` ones, and drops the others `stride` at a time (StreamingLLM, arXiv:2309.17453). reposition: whether keys move to the positions that their slots have, so that the text may be of any length. technique: that requests name to have it; empty: it is for all. Throws InvalidArgumentError for sinks below 0, stride below 1 and recent below stride.
    """

def keep_top(
    *,
    plane: str,
    count: int,
    first: int = 0,
    last: int = 0,
    pool: int = 1,
    pooling: str = "max",
    stride: int = 0,
    technique: str = "",
) -> StepHook:
    """
    A hook that keeps the slots that have most in a plane, as SequenceState.keep_top() does: at the prompt's end, or with a stride whenever there are more than `count`, so many at a time. technique: that requests name to have it; empty: it is for all. Throws InvalidArgumentError for count below first + last + stride, and other wrong values.
    """

def key_visits(
    visits: Visits,
    q: numpy.typing.NDArray[typing.Any],
    kv: PagedKv,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    sm_scale: float | None = None,
    channels: typing.Any = None,
    keys: int = 0,
    share: float = 0.0,
    vote: str = "highest",
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    window_left: int = -1,
    pool: ThreadPool | None = None,
) -> None: ...
def kv_append(
    kv: PagedKv,
    k: numpy.typing.NDArray[typing.Any],
    v: numpy.typing.NDArray[typing.Any],
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    pool: ThreadPool | None = None,
) -> None: ...
def layernorm(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    gemma: numpy.typing.NDArray[typing.Any] | DeviceArray,
    beta: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    eps: float = 9.999999974752427e-07,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def layers_of(graph: Graph) -> list[int]:
    """
    The numbers of a graph's layers, in the order in which they run.
    """

def lookahead_proposer(width: int = 4, length: int = 3) -> Proposer: ...
def match_verifier() -> Verifier: ...
def matmul(
    x: numpy.typing.NDArray[typing.Any],
    weight: PackedMatrix,
    arithmetic: str = "int8",
    pool: ThreadPool | None = None,
    bias: numpy.typing.NDArray[typing.Any] | None = None,
    residual: numpy.typing.NDArray[typing.Any] | None = None,
    method: str = "auto",
) -> numpy.typing.NDArray[numpy.float32]:
    """
    x [n, cols] times the transposed weight, plus bias [rows] and residual [n, rows].
    """

def matmul_kernel(arithmetic: str) -> str:
    """
    The kernel that multiplies quantised weights at the current ISA level.
    """

def matmul_there(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    weight: PackedMatrix,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    queue: Queue,
    arithmetic: str,
    bias: typing.Any = None,
    residual: typing.Any = None,
) -> None:
    """
    matmul of arrays of a GPU.
    """

def measure_peak_ops(pool: ThreadPool, arithmetic: str, isa: str) -> float:
    """
    Operations a second that the pool's threads do together in "int8", "bf16" or "f32";
    0 where that is not known.
    """

def measure_read_bandwidth(pool: ThreadPool) -> float:
    """
    Bytes a second that the pool's threads read from memory together.
    """

def memory_features() -> tuple[str, int]:
    """
    (transparent huge pages: "always", "madvise", "never" or "unavailable"; NUMA nodes)
    """

def merge_state(
    v_a: numpy.typing.NDArray[typing.Any] | DeviceArray,
    s_a: numpy.typing.NDArray[typing.Any] | DeviceArray,
    v_b: numpy.typing.NDArray[typing.Any] | DeviceArray,
    s_b: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out_v: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out_s: numpy.typing.NDArray[typing.Any] | DeviceArray,
    mask: typing.Any = None,
    lse_base: str = "log2",
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def merge_states(
    v: numpy.typing.NDArray[typing.Any] | DeviceArray,
    s: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out_v: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out_s: numpy.typing.NDArray[typing.Any] | DeviceArray,
    lse_base: str = "log2",
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def mul(
    a: numpy.typing.NDArray[typing.Any] | DeviceArray,
    b: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def numpy_dtype(name: str) -> numpy.dtype[typing.Any]:
    """
    The numpy type that carries elements of a dtype: tagged integers of bf16.
    """

def op_names() -> list[str]:
    """
    The operators that a node may have.
    """

def packbits(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    indptr: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out_indptr: numpy.typing.NDArray[typing.Any] | DeviceArray,
    bitorder: str,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def packed_indptr(
    indptr: numpy.typing.NDArray[typing.Any], size: int
) -> numpy.typing.NDArray[numpy.int64]:
    """
    Where segments of `size` booleans start as whole bytes of bits: int64.
    """

def page_bounds(
    k: numpy.typing.NDArray[typing.Any] | DeviceArray,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: typing.Any,
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    kv_layout: str,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def page_lengths(
    kv_indptr: numpy.typing.NDArray[typing.Any] | DeviceArray,
    kv_last_page_len: numpy.typing.NDArray[typing.Any] | DeviceArray,
    page_size: int,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def page_lists(
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    num_kv_heads: int,
    causal: bool,
    sink_tokens: int,
    local_tokens: int,
    scores: numpy.typing.NDArray[typing.Any],
    page_size: int,
    num_pages: int,
    pool: ThreadPool | None = None,
) -> tuple[typing.Any, ...]: ...
def page_scores(
    q: numpy.typing.NDArray[typing.Any] | DeviceArray,
    bounds: numpy.typing.NDArray[typing.Any] | DeviceArray,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: typing.Any,
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def page_visits(
    visits: Visits,
    q: numpy.typing.NDArray[typing.Any],
    kv: PagedKv,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    sm_scale: float | None = None,
    unit: int = 64,
    means: bool = False,
    keys: int = 0,
    share: float = 0.0,
    vote: str = "highest",
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    window_left: int = -1,
    pool: ThreadPool | None = None,
) -> None: ...
def paged_attention(
    q: numpy.typing.NDArray[typing.Any],
    kv: PagedKv,
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    sink_tokens: int = 0,
    logits_soft_cap: float = 0.0,
    parents: typing.Any = None,
    arithmetic: str = "f32",
    visits: Visits | None = None,
    alibi_slopes: typing.Any = None,
    sink_logits: typing.Any = None,
    chunk: int = 0,
    q_before: typing.Any = None,
    q_far: typing.Any = None,
    return_lse: bool = False,
    lse_base: str = "log2",
    pool: ThreadPool | None = None,
) -> typing.Any: ...
def parse_placement(text: str, argument: str) -> tuple[str, list[int]]:
    """
    (device, cores) of "cpu:0-3" and the like; cores are [] where all may be used. Raises
    InvalidArgumentError, about `argument`.
    """

def pass_names() -> list[str]:
    """
    The passes, in order.
    """

def place_apart(devices: collections.abc.Sequence[str]) -> list[str]:
    """
    Devices that are to work at the same time: one "cpu" becomes the cores that the others
    leave. Raises InvalidArgumentError for cores that two of them name.
    """

def place_chosen(
    op: str,
    ids: numpy.typing.NDArray[typing.Any] | DeviceArray,
    width: int,
    lengths: typing.Any,
    starts: typing.Any,
    mirrored: bool,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    raw: typing.Any = None,
    *,
    offsets: typing.Any = None,
    table: typing.Any = None,
    row_to_batch: typing.Any = None,
    first: typing.Any = None,
    page_size: int = 1,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def pool_scores(
    scores: numpy.typing.NDArray[typing.Any] | DeviceArray,
    kv_len: numpy.typing.NDArray[typing.Any],
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    *,
    pooling: str = "none",
    kernel_size: int = 1,
    block_reduce: str = "sum",
    block_size: int = 1,
    group: int = 1,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def prompt_lookup_proposer(longest: int = 3, shortest: int = 2, length: int = 8) -> Proposer: ...
def quantize(
    dtype: str,
    values: numpy.typing.NDArray[typing.Any],
    source_dtype: str = "f32",
    shape: collections.abc.Sequence[int] | None = None,
    pool: ThreadPool | None = None,
) -> tuple[typing.Any, ...]:
    """
    The bytes of `values` as a tensor of `dtype`, and the relative error. `shape` (elements): of a source_dtype that is no numpy type.
    """

def quantize_activation(x: numpy.typing.NDArray[typing.Any]) -> tuple[typing.Any, ...]:
    """
    Rounds float32 rows to the int8 operand of matmul: (q [n, K], scales [n, ceil(K / 16)]).
    """

def quantize_tokens(x: numpy.typing.NDArray[typing.Any]) -> tuple[typing.Any, ...]:
    """
    Rounds float32 rows to the int8_token operand of matmul: (q [n, K], scales [n]).
    """

def quantize_weight(
    source: WeightSource, name: typing.Any, dtype: str, pool: ThreadPool | None = None
) -> tuple[typing.Any, ...]:
    """
    A weight's bytes as a tensor of `dtype`, and the relative error.
    """

def recall_tuning(folder: typing.Any) -> None:
    """
    Uses what was measured before and kept in the folder, if anything was.
    """

def recycling_proposer(width: int = 8, pairs: int = 0, memory: float = 0.0) -> Proposer: ...
def rejection_verifier() -> Verifier: ...
def relu_squared(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def rmsnorm(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    weight: typing.Any,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    eps: float = 9.999999974752427e-07,
    weight_offset: float = 0.0,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def rope_append(
    kv: PagedKv,
    q: numpy.typing.NDArray[typing.Any],
    k: numpy.typing.NDArray[typing.Any],
    v: numpy.typing.NDArray[typing.Any],
    table: numpy.typing.NDArray[typing.Any],
    qo_indptr: numpy.typing.NDArray[typing.Any],
    kv_indptr: numpy.typing.NDArray[typing.Any],
    kv_indices: numpy.typing.NDArray[typing.Any],
    kv_len: numpy.typing.NDArray[typing.Any],
    *,
    q_norm: typing.Any = None,
    k_norm: typing.Any = None,
    eps: float = 9.999999974752427e-07,
    interleaved: bool = False,
    pool: ThreadPool | None = None,
) -> numpy.typing.NDArray[numpy.float32]: ...
def rope_frequencies(
    dims: int,
    *,
    theta: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_max_position: float = 0.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float = 0.0,
    divisors: typing.Any = None,
) -> tuple[typing.Any, ...]: ...
def rope_positions(
    indptr: numpy.typing.NDArray[typing.Any] | DeviceArray,
    offsets: numpy.typing.NDArray[typing.Any] | DeviceArray,
    rows: int,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def rope_table(
    positions: numpy.typing.NDArray[typing.Any] | DeviceArray,
    inv_freq: numpy.typing.NDArray[typing.Any],
    factor: float = 1.0,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def run_pass(name: str, graph: Graph, options: CompileOptions = ...) -> Graph:
    """
    One pass alone.
    """

def sample_rows(
    op: str,
    kind: str,
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    seed: numpy.typing.NDArray[typing.Any] | DeviceArray,
    offset: numpy.typing.NDArray[typing.Any] | DeviceArray,
    samples: numpy.typing.NDArray[typing.Any] | DeviceArray,
    valid: typing.Any = None,
    *,
    temperature: typing.Any = None,
    top_k: typing.Any = None,
    top_p: typing.Any = None,
    min_p: typing.Any = None,
    joint: bool = False,
    indices: typing.Any = None,
    check_values: bool = False,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def scale(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    factor: float,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def select_rows(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    rows: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def set_isa(level: str) -> None:
    """
    Caps the instruction-set level of kernels selected from now on.
    """

def set_log_callback(callback: typing.Any, least: str) -> None:
    """
    Calls callback(level, text) with what the core tells, in whichever thread it does; None silences it. Levels: debug, info, warning.
    """

def sigmoid(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def silu(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def silu_and_mul(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def softcap(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    cap: float,
    pool: ThreadPool | Queue | None = None,
    out: typing.Any = None,
) -> typing.Any: ...
def suffix_proposer(
    shared_tokens: int = 0, beside: bool = False, corpus: typing.Any = ()
) -> Proposer: ...
def take_rows(
    x: DeviceArray, rows: numpy.typing.NDArray[typing.Any], queue: Queue
) -> DeviceArray: ...
def top_k(
    input: numpy.typing.NDArray[typing.Any] | DeviceArray,
    k: int,
    sorted: bool,
    values: numpy.typing.NDArray[typing.Any] | DeviceArray,
    ids: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None = None,
) -> None: ...
def trace_json(profiles: collections.abc.Mapping[str, Profile]) -> str:
    """
    A trace of several profiles, by name, on one axis of time.
    """

def traversal_verifier() -> Verifier: ...
def trim_heap() -> None:
    """
    Gives freed memory of the C heap back to the system: after work that took much of it.
    """

def typical_verifier(epsilon: float = 0.09, delta: float = 0.3) -> Verifier: ...
def unmirror_chosen(
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    sorted: bool,
    ids: numpy.typing.NDArray[typing.Any] | DeviceArray,
    values: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None,
) -> None: ...
def variable_block_lists(
    block_mask_map: numpy.typing.NDArray[typing.Any],
    block_row_sz: numpy.typing.NDArray[typing.Any],
    block_col_sz: numpy.typing.NDArray[typing.Any],
) -> tuple[typing.Any, ...]:
    """
    ((list_indptr, spans, lists, span_masks), num_rows, num_columns).
    """

def version() -> str: ...
def window_rows(
    op: str,
    x: numpy.typing.NDArray[typing.Any] | DeviceArray,
    lengths: typing.Any,
    starts: typing.Any,
    mirrored: bool,
    out: numpy.typing.NDArray[typing.Any] | DeviceArray,
    pool: ThreadPool | Queue | None,
) -> None: ...
def write_gguf_with_metadata(
    source: GgufFile, key: typing.Any, value: typing.Any, path: typing.Any
) -> None:
    """
    Writes a copy of `source` with string metadata `key` added or replaced, complete or not at all.
    """
