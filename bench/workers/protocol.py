"""The worker's side of the harness: JSON lines on standard input and output.

Commands, each one object a line with a "command" key, answered by one object a line:

  load     {model, threads, context, precision, deterministic, kv_dtype, prefix_cache, sequences}
                                                     -> {seconds, ...description of the engine}
  prefill  {tokens}                                  -> {seconds}: to the logits of the last token
  decode   {prompt, count}                           -> {seconds}: `count` greedy steps after it
  batch    {prompts, count}                          -> {seconds}: `count` greedy steps of all
  verify   {prompt, tokens, steps}                   -> {seconds}: one step of `tokens`, all logits
  logits   {tokens, phase: prefill|decode, path}     -> {}: float32 [tokens, vocab] saved with numpy
  streams  {prompts, count, schemas}                 -> {seconds}: `count` tokens of every text
  first    {prompts}                                 -> {seconds}: to the first text of the first
  tokenize {text}                                    -> {tokens}
  memory   {}                                        -> {peak_rss_bytes, base_rss_bytes}

This file imports nothing but the standard library: it runs in the environment of any peer.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def resident_bytes(peak: bool) -> int:
    """Of this process: the most so far (VmHWM), or now (VmRSS)."""
    name = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def serve(handlers: dict[str, Handler]) -> None:
    """Answers until standard input ends. Libraries print to standard output: it becomes stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    base = resident_bytes(peak=False)  # the interpreter and its packages
    handlers = {
        "memory": lambda _: {"peak_rss_bytes": resident_bytes(peak=True), "base_rss_bytes": base},
        **handlers,
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request["command"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
