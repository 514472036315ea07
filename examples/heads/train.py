"""Trains heads that draft for a frozen model, on text that the model writes itself.

    python train.py FOLDER                         all kinds, for smollm2-135m
    python train.py FOLDER --kinds hydra --tokens 400000

1. The model continues openings and answers questions at temperature 0.8: what drafts have to
   predict is what the model says. One text in twenty is held out.
2. effinfer computes what the model's head reads behind each token: the model's graph, cut before
   the head.
3. Heads learn the distribution that the model itself gives to the next tokens (over the 4096 most
   frequent ones), from hidden states and tokens. The model's head stays as it is.
4. FOLDER/KIND.gguf: 5-bit weights; held-out acceptance is printed.

Texts and states are kept in FOLDER, so that another kind does not need them anew. Needs torch;
takes some minutes on two cores.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.techniques.rewrite import prune
from effinfer.techniques.vocab_trim import find_head

TEMPERATURE, LENGTH, CUT = 0.8, 224, 4096
WINDOW, DEPTH, BATCH = 64, 3, 16
DTYPE = "q5_0"
HEAD_DIM, THETA, EPS = 64, 10000.0, 1e-5  # as effinfer.techniques.eagle has them

SUBJECTS = (
    "the sea", "an old bridge", "learning to cook", "a railway station", "the history of paper",
    "bees", "a lost letter", "sorting numbers", "the human heart", "a village school", "volcanoes",
    "writing a program", "the first winter", "trade between cities", "a small garden", "music",
    "how rivers form", "a court case", "saving money", "the night sky", "a long walk", "glass",
    "a family recipe", "the printing press", "running a shop", "a storm", "learning a language",
    "electric light", "a museum", "the price of bread", "birds in a city", "a chess game",
    "databases", "an island", "healthy food", "the invention of maps", "a broken clock", "forests",
    "public libraries", "a new neighbour", "simple machines", "the theatre", "a mountain pass",
    "planning a trip", "the human eye", "an election", "a football team", "repairing a bicycle",
)  # fmt: skip
OPENINGS = (
    "The story begins with {}, and", "What most people do not know about {} is that",
    "Here are five facts about {}:\n\n1.", "Chapter 1\n\nNobody had thought about {} until",
    "In this article we look at {}.", "A letter to a friend about {}:\n\nDear",
    "Question: What should a child know about {}?\nAnswer:", "Last year, {}",
)  # fmt: skip
QUESTIONS = (
    "Explain {} to me.", "Write a short story about {}.", "Give me advice on {}.",
    "What is important about {}?",
)  # fmt: skip


# ---- text and states ----------------------------------------------------------------------------


def prompts(llm: effinfer.LLM) -> list[list[int]]:
    """Openings and questions, mixed."""
    found = [llm.tokenize(form.format(subject)) for subject in SUBJECTS for form in OPENINGS]
    found += [
        llm.chat_tokens([{"role": "user", "content": form.format(subject)}])
        for subject in SUBJECTS
        for form in QUESTIONS
    ]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[i] for i in order]


def write_texts(llm: effinfer.LLM, tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and what the model writes behind them, until that many tokens are there."""
    asked, seed, count = prompts(llm), 0, 0
    while count < tokens:
        batch = [asked[i % len(asked)] for i in range(seed, seed + 128)]
        params = [
            effinfer.SamplingParams(temperature=TEMPERATURE, seed=seed + i, max_tokens=LENGTH)
            for i in range(len(batch))
        ]
        for prompt, output in zip(batch, llm.generate(batch, params), strict=True):
            count += len(output.token_ids)
            yield prompt, list(output.token_ids)
        seed += len(batch)


class HiddenStates:
    """What the model's head reads: the model's graph, cut before the head."""

    def __init__(self, files: ModelFiles) -> None:
        name = find_head(files.graph)["inputs"][0]
        lines = files.graph.to_string().rstrip().splitlines()
        cut = next(i for i, line in enumerate(lines) if line.strip().startswith("return "))
        lines[cut] = f"  return %{name}"
        graph = prune(_core.Graph.parse("\n".join(lines)))
        options = _core.CompileOptions(max_tokens=512, max_rows=512, max_seq_len=512)
        self.executable = _core.compile(graph, files.weights, _core.ThreadPool(), options)
        self.cache = self.executable.make_cache(16)

    def of(self, ids: list[int]) -> np.ndarray:
        """float16 [len(ids), size], of at most 512 tokens."""
        sequence, _ = self.cache.create([])
        self.cache.append(sequence, ids)
        count, pages = len(ids), self.cache.pages(sequence)
        states = self.executable.run(
            token_ids=ids,
            positions=list(range(count)),
            qo_indptr=[0, count],
            kv_indptr=[0, len(pages)],
            kv_indices=pages,
            kv_len=[count],
            logit_rows=list(range(count)),
            cache=self.cache,
            phase="prefill",
        )
        self.cache.release(sequence, False)
        return states.astype(np.float16)


