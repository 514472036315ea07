"""StreamingVLM: Real-Time Understanding for Infinite Video Streams (Xu et al., arXiv:2510.09608).

Of an endless stream of images and text a sequence keeps its first tokens, a long window of the last
text and a short one of the last images (section 3.2), at positions without gaps between them:

    tokens   s s t t t v v v v t t v v v v t     s: first, t: text, v: image
    kept     s s   t t         t t   v v v t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import integer
from effinfer.techniques.setup import Hook
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup

TAGS = "streaming_vlm.tags"  # of a slot: 0: not known yet
TEXT, IMAGE = 1, 2


@dataclass(frozen=True)
class StreamingVLM(Technique):
    """
    Args:
        sinks: of the first tokens, slots that stay.
        text, images: of the last tokens of each kind, slots that stay.
        image_tokens: ids that stand for images; without any all is text.
        chunk_tokens: where steps of a prompt end, and keys are dropped.
    """

    META: ClassVar[Meta] = Meta(
        paper="StreamingVLM: Real-Time Understanding for Infinite Video Streams",
        arxiv="2510.09608",
        family="kv.eviction",
        primitives=("planes", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"text": 1 << 30},
        differs="a kind of token is told by its id; tokens are dropped between steps, when all "
        "windows are full together; no model is trained with overlapping chunks",
        python_steps=True,
        name="streaming_vlm",
    )

    sinks: int = integer(512)
    text: int = integer(512, least=1)
    images: int = integer(512, least=1)
    image_tokens: tuple[int, ...] = ()
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for token in self.image_tokens:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise _core.InvalidArgumentError(
                    f"[StreamingVLM] image_tokens: expected ids of tokens, got {token!r}"
                )

    def facts(self) -> dict[str, str | int]:
        return {"planes": TAGS, "chunk_tokens": self.chunk_tokens}

    def engine(self, setup: EngineSetup) -> None:
        most = self.sinks + self.text + self.images
        setup.hooks.append(Hook(self.name, {"over_budget": most}, self.drop, most_slots=most))

    def drop(self, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        import numpy as np

        plane, size = sequence.plane(TAGS), sequence.length
        tags = plane[0]
        new = int((tags == 0).sum())  # the last ones
        is_image = np.isin(sequence.tokens(new), self.image_tokens)
        tags[size - new :] = np.where(is_image, IMAGE, TEXT)
        sequence.set_plane(TAGS, np.broadcast_to(tags, plane.shape))
        kept = np.arange(size) < self.sinks
        for kind, most in ((TEXT, self.text), (IMAGE, self.images)):
            own = np.flatnonzero((tags == kind) & (np.arange(size) >= self.sinks))
            kept[own[-most:]] = True
        # Slots stay where they are until all behind gaps have moved to their positions.
        edges = np.flatnonzero(np.diff(kept, prepend=True, append=True))
        for begin, end in edges.reshape(-1, 2)[::-1].tolist():
            sequence.reposition([end, *[0] * (sequence.num_groups - 1)], begin - end)
        sequence.retain([np.flatnonzero(kept).tolist()])
