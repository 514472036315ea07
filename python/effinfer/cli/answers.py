"""How an answer is printed: as it comes, or as one JSON object."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from effinfer import _core
from effinfer.cli.output import Told, note, print_json
from effinfer.llm import LLM
from effinfer.outputs import RequestOutput
from effinfer.requests.generation import TextStream


@dataclass(frozen=True)
class Printer:
    llm: LLM
    as_json: bool
    quiet: bool

    def show(self, stream: TextStream) -> str:
        """Prints the answer, with statistics on stderr, and returns its text. Interrupted, it has
        printed what came until then; Told then, and after a failure."""
        try:
            with contextlib.closing(stream):
                for piece in stream:
                    if not self.as_json:
                        print(piece, end="", flush=True)
            output = stream.output()
        except KeyboardInterrupt:
            self._show_part(stream, "cancelled", "interrupted")
            raise Told(130) from None
        except _core.Error as error:
            self._show_part(stream, "error", str(error))
            note(f"effinfer: error: {' '.join(str(error).split())}")
            raise Told(1) from None
        if self.as_json:
            print_json(_to_dict(output))
        else:
            print(flush=True)
        if not self.quiet:
            note(self._statistics(output))
        return output.text

    def _show_part(self, stream: TextStream, reason: str, error: str) -> None:
        if self.as_json:
            print_json({"text": stream.text, "finish_reason": reason, "error": error})
        else:
            print(flush=True)

    def _statistics(self, output: RequestOutput) -> str:
        metrics = output.metrics
        cached = f" ({metrics.cached_tokens} cached)" if metrics.cached_tokens else ""
        drafts = metrics.speculation
        accepted = (
            f", {drafts.accepted / drafts.steps:.2f} of {drafts.drafted / drafts.steps:.2f} drafts "
            f"accepted in {drafts.steps} steps"
            if drafts.steps
            else ""
        )
        return (
            f"[load {self.llm.load_s:.2f} s; prompt {metrics.prompt_tokens} tokens{cached}, first "
            f"token after {metrics.time_to_first_token_s * 1e3:.0f} ms; {metrics.output_tokens} "
            f"tokens, {metrics.decode_tok_s:.1f} tok/s{accepted}; {output.finish_reason}]"
        )


def _to_dict(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "metrics": {**asdict(output.metrics), "decode_tok_s": output.metrics.decode_tok_s},
    }