def make_data(model: str, folder: Path, tokens: int) -> dict[str, np.ndarray]:
    """ids i32 [n], hidden f16 [n, size], first i32 [texts + 1]: where texts begin; prompt i32
    [texts]: tokens of each that are the prompt's."""
    path = folder / "data.npz"
    if path.exists():
        return dict(np.load(path))
    start = time.perf_counter()
    with effinfer.LLM(model, max_seq_len=1024) as llm:
        texts = list(write_texts(llm, tokens))
    print(f"{len(texts)} texts, {time.perf_counter() - start:.0f} s", flush=True)
    states = HiddenStates(open_model(effinfer.hub.pull(model)))
    ids = [prompt + output for prompt, output in texts]
    hidden = [states.of(text) for text in ids]
    print(f"hidden states, {time.perf_counter() - start:.0f} s", flush=True)
    data = {
        "ids": np.concatenate([np.array(text, np.int32) for text in ids]),
        "hidden": np.concatenate(hidden),
        "first": np.cumsum([0, *map(len, ids)]).astype(np.int32),
        "prompt": np.array([len(prompt) for prompt, _ in texts], np.int32),
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(path, **data)
    return data


def windows(data: dict[str, np.ndarray], held_out: bool) -> list[int]:
    """Where windows of WINDOW + DEPTH + 2 tokens begin: the last token of the prompt, and on."""
    found = []
    for text, prompt in enumerate(data["prompt"]):
        if (text % 20 == 19) != held_out:
            continue
        place, end = int(data["first"][text] + prompt) - 1, int(data["first"][text + 1])
        while place + WINDOW + DEPTH + 2 <= end:
            found.append(place)
            place += WINDOW
    return found


# ---- heads --------------------------------------------------------------------------------------


def small(rows: int, cols: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols) * gain / math.sqrt(cols))


class Medusa(nn.Module):
    """state_d = h + up_d silu(down_d h)."""

    rank = 64

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(small(self.rank, size, 0.3) for _ in range(DEPTH))
        self.up = nn.ParameterList(small(size, self.rank, 0.01) for _ in range(DEPTH))

    def forward(self, h: Tensor, _: Tensor) -> list[Tensor]:
        """h [batch, WINDOW + DEPTH, size]; states for each depth, [batch, WINDOW, size]."""
        h = h[:, :WINDOW]
        return [h + f.silu(h @ down.T) @ up.T for down, up in zip(self.down, self.up, strict=True)]

    def weights(self) -> dict[str, Tensor]:
        parts = {"down": self.down, "up": self.up}
        return {f"medusa.{d}.{p}.weight": w[d] for p, w in parts.items() for d in range(DEPTH)}


class Hydra(nn.Module):
    """state_d = state_{d-1} + up_d silu(down_d state_{d-1} + token_d embedding)."""

    rank = 96

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(small(self.rank, size, 0.3) for _ in range(DEPTH))
        self.token = nn.ParameterList(small(self.rank, size) for _ in range(DEPTH))
        self.up = nn.ParameterList(small(size, self.rank, 0.01) for _ in range(DEPTH))

    def forward(self, h: Tensor, embedded: Tensor) -> list[Tensor]:
        """embedded [batch, WINDOW + DEPTH, size]: of the token behind each h."""
        state, states = h[:, :WINDOW], []
        for d, (down, token, up) in enumerate(zip(self.down, self.token, self.up, strict=True)):
            read = state @ down.T + embedded[:, d : d + WINDOW] @ token.T
            state = state + f.silu(read) @ up.T
            states.append(state)
        return states

    def weights(self) -> dict[str, Tensor]:
        parts = {"down": self.down, "token": self.token, "up": self.up}
        return {f"hydra.{d}.{p}.weight": w[d] for p, w in parts.items() for d in range(DEPTH)}


