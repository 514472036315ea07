"""Trains the network of AttentionPredictor for a frozen model, on a text of one's own.

    python train_history.py FOLDER                    for smollm2-135m, on Python's documentation
    python train_history.py FOLDER --windows 12

1. effinfer computes the model's queries and keys on windows of LENGTH tokens spread over the text;
   of each page of keys, row of the second half and head, the highest logit and the logarithm of the
   sum of exponentials. The last three windows are held out.
2. Rows are played as the engine runs them: one of EVERY sees all pages, the others the first, the
   newest two and BUDGET that are chosen. The network learns what each page's score is in the row
   that comes next, first of rows that choose by what the last one had, then of its own.
3. FOLDER/attention_predictor.gguf; printed is how many of the truly best BUDGET pages are among
   those chosen in the held-out windows, beside those that had most in the last row, and by a mean
   of the last rows that decays; for rows that see all pages, and as the engine runs them.

What the model computes is kept in FOLDER. Needs torch; takes some minutes on two cores.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from train import windows

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.techniques.attention_predictor import KIND
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.rewrite import prune
from effinfer.techniques.vocab_trim import find_head

LENGTH, CHUNK, PAGE = 2048, 512, 64
PAGES, FIRST_ROW = LENGTH // PAGE, LENGTH // 2
ROWS, CHANNELS, LEAST = 32, 16, 14.0  # as csrc/ops/history_index.h has them
BUDGET, EVERY, DECAY = 4, 16, 0.8
SPREAD = 12  # places of windows
ALWAYS = -1e9  # of pages that are not chosen from


# ---- what the model computes ---------------------------------------------------------------------


class Model:
    """Its graph, returning what attention reads."""

    def __init__(self, files: ModelFiles) -> None:
        nodes = files.graph.nodes
        self.layers = [node for node in nodes if node["op"] == "attention"]
        appended = {n["outputs"][0]: n["inputs"][0] for n in nodes if n["op"] == "kv_append"}
        names = {}
        for i, node in enumerate(self.layers):
            q, kv = node["inputs"][:2]
            names |= {q: f"q.{i}", appended[kv]: f"k.{i}"}
        self.steps = GraphSteps.of(files, prune(files.graph, names), LENGTH)

    def run(self, ids: list[int]) -> dict[str, np.ndarray]:
        """float16 [layers, heads, rows, PAGES] of the rows of the second half: most and sums."""
        facts = self.layers[0]["attributes"]
        text = self.steps.begin()
        parts: dict[str, list[np.ndarray]] = {}
        for start in range(0, LENGTH, CHUNK):
            self.steps.feed(text, ids[start : start + CHUNK])
            for i in range(len(self.layers)):
                for name in (f"k.{i}", f"q.{i}"):
                    parts.setdefault(name, []).append(self.steps.executable.output(name).copy())
        self.steps.end(text)
        most, sums = [], []
        for i in range(len(self.layers)):
            dim, kv_heads = facts["head_dim"], facts["kv_heads"]
            q = torch.from_numpy(np.concatenate(parts[f"q.{i}"])[FIRST_ROW:])
            k = torch.from_numpy(np.concatenate(parts[f"k.{i}"]))
            q = q.view(LENGTH - FIRST_ROW, kv_heads, -1, dim)
            logits = torch.einsum("rhgd,khd->hgrk", q, k.view(LENGTH, kv_heads, dim))
            logits = (logits * facts["sm_scale"]).flatten(0, 1).unflatten(-1, (PAGES, PAGE))
            most.append(logits.amax(-1).half().numpy())
            sums.append(logits.logsumexp(-1).half().numpy())
        return {"most": np.stack(most), "sums": np.stack(sums)}


def make_data(llm: effinfer.LLM, folder: Path, count: int) -> list[dict[str, Tensor]]:
    """Of each window [heads of all layers, group, rows, PAGES]."""
    folder.mkdir(parents=True, exist_ok=True)
    model, start, data = None, time.perf_counter(), []
    group = 0
    for i, ids in enumerate(windows(llm, SPREAD)[:count]):
        path = folder / f"pages_{i}.npz"
        model = model or Model(llm.files)
        facts = model.layers[0]["attributes"]
        group = facts["heads"] // facts["kv_heads"]
        if not path.exists():
            np.savez(path, **model.run(ids))
            print(f"window {i}, {time.perf_counter() - start:.0f} s", flush=True)
        arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
        data.append(
            {k: v.flatten(0, 1).unflatten(0, (-1, group)).float() for k, v in arrays.items()}
        )
    return data


def beside(data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Windows as heads of one."""
    return {name: torch.cat([window[name] for window in data]) for name in data[0]}


# ---- rows as the engine runs them ----------------------------------------------------------------


def scores_of(window: dict[str, Tensor], row: int, visited: Tensor) -> Tensor:
    """[heads, PAGES] of the pages [heads, PAGES] that a row visits; of others there is nothing."""
    hidden = ~visited[:, None]
    sums = window["sums"][:, :, row].masked_fill(hidden, -1e9).logsumexp(-1, keepdim=True)
    most = (window["most"][:, :, row] - sums) / np.log(2) + LEAST
    return most.amax(1).clamp(min=0)


