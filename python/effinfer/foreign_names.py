"""What llama.cpp, transformers, vLLM and Ollama call the parameters of effinfer."""

from collections.abc import Collection, Iterable

from effinfer import _core

_SAMPLING = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens, which counts the answer alone",
    "max_completion_tokens": "max_tokens",
    "temp": "temperature",
    "do_sample": "temperature=0 for the likeliest token",
    "typical": "typical_p",
    "typ_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "reverse_prompt": "stop",
    "eos_token_id": "stop_token_ids",
    "num_return_sequences": "n",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "response_format": "json_schema",
    "sampling_params": "params",
    "generation_config": "params",
    "streamer": "stream()",
}
_LOADING = {
    "model_path": "model",
    "model_id": "model",
    "n_ctx": "max_seq_len",
    "ctx_size": "max_seq_len",
    "num_ctx": "max_seq_len",
    "max_model_len": "max_seq_len",
    "n_threads": "threads",
    "num_threads": "threads",
    "num_thread": "threads",
    "tensor_parallel_size": "threads",
    "n_batch": "max_batch_tokens",
    "batch_size": "max_batch_tokens",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_sequences",
    "enable_prefix_caching": "prefix_cache",
    "cache_type_k": "kv_dtype",
    "cache_type_v": "kv_dtype",
    "type_k": "kv_dtype",
    "type_v": "kv_dtype",
    "kv_cache_dtype": "kv_dtype",
    "n_gpu_layers": 'gpu_layers, with device="cpu+cuda"',
    "device_map": "device",
    "dtype": "precision",
    "torch_dtype": "precision",
    "chat_format": "chat_template",
    "speculative_config": "speculation",
    "seed": "SamplingParams(seed=...)",
}


def hint(name: str) -> str | None:
    """What to write in place of a sampling parameter; None for an unknown name."""
    meant = _SAMPLING.get(name.replace("-", "_").lower())
    return None if meant is None else f"did you mean {meant}?"


def loading_hint(name: str) -> str | None:
    """What to write in place of an option of a load."""
    meant = _LOADING.get(name.replace("-", "_").lower())
    return None if meant is None else f"did you mean {meant}?"


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Throws InvalidArgumentError for a sampling parameter that is not known, with what another
    library's name stands for."""
    for name in names:
        if name not in known:
            instead = hint(name) or f"expected one of {', '.join(known)}"
            raise _core.InvalidArgumentError(f"[sampling] {name}: no such parameter; {instead}")