class Gumiho(nn.Module):
    """Two heads as Hydra's, then heads as Medusa's on the state of the second."""

    serial, rank, parallel_rank = 2, 96, 32

    def __init__(self, size: int) -> None:
        super().__init__()
        ranks = [self.rank if d < self.serial else self.parallel_rank for d in range(DEPTH)]
        self.down = nn.ParameterList(small(rank, size, 0.3) for rank in ranks)
        self.token = nn.ParameterList(small(rank, size) for rank in ranks[: self.serial])
        self.up = nn.ParameterList(small(size, rank, 0.01) for rank in ranks)

    def forward(self, h: Tensor, embedded: Tensor) -> list[Tensor]:
        state, states = h[:, :WINDOW], []
        for d, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            read = state @ down.T
            if d < self.serial:
                read = read + embedded[:, d : d + WINDOW] @ self.token[d].T
            states.append(state + f.silu(read) @ up.T)
            state = states[-1] if d < self.serial else state
        return states

    def weights(self) -> dict[str, Tensor]:
        parts = {"down": self.down, "token": self.token, "up": self.up}
        return {
            f"gumiho.{d}.{part}.weight": weight
            for part, weights in parts.items()
            for d, weight in enumerate(weights)
        }


class Eagle(nn.Module):
    """One decoder layer over (h, embedding), its own states as h from the second depth on."""

    heads, ffn = 3, 256

    def __init__(self, size: int) -> None:
        super().__init__()
        width = self.heads * HEAD_DIM
        self.hidden = nn.Parameter(torch.eye(size))
        self.token = small(size, size, 0.1)
        self.attn_norm = nn.Parameter(torch.ones(size))
        self.q, self.k, self.v = small(width, size), small(HEAD_DIM, size), small(HEAD_DIM, size)
        self.output = small(size, width, 0.1)
        self.ffn_norm = nn.Parameter(torch.ones(size))
        self.gate, self.up = small(self.ffn, size), small(self.ffn, size)
        self.down = small(size, self.ffn, 0.1)

    def forward(self, h: Tensor, embedded: Tensor) -> list[Tensor]:
        state, states = h[:, :WINDOW], []
        for d in range(DEPTH):
            state = self.layer(state, embedded[:, d : d + WINDOW])
            states.append(state)
        return states

    def layer(self, h: Tensor, embedded: Tensor) -> Tensor:
        x = h @ self.hidden.T + embedded @ self.token.T
        x = x + self.attention(f.rms_norm(x, x.shape[-1:], self.attn_norm, EPS))
        y = f.rms_norm(x, x.shape[-1:], self.ffn_norm, EPS)
        return x + (f.silu(y @ self.gate.T) * (y @ self.up.T)) @ self.down.T

    def attention(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = ((x @ w.T).view(split).transpose(1, 2) for w in (self.q, self.k, self.v))
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        q, k = rotate(q, angles), rotate(k, angles)
        out = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2) @ self.output.T

    def weights(self) -> dict[str, Tensor]:
        return {f"eagle.{name}.weight": value for name, value in self.named_parameters()}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + HEAD_DIM / 2) of [batch, heads, tokens, HEAD_DIM]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


KINDS = {"medusa": Medusa, "hydra": Hydra, "gumiho": Gumiho, "eagle": Eagle}


# ---- training -----------------------------------------------------------------------------------


