"""Trains the predictor of TokenButler for a frozen model, on a text of one's own.

    python train.py FOLDER                        for smollm2-135m, on Python's documentation
    python train.py FOLDER --steps 400

1. effinfer computes the model's queries and keys, and the stream before layer FIRST, on windows of
   LENGTH tokens spread over the text. The last three windows are held out.
2. The predictor learns, layer by layer and head by head, the distribution of attention of some rows
   over the keys that a generated token chooses from: behind the first page, before the newest two.
3. FOLDER/token_butler.gguf: 8-bit weights; printed is what the best eighth and fourth of the
   held-out windows' keys hold of that attention, beside Quest's bounds of 16 keys and the keys with
   the highest logits.

What the model computes is kept in FOLDER. Needs torch; takes about ten minutes on two cores.
"""

import argparse
import pydoc_data.topics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.importance import KIND
from effinfer.techniques.rewrite import prune
from effinfer.techniques.vocab_trim import find_head

FIRST, CHANNELS, RANK = 3, 16, 128
LENGTH, CHUNK, PAGE = 2048, 512, 64
ROWS = 128  # of a window, from its second half
SKIPPED = 100_000  # first characters, on which methods are measured
LAYERS, STEP_ROWS = 7, 32  # of a step
EPS = 1e-5
DTYPE = "q8_0"


# ---- what the model computes ---------------------------------------------------------------------


