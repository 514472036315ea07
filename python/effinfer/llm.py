"""A model and everything around it: text in, text out."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer import techniques as methods
from effinfer.checkpoints.model_files import open_model
from effinfer.evaluation import Evaluation
from effinfer.files.cache_warnings import warn_of_caches
from effinfer.files.paths import pack_cache_dir, tuning_cache_dir
from effinfer.hub.progress import resolve_with_bar
from effinfer.load_log import log_load
from effinfer.outputs import RequestOutput
from effinfer.requests import arguments, parameters
from effinfer.requests.generation import Generation, TextStream
from effinfer.requests.grammar import GrammarCompiler
from effinfer.requests.loop import RequestLoop
from effinfer.sampling import SamplingParams
from effinfer.speculation import Proposer, Speculation
from effinfer.techniques import preparation
from effinfer.techniques.placing import place, place_apart
from effinfer.text.trust import chat_tokens

if TYPE_CHECKING:  # imported when text is asked for: they cost more than the rest
    from effinfer.text.chat import ChatTemplate
    from effinfer.text.messages import Message
    from effinfer.text.tokenizer import Tokenizer


class LLM(Evaluation):
    """A language model, ready to generate. Safe to use from several threads: their requests share
    steps."""

    _template: ChatTemplate | None = None
    _tokenizer: Tokenizer | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "cpu",
        gpu_layers: int | None = None,
        threads: int | None = None,
        precision: str = "fast",
        deterministic: bool = False,
        kv_dtype: str | None = None,
        max_seq_len: int | None = None,
        num_pages: int | None = None,
        max_batch_tokens: int | None = None,
        max_sequences: int = 64,
        prefix_cache: bool = True,
        disabled_passes: Sequence[str] = (),
        chat_template: str | None = None,
        pack_cache: bool | str | os.PathLike[str] = False,
        ternary_packing: str = "auto",
        head: str | None = None,
        techniques: preparation.Techniques | None = None,
        prefill: str | methods.SparsePrefill = "dense",
        speculation: str | Speculation | Proposer | None = None,
        draft_model: preparation.DraftSource | None = None,
        draft_device: str | None = None,
        layers: methods.LayerRewrite | None = None,
        **unknown: object,
    ) -> None:
        """Loads `model`: a GGUF file, artifact or Hugging Face folder, or what hub.resolve() finds.

        device: "cpu", its cores "cpu:0-3", "cuda", "cuda:1", or "auto": a GPU if any; "cpu+cuda":
        first layers here, others there. gpu_layers: those on the GPU; None: as many as it holds.
        threads: None is what `info()` says. precision: "fast" or "f32" (float32 throughout).
        deterministic: prefill in decoding's arithmetic, however prompts are cut. kv_dtype: "f32",
        "f16", "bf16" or "i8"; None is bf16, and f32 with precision="f32". max_seq_len: None is the
        model's context. num_pages: 64-token pages of the KV cache; None is enough for a long one
        and a few short ones. max_batch_tokens: of a step; None is 512, or what techniques want
        (2048). max_sequences: at once; more wait. chat_template: instead of the model's.
        pack_cache: map packed weights that the user's cache (True) or a folder keeps, or warn with
        PackCacheWarning. ternary_packing: "t2" (2 bits), "t1_6" (1.6 bits) or "auto", the faster
        one; same bits. head: the output matrix's dtype, such as "q6_k". techniques: of
        effinfer.techniques, or names; prefill: short for one sparse prefill. speculation: "auto", a
        name or proposer, a Speculation. draft_model: of the same vocabulary, or a DraftModel;
        draft_device: "cpu:1", say. layers: fewer. First loads measure memory (TuningCacheWarning).
        Throws File-, Format-, Unsupported-, InvalidArgument-, Conflict- and OutOfMemoryError.
        """
        started = time.perf_counter()
        arguments.refuse_unknown(LLM, unknown)
        arguments.check_choices(device, precision, kv_dtype, ternary_packing)
        arguments.check_sizes(threads, max_seq_len, num_pages, max_batch_tokens)
        self.techniques, drafts = preparation.parts(techniques, prefill, speculation)
        device, drafts, draft_model = place_apart(device, drafts, draft_model, draft_device)
        files = open_model(resolve_with_bar(model), head=head)
        self.files, setup = preparation.prepare(files, layers, self.techniques, drafts, draft_model)
        self._drafts = setup.speculation
        engine = _core.Engine(
            setup.graph,
            self.files.weights,
            **place(device, threads, gpu_layers, setup.graph),
            precision=precision,
            deterministic=deterministic,
            kv_dtype=kv_dtype,
            max_seq_len=max_seq_len,
            num_pages=num_pages,
            max_batch_tokens=max_batch_tokens or setup.batch_tokens(),
            max_sequences=max_sequences,
            prefix_cache=prefix_cache,
            disabled_passes=set(disabled_passes),
            pack_cache=pack_cache_dir() if pack_cache is True else pack_cache or None,
            tuning_cache=tuning_cache_dir(),
            ternary_packing=ternary_packing,
            speculation=None if self._drafts is None else self._drafts.build(),
            hooks=setup.hooks,
        )
        warn_of_caches(engine)
        self._loop = RequestLoop(engine)
        self.grammars = GrammarCompiler(engine.vocab_size, self.files.graph.metadata)
        self._template_source, self._text_lock = chat_template, threading.Lock()
        self.load_s = time.perf_counter() - started
        log_load(engine, self.files.path, self.load_s, threads)

    @property
    def tokenizer(self) -> Tokenizer:
        """Built on first use."""
        with self._text_lock:
            if self._tokenizer is None:
                self._tokenizer = self.files.tokenizer()
            return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Throws InvalidArgumentError when neither the caller nor the model has one."""
        tokenizer = self.tokenizer
        with self._text_lock:
            if self._template is None:
                self._template = self.files.chat_template(tokenizer, self._template_source)
            return self._template

    @functools.cached_property
    def default_params(self) -> SamplingParams:
        """What a call without `params` samples with: what the model's makers recommend, which a
        folder says in generation_config.json and a GGUF file in general.sampling.*, and the
        defaults of SamplingParams for the rest. Throws FormatError for values that cannot be."""
        return self.files.recommended_params()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings one, as models do that were trained to chat."""
        return self.files.has_chat_template

    def generate(
        self,
        prompts: arguments.Prompt | Sequence[arguments.Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Completes one prompt or several (texts or token ids), all in one batch; one output a
        prompt, in order. `params` is for all, or one a prompt; None is `default_params`. Keywords
        are fields of SamplingParams that replace theirs: `generate("hi", temperature=0.5)`.

        Throws InvalidArgumentError, before anything runs, for a prompt that is empty or leaves no
        room in the context, and for wrong parameters. A request that fails later ends with
        finish_reason "error" and does not touch the others. Ctrl-C cancels the whole call.
        """
        complete = parameters.complete_all(params, keywords, lambda: self.default_params)
        requests = arguments.pair_params(arguments.as_prompts(prompts), complete)
        encoded = self.techniques.requests(arguments.encode_prompts(self.tokenizer, requests))
        generation = Generation(self._loop, self.tokenizer, encoded, self.grammars)
        try:
            for _ in generation.run():
                pass
        finally:
            generation.close()
        return generation.outputs()

    def stream(
        self, prompt: arguments.Prompt, params: SamplingParams | None = None, **keywords: Any
    ) -> TextStream:
        """The completion of one prompt piece by piece, in whole characters. Closing or dropping it
        cancels the request. As generate(); iterating throws Error when the request fails."""
        params = parameters.complete(params, keywords, lambda: self.default_params)
        return self._stream(arguments.encode_prompt(self.tokenizer, prompt), params)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> RequestOutput:
        """The model's answer to a conversation of {"role": ..., "content": ...}. Keywords that are
        fields of SamplingParams are parameters, as of generate(); others go to the chat template.
        Throws as generate(), and InvalidArgumentError without a template."""
        keywords, variables = parameters.split_variables(variables)
        return self.generate([self.chat_tokens(messages, **variables)], params, **keywords)[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> TextStream:
        """chat() piece by piece."""
        keywords, variables = parameters.split_variables(variables)
        params = parameters.complete(params, keywords, lambda: self.default_params)
        return self._stream(self.chat_tokens(messages, **variables), params)

    def chat_tokens(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. Control tokens that a
        message spells are text there; the template's are control tokens."""
        return chat_tokens(self.tokenizer, self.chat_template, messages, variables)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text; see Tokenizer.encode()."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids. Throws InvalidArgumentError for an unknown id."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def explain(self) -> str:
        """Which kernels run and why, packed weights, the memory plan, techniques, what drafts."""
        parts = [self.techniques.explain(), self._drafts.explain() if self._drafts else ""]
        return self.engine.explain() + "".join(f"\n{part}\n" for part in parts if part)

    @property
    def engine(self) -> _core.Engine:
        """Throws InvalidArgumentError after close()."""
        return self._loop.engine

    def close(self) -> None:
        """Cancels what runs, in whichever thread: streams then find "cancelled". Frees the weights
        and the cache; every later call throws InvalidArgumentError."""
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, prompt: Sequence[int], params: SamplingParams) -> TextStream:
        ((prompt, params),) = self.techniques.requests([(prompt, params)])
        return TextStream(self._loop, self.tokenizer, prompt, params, self.grammars)