class Batches:
    """Windows with the embeddings of their tokens and what the model expects behind them."""

    def __init__(self, data: dict[str, np.ndarray], files: ModelFiles) -> None:
        head = files.graph.values[find_head(files.graph)["inputs"][1]]["weight_name"]
        counts = Counter(data["ids"].tolist())
        self.tokens = sorted(token for token, _ in counts.most_common(CUT))
        rows = files.weights.dequantize(head)
        self.vocab_size, self.size = rows.shape
        self.head = torch.from_numpy(rows)
        self.cut = self.head[self.tokens].clone()
        self.table = torch.from_numpy(files.weights.dequantize("token_embd.weight"))
        self.ids = torch.from_numpy(data["ids"]).long()
        self.hidden = torch.from_numpy(data["hidden"])
        covered = sum(counts[token] for token in self.tokens) / len(data["ids"])
        print(f"{len(self.tokens)} tokens are {100 * covered:.1f} % of the text", flush=True)

    def get(self, places: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """h and embeddings [batch, WINDOW + DEPTH, size], logits of the cut head behind each h."""
        index = torch.tensor(places)[:, None] + torch.arange(WINDOW + DEPTH + 1)
        h = self.hidden[index].float()
        embedded = self.table[self.ids[index[:, 1:]]]
        return h[:, :-1], embedded, h @ self.cut.T

    def hidden_at(self, places: list[int], ahead: int) -> Tensor:
        """[batch, WINDOW, size], so many tokens behind the windows' own."""
        index = torch.tensor(places)[:, None] + ahead + torch.arange(WINDOW)
        return self.hidden[index].float()


def train(kind: str, batches: Batches, places: list[int], steps: int) -> nn.Module:
    model = KINDS[kind](batches.size)
    peak = 1e-3 if kind == "eagle" else 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    random = torch.Generator().manual_seed(0)
    start, total = time.perf_counter(), 0.0
    for step in range(steps):
        rate = min((step + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * rate
        chosen = torch.randint(len(places), (BATCH,), generator=random).tolist()
        h, embedded, logits = batches.get([places[i] for i in chosen])
        loss = torch.zeros(())
        for d, state in enumerate(model(h, embedded)):
            wanted = logits[:, d + 1 : d + 1 + WINDOW].softmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):  # half of the time goes here
                guess = state @ batches.cut.T
            guess = guess.float().log_softmax(-1)
            loss = loss - (wanted * guess).sum(-1).mean() * 0.8**d
            if kind == "eagle":
                behind = batches.hidden_at([places[i] for i in chosen], d + 1)
                loss = loss + f.smooth_l1_loss(state, behind)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if step % 50 == 49:
            seconds = time.perf_counter() - start
            print(f"{kind} {step + 1}: loss {total / 50:.3f}, {seconds:.0f} s", flush=True)
            total = 0.0
    return model


@torch.no_grad()
def acceptance(model: nn.Module, batches: Batches, places: list[int]) -> list[float]:
    """By depth: the probability that the model, at TEMPERATURE, draws what the head believes most,
    the tokens before it being the text's."""
    found = np.zeros(DEPTH)
    for i in range(0, len(places), 4):
        h, embedded, logits = batches.get(places[i : i + 4])
        for d, state in enumerate(model(h, embedded)):
            best = (state @ batches.cut.T).argmax(-1, keepdim=True)
            wanted = slice(d + 1, d + 1 + WINDOW)
            total = (batches.hidden_at(places[i : i + 4], d + 1) @ batches.head.T) / TEMPERATURE
            p = logits[:, wanted].gather(-1, best)[..., 0] / TEMPERATURE - total.logsumexp(-1)
            found[d] += p.exp().mean(1).sum().item()
    return [float(share) for share in found / len(places)]


def save(kind: str, model: nn.Module, batches: Batches, path: Path) -> None:
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    writer.set("heads.kind", kind)
    writer.set("heads.count", 1 if kind == "eagle" else DEPTH)
    writer.set("heads.hidden_size", batches.size)
    writer.set("heads.vocab_size", batches.vocab_size)
    writer.set("heads.tokens", np.array(batches.tokens, np.int32))
    blobs = []
    for name, value in model.weights().items():
        array = np.ascontiguousarray(value.detach().numpy(), np.float32)
        dtype = "f32" if array.ndim == 1 else DTYPE
        source = _core.MemoryWeights()
        source.add(name, array, "f32", list(array.shape))
        blobs.append(array if dtype == "f32" else _core.quantize_weight(source, name, dtype)[0])
        writer.add_tensor(name, dtype, list(array.shape))
    for blob in blobs:
        writer.write(blob)
    writer.commit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = make_data(options.model, options.folder, options.tokens)
    batches = Batches(data, open_model(effinfer.hub.pull(options.model)))
    places, held_out = windows(data, held_out=False), windows(data, held_out=True)
    print(f"{len(places)} windows, {len(held_out)} held out", flush=True)
    for kind in options.kinds:
        torch.manual_seed(0)
        model = train(kind, batches, places, options.steps)
        path = options.folder / f"{kind}.gguf"
        save(kind, model, batches, path)
        shares = ", ".join(f"{100 * p:.1f} %" for p in acceptance(model, batches, held_out))
        print(f"{path}: {path.stat().st_size} bytes; held-out acceptance by depth {shares}")


if __name__ == "__main__":
    main()