def windows(llm: effinfer.LLM, count: int) -> list[list[int]]:
    topics = pydoc_data.topics.topics
    ids = llm.tokenize("\n".join(topics[name] for name in sorted(topics))[SKIPPED:])
    starts = [(len(ids) - LENGTH) * i // count for i in range(count)]
    return [ids[start : start + LENGTH] for start in starts]


class Model:
    """Its graph, returning what attention reads and the stream before layer FIRST."""

    def __init__(self, files: ModelFiles) -> None:
        self.stream = GraphCopy(files, files.weights, "stream").streams[FIRST]
        self.layers = [node for node in files.graph.nodes if node["op"] == "attention"]
        nodes = files.graph.nodes
        appended = {n["outputs"][0]: n["inputs"][0] for n in nodes if n["op"] == "kv_append"}
        names = {self.stream: "stream"}
        for i, node in enumerate(self.layers):
            q, kv = node["inputs"][:2]
            names |= {q: f"q.{i}", appended[kv]: f"k.{i}"}
        self.steps = GraphSteps.of(files, prune(files.graph, names), LENGTH)

    def run(self, ids: list[int], random: np.random.Generator) -> dict[str, np.ndarray]:
        """float16: x [LENGTH, hidden], k [layers, LENGTH, kv_heads, dim], q [layers, ROWS,
        kv_heads, group, dim], and rows [ROWS]: which rows these are."""
        facts = self.layers[0]["attributes"]
        heads, dim = facts["kv_heads"], facts["head_dim"]
        text, x, k, q, rows = self.steps.begin(), [], [], [], []
        for start in range(0, LENGTH, CHUNK):
            self.steps.feed(text, ids[start : start + CHUNK])
            x.append(self._output("stream"))
            k.append(self._outputs("k").reshape(len(self.layers), CHUNK, heads, dim))
            if start >= LENGTH // 2:
                some = np.sort(random.choice(CHUNK, 2 * ROWS * CHUNK // LENGTH, replace=False))
                own = self._outputs("q").reshape(len(self.layers), CHUNK, heads, -1, dim)
                q.append(own[:, some])
                rows.append(start + some)
        self.steps.end(text)
        join = np.concatenate
        return {"x": join(x), "k": join(k, 1), "q": join(q, 1), "rows": join(rows)}

    def _output(self, name: str) -> np.ndarray:
        return self.steps.executable.output(name).astype(np.float16)

    def _outputs(self, kind: str) -> np.ndarray:
        return np.stack([self._output(f"{kind}.{i}") for i in range(len(self.layers))])


def make_data(llm: effinfer.LLM, folder: Path, count: int) -> list[dict[str, Tensor]]:
    folder.mkdir(parents=True, exist_ok=True)
    model, random, start = None, np.random.default_rng(0), time.perf_counter()
    data = []
    for i, ids in enumerate(windows(llm, count)):
        path = folder / f"window_{i}.npz"
        if not path.exists():
            model = model or Model(llm.files)
            np.savez(path, **model.run(ids, random))
            print(f"window {i}, {time.perf_counter() - start:.0f} s", flush=True)
        data.append({name: torch.from_numpy(array) for name, array in np.load(path).items()})
    return data


# ---- the predictor -------------------------------------------------------------------------------


class Predictor(nn.Module):
    def __init__(self, data: dict[str, Tensor]) -> None:
        super().__init__()
        layers, _, self.heads, self.group, self.dim = data["q"].shape
        self.layers, hidden = layers - FIRST, data["x"].shape[1]
        self.norm = nn.Parameter(torch.ones(hidden))
        self.query = nn.Linear(hidden, RANK, bias=False)
        self.key = nn.Linear(hidden, RANK, bias=False)
        self.queries = nn.Linear(RANK, self.layers * self.heads * self.group * CHANNELS, bias=False)
        self.keys = nn.Linear(RANK, self.layers * self.heads * CHANNELS, bias=False)

    def forward(self, window: dict[str, Tensor], layers: Tensor, rows: Tensor) -> Tensor:
        """Logits [layers, heads, group, rows, tokens]."""
        x = window["x"].float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm
        query, key = f.silu(self.query(x[rows])), f.silu(self.key(x))
        shape = (self.layers, self.heads, self.group, CHANNELS, RANK)
        of_queries = self.queries.weight.view(shape)[layers]
        of_keys = self.keys.weight.view(self.layers, self.heads, CHANNELS, RANK)[layers]
        q = torch.einsum("tr,lhgcr->lhgtc", query, of_queries)
        k = torch.einsum("tr,lhcr->lhtc", key, of_keys)
        return torch.einsum("lhgtc,lhkc->lhgtk", q, k)

    def weights(self) -> dict[str, Tensor]:
        """As effinfer.techniques.importance reads them."""
        of_cache = self.dim // CHANNELS
        more = -(-self.layers // of_cache)
        named = {"norm": self.norm, "query": self.query.weight, "key": self.key.weight}
        for name, heads in (("queries", self.heads * self.group), ("keys", self.heads)):
            weight = getattr(self, name).weight.view(self.layers, heads, CHANNELS, RANK)
            padded = f.pad(weight, (0, 0, 0, 0, 0, 0, 0, more * of_cache - self.layers))
            packed = padded.view(more, of_cache, heads, CHANNELS, RANK).transpose(1, 2)
            for i in range(more):
                named[f"{i}.{name}"] = packed[i].reshape(heads * self.dim, RANK)
        return named


def logits_of(window: dict[str, Tensor], layers: Tensor, place: Tensor) -> Tensor:
    q, k = window["q"][layers + FIRST][:, place].float(), window["k"][layers + FIRST].float()
    return torch.einsum("lthgc,lkhc->lhgtk", q, k) * q.shape[-1] ** -0.5


def choosable(rows: Tensor, tokens: int) -> Tensor:
    """[rows, tokens]: behind the first page, before the row's own and the one before it."""
    keys = torch.arange(tokens)
    return (keys >= PAGE) & (keys < (rows // PAGE - 1)[:, None] * PAGE)


def hide(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(~mask, -1e9)


def train(data: list[dict[str, Tensor]], steps: int) -> Predictor:
    torch.manual_seed(0)
    predictor = Predictor(data[0])
    optimizer = torch.optim.Adam(predictor.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.1
    )
    start, losses = time.perf_counter(), []
    for step in range(steps):
        window = data[int(torch.randint(len(data), ()))]
        layers = torch.randperm(predictor.layers)[:LAYERS]
        place = torch.randperm(ROWS)[:STEP_ROWS]
        rows = window["rows"][place]
        mask = choosable(rows, LENGTH)
        wanted = hide(logits_of(window, layers, place), mask).softmax(-1)
        guess = hide(predictor(window, layers, rows), mask).log_softmax(-1)
        loss = -(wanted * guess).sum(-1).mean()
        predictor.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
        if step % 50 == 49:
            seconds = time.perf_counter() - start
            print(f"{step + 1}: {np.mean(losses[-50:]):.3f}, {seconds:.0f} s", flush=True)
    return predictor


@torch.no_grad()
def held(predictor: Predictor, data: list[dict[str, Tensor]], share: float) -> dict[str, float]:
    """What the chosen keys hold of attention: by the predictor, by bounds of 16, by logits."""
    found: dict[str, list[float]] = {"predictor": [], "bounds of 16": [], "logits": []}
    for window in data:
        for layer in range(predictor.layers):
            layers, place = torch.tensor([layer]), torch.arange(0, ROWS, 2)
            mask = choosable(window["rows"][place], LENGTH)
            logits = hide(logits_of(window, layers, place), mask)[0]
            guess = hide(predictor(window, layers, window["rows"][place]), mask)[0]
            k = window["k"][layer + FIRST].float().permute(1, 0, 2)
            q = window["q"][layer + FIRST][place].float().permute(1, 2, 0, 3)
            units = k.reshape(len(k), -1, 16, k.shape[-1])
            most = torch.einsum("hgtd,hud->hgtu", q.clamp(min=0), units.amax(2))
            most += torch.einsum("hgtd,hud->hgtu", q.clamp(max=0), units.amin(2))
            bounds = hide(most * k.shape[-1] ** -0.5, mask[:, ::16])
            attention, count = logits.softmax(-1), round(share * LENGTH)
            for name, scores, unit in (
                ("predictor", guess, 1),
                ("bounds of 16", bounds, 16),
                ("logits", logits, 1),
            ):
                votes = scores.log_softmax(-1).amax(1)
                best = votes.topk(count // unit, -1).indices
                chosen = torch.zeros_like(votes).scatter_(-1, best, 1.0)
                shares = attention * chosen.repeat_interleave(unit, -1)[:, None]
                found[name].append(shares.sum(-1).mean().item())
    return {name: float(np.mean(values)) for name, values in found.items()}


def save(predictor: Predictor, files: ModelFiles, path: Path) -> None:
    head = files.graph.values[find_head(files.graph)["inputs"][1]]["weight_name"]
    vocab_size, hidden_size = files.weights.shape(head)
    weights = predictor.weights()
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    facts = {
        "kind": KIND,
        "count": sum(name.endswith(".keys") for name in weights),
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "first": FIRST,
        "channels": CHANNELS,
    }
    for key, value in facts.items():
        writer.set(f"heads.{key}", value)
    blobs = []
    for name, value in weights.items():
        array = np.ascontiguousarray(value.detach().numpy(), np.float32)
        full, dtype = f"{KIND}.{name}.weight", "f32" if array.ndim == 1 else DTYPE
        source = _core.MemoryWeights()
        source.add(full, array, "f32", list(array.shape))
        blobs.append(array if dtype == "f32" else _core.quantize_weight(source, full, dtype)[0])
        writer.add_tensor(full, dtype, list(array.shape))
    for blob in blobs:
        writer.write(blob)
    writer.commit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = effinfer.LLM(options.model, max_seq_len=512)
    data = make_data(llm, options.folder, options.windows)
    predictor = train(data[:-3], options.steps)
    path = options.folder / f"{KIND}.gguf"
    save(predictor, llm.files, path)
    count = sum(parameter.numel() for parameter in predictor.parameters())
    print(f"{path}: {path.stat().st_size} bytes, {count} weights")
    for share in (1 / 8, 1 / 4):
        print(share, held(predictor, data[-3:], share), flush=True)


if __name__ == "__main__":
    main()