def choosable(row: int) -> Tensor:
    """[PAGES]: behind the first, before the newest two."""
    pages = torch.arange(PAGES)
    return (pages >= 1) & (pages < (FIRST_ROW + row) // PAGE - 1)


class Player:
    """Plays a window's rows. choose(history) gives [heads, PAGES] scores of the next row."""

    def __init__(self, window: dict[str, Tensor], every: int) -> None:
        self.window, self.every = window, every
        heads, _, self.rows, _ = window["most"].shape
        self.history = torch.zeros(heads, PAGES, ROWS)  # the newest first
        self.last = torch.zeros(heads, PAGES)

    def play(self, choose: object, keep: bool = False) -> dict[str, Tensor]:
        """The recall of the best pages in each row; to keep, histories and what came of them."""
        found, histories, wanted, masks = [], [], [], []
        for row in range(self.rows):
            whole = torch.arange(PAGES) < (FIRST_ROW + row) // PAGE
            free = choosable(row)
            all_pages = whole.expand_as(self.last)
            truth = scores_of(self.window, row, all_pages)
            visited = all_pages
            if row > 0:
                guess = choose(self.history).masked_fill(~free, ALWAYS)  # type: ignore[operator]
                best = guess.topk(BUDGET, -1).indices
                chosen = torch.zeros_like(all_pages).scatter(-1, best, True)
                true = truth.masked_fill(~free, ALWAYS).topk(BUDGET, -1).indices
                if row % self.every:
                    visited = (chosen | ~free) & whole
                    found.append(chosen.gather(-1, true).float().mean())
                elif self.every == 1:
                    found.append(chosen.gather(-1, true).float().mean())
                if keep and row % 8 == 5:
                    histories.append(self.history.clone())
                    wanted.append(truth)
                    masks.append(free)
            own = scores_of(self.window, row, visited)
            own = torch.where(visited, own, self.last) * whole
            if row == 0:
                self.history = own[..., None].expand_as(self.history).clone()
            else:
                self.history = torch.cat([own[..., None], self.history[..., :-1]], -1)
            self.last = own
        played = {"recall": torch.stack(found).mean()}
        if keep:
            played |= {"x": torch.stack(histories), "y": torch.stack(wanted)}
            played |= {"mask": torch.stack(masks)}
        return played


def last_row(history: Tensor) -> Tensor:
    return history[..., 0]


def decayed(history: Tensor) -> Tensor:
    return (history * DECAY ** torch.arange(ROWS)).sum(-1)


# ---- the network ---------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(ROWS, CHANNELS, 3, padding=1)
        self.out = nn.Parameter(torch.randn(CHANNELS) / CHANNELS)
        self.direct = nn.Parameter(0.2 * DECAY ** torch.arange(ROWS))

    def forward(self, history: Tensor) -> Tensor:
        """Scores [.., PAGES] of the row behind a history [.., PAGES, ROWS]."""
        flat = history.flatten(0, -3).transpose(1, 2)
        hidden = f.relu(self.filter(flat)).transpose(1, 2)
        return (hidden @ self.out).view(history.shape[:-1]) + history @ self.direct

    def numbers(self) -> np.ndarray:
        """As csrc/ops/history_index.h has them."""
        filters = self.filter.weight.permute(2, 1, 0)  # [3, ROWS, CHANNELS]
        parts = [filters, self.filter.bias, self.out, self.direct]
        return torch.cat([part.detach().flatten() for part in parts]).numpy()


def train(network: Network, samples: list[dict[str, Tensor]], steps: int) -> None:
    optimizer = torch.optim.Adam(network.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        sample = samples[int(torch.randint(len(samples), ()))]
        rows = torch.randperm(len(sample["x"]))[:2]
        guess, mask = network(sample["x"][rows]), sample["mask"][rows][:, None]
        # Of the best pages it matters most which they are.
        near = (sample["y"][rows] + 1) * mask
        loss = ((guess - sample["y"][rows]) ** 2 * near).sum() / near.sum()
        network.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"{step + 1}: {np.mean(losses[-100:]):.3f}", flush=True)


def save(network: Network, files: ModelFiles, path: Path) -> None:
    head = files.graph.values[find_head(files.graph)["inputs"][1]]["weight_name"]
    vocab_size, hidden_size = files.weights.shape(head)
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    facts = {"kind": KIND, "count": 1, "hidden_size": hidden_size, "vocab_size": vocab_size}
    for key, value in facts.items():
        writer.set(f"heads.{key}", value)
    numbers = np.ascontiguousarray(network.numbers(), np.float32)
    writer.add_tensor(f"{KIND}.network.weight", "f32", [numbers.size])
    writer.write(numbers)
    writer.commit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    llm = effinfer.LLM(options.model, max_seq_len=512)
    data = make_data(llm, options.folder, options.windows)
    network, known, held = Network(), beside(data[:-3]), beside(data[-3:])
    methods = {"last row": last_row, "decayed mean": decayed, "network": network}
    with torch.no_grad():
        samples = [Player(known, EVERY).play(last_row, keep=True)]
    train(network, samples, options.steps)
    with torch.no_grad():
        samples += [Player(known, EVERY).play(network, keep=True)]
    train(network, samples, options.steps)
    save(network, llm.files, options.folder / f"{KIND}.gguf")
    for every in (EVERY, 1):
        for name, choose in methods.items():
            with torch.no_grad():
                found = float(Player(held, every).play(choose)["recall"])
            print(f"all pages every {every} rows, {name}: {found:.3f}", flush=True)


if __name__ == "__main__":
    main()
