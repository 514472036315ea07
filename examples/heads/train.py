"""Trains heads that draft for a frozen model, on text that the model writes itself.

    python train.py FOLDER                         all kinds, for smollm2-135m
    python train.py FOLDER --kinds eagle --steps 400

1. The model continues openings and answers questions at temperature 0.8: what drafts have to
   predict is what the model says. One text in twenty is held out.
2. effinfer computes what the model's head reads behind each token: the model's graph, cut before
   the head.
3. Heads learn the distribution that the model itself gives to the next tokens (over the 4096 most
   frequent ones), from hidden states and tokens. The model's head stays as it is.
4. FOLDER/KIND.gguf: 5-bit weights; held-out acceptance is printed.

Texts and states are kept in FOLDER, so that another kind does not need them anew. Needs torch;
takes some minutes a kind on two cores.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from kinds import DEPTH, KINDS, WINDOW, Head
from muon import Muon
from torch import Tensor, nn
from torch.nn import functional as f

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.techniques.rewrite import prune
from effinfer.techniques.vocab_trim import find_head

TEMPERATURE, LENGTH, CUT = 0.8, 224, 4096
BATCH = 16
DTYPE = "q5_0"
WARM_STEPS = 20
SHALLOW = 0.5  # of the steps learn the first depth alone

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


# ---- training -----------------------------------------------------------------------------------


class Batches:
    """Windows with the embeddings of their tokens and what the model expects behind them. States
    and embeddings are scaled to a root mean square of 1."""

    def __init__(self, data: dict[str, np.ndarray], files: ModelFiles) -> None:
        head = files.graph.values[find_head(files.graph)["inputs"][1]]["weight_name"]
        counts = Counter(data["ids"].tolist())
        self.tokens = sorted(token for token, _ in counts.most_common(CUT))
        rows = files.weights.dequantize(head)
        self.vocab_size, self.size = rows.shape
        self.ids = torch.from_numpy(data["ids"]).long()
        self.hidden = torch.from_numpy(data["hidden"])
        table = torch.from_numpy(files.weights.dequantize("token_embd.weight"))
        some = torch.randperm(len(self.ids), generator=torch.Generator().manual_seed(0))[:4096]
        self.h_scale = 1 / self.hidden[some].float().square().mean().sqrt().item()
        self.token_scale = 1 / table[self.ids[some]].square().mean().sqrt().item()
        self.head = torch.from_numpy(rows) / self.h_scale
        self.cut = self.head[self.tokens].clone()
        self.table = table * self.token_scale
        covered = sum(counts[token] for token in self.tokens) / len(data["ids"])
        print(f"{len(self.tokens)} tokens are {100 * covered:.1f} % of the text", flush=True)

    def get(self, places: list[int]) -> tuple[Tensor, Tensor]:
        """h and embeddings of the tokens behind each, [batch, WINDOW + DEPTH + 1, size]."""
        index = torch.tensor(places)[:, None] + torch.arange(WINDOW + DEPTH + 1)
        return self.hidden[index].float() * self.h_scale, self.table[self.ids[index + 1]]


def loss_of(model: Head, batches: Batches, places: list[int], depths: int) -> Tensor:
    """Cross entropy with what the model draws from, at TEMPERATURE."""
    h, embedded = batches.get(places)
    with torch.no_grad():
        wanted = ((h[:, 1 : WINDOW + depths] @ batches.cut.T) / TEMPERATURE).softmax(-1)
    loss = torch.zeros(())
    for d, state in enumerate(model(h, embedded, depths)):
        with torch.autocast("cpu", dtype=torch.bfloat16):  # half of the time goes here
            guess = state @ batches.cut.T
        guess = guess.float()
        right = (wanted[:, d : d + WINDOW] * guess).sum(-1)
        loss = loss + (guess.logsumexp(-1) - right).mean() * 0.7**d
        if model.regression > 0:
            behind = h[:, d + 1 : d + 1 + WINDOW]
            loss = loss + model.regression * f.smooth_l1_loss(state, behind)
    return loss


def train(kind: str, batches: Batches, places: list[int], steps: int) -> Head:
    model = KINDS[kind](batches.size)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=model.rate)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=model.rate, weight_decay=0.0))
    random = torch.Generator().manual_seed(0)
    order: list[int] = []
    start, losses = time.perf_counter(), []
    for step in range(steps):
        rate = min((step + 1) / WARM_STEPS, 1.0, 1.2 * (1 - step / steps))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = model.rate * rate
        if len(order) < BATCH:
            order = torch.randperm(len(places), generator=random).tolist()
        chosen, order = [places[i] for i in order[:BATCH]], order[BATCH:]
        depths = 1 if kind == "eagle" and step < SHALLOW * steps else DEPTH
        loss = loss_of(model, batches, chosen, depths)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            seconds = time.perf_counter() - start
            print(f"{kind} {step + 1}: {np.mean(losses[-50:]):.3f}, {seconds:.0f} s", flush=True)
    return model


@torch.no_grad()
def acceptance(model: Head, batches: Batches, places: list[int]) -> list[float]:
    """By depth: the probability that the model, at TEMPERATURE, draws what the head believes most,
    the tokens before it being the text's."""
    found = np.zeros(DEPTH)
    for i in range(0, len(places), 4):
        h, embedded = batches.get(places[i : i + 4])
        logits = (h @ batches.head.T) / TEMPERATURE
        p = (logits[..., batches.tokens] - logits.logsumexp(-1, keepdim=True)).exp()
        for d, state in enumerate(model(h, embedded, DEPTH)):
            best = (state @ batches.cut.T).argmax(-1, keepdim=True)
            found[d] += p[:, d + 1 : d + 1 + WINDOW].gather(-1, best).mean(1).sum().item()
    return [float(share) for share in found / len(places)]


def save(model: Head, batches: Batches, path: Path) -> None:
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    writer.set("heads.kind", model.kind)
    writer.set("heads.count", 1 if model.kind == "eagle" else DEPTH)
    writer.set("heads.hidden_size", batches.size)
    writer.set("heads.vocab_size", batches.vocab_size)
    writer.set("heads.tokens", np.array(batches.tokens, np.int32))
    blobs = []
    for name, value in model.weights(batches.h_scale, batches.token_scale).items():
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
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--steps", type=int, default=900)
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
        save(model, batches, path)
        shares = ", ".join(f"{100 * p:.1f} %" for p in acceptance(model, batches, held_out))
        print(f"{path}: {path.stat().st_size} bytes; held-out acceptance by depth {shares}")


if __name__ == "__main__":
    main()
