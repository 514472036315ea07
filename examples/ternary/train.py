"""Trains a small BitNet b1.58 (arXiv:2402.17764) and writes it as a Hugging Face folder.

    python train.py FOLDER                    ternary layers
    python train.py FOLDER --float            its twin with float layers
    effinfer quantize -m FOLDER --type t2 --head q8_0 -o model.gguf

The architecture is that of the 2B4T model (arXiv:2504.12285), made small: RMS norms before each
sublayer and another behind attention and inside the MLP, squared ReLU, rotary positions, grouped
queries, tied embeddings. Layers multiply int8 rows (one scale a row) by ternary weights (one scale
a matrix); float32 master weights learn through both roundings as if they were not there.

The text is what a Python installation says about Python: the topics of help() and the docstrings of
the standard library. One paragraph block in twenty is held out. Needs torch, tokenizers and
safetensors; takes some minutes on two cores.
"""

import argparse
import ast
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as f

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 256, 512, 2, 4, 2, 64
CONTEXT, THETA, EPS = 256, 10000.0, 1e-5
EOS = "<eos>"
BATCH, LENGTH = 16, 128


# ---- text ---------------------------------------------------------------------------------------


def documents() -> Iterator[str]:
    """help()'s topics, then the docstrings of the standard library, in a fixed order."""
    for name in sorted(topics.topics):
        yield topics.topics[name]
    library = Path(sysconfig.get_paths()["stdlib"])
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and len(text) > 200:
                yield text


def split_text() -> tuple[list[str], list[str]]:
    """Blocks of 30 paragraphs to learn from, and those that are held out; no paragraph twice."""
    paragraphs = list(dict.fromkeys(p for text in documents() for p in text.split("\n\n")))
    blocks = ["\n\n".join(paragraphs[i : i + 30]) for i in range(0, len(paragraphs), 30)]
    held_out = [block for i, block in enumerate(blocks) if i % 20 == 19]
    return [block for i, block in enumerate(blocks) if i % 20 != 19], held_out


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> Tensor:
    end = tokenizer.token_to_id(EOS)
    ids = [i for text in tokenizer.encode_batch(texts) for i in (*text.ids, end)]
    return torch.tensor(ids)


# ---- model --------------------------------------------------------------------------------------


def rounded(x: Tensor, y: Tensor) -> Tensor:
    """y forward; backward as if it were x (Bengio et al. 2013, straight-through)."""
    return x + (y - x).detach()


class TernaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        x = rounded(x, (x / scale).round() * scale)
        mean = self.weight.abs().mean().clamp_min(1e-5)
        return f.linear(x, rounded(self.weight, (self.weight / mean).round().clamp(-1, 1) * mean))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + HEAD_DIM / 2) of [batch, heads, tokens, HEAD_DIM] by [tokens, HEAD_DIM / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def norm(size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=EPS)


class Attention(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.q_proj = linear(HIDDEN, q, bias=False)
        self.k_proj = linear(HIDDEN, kv, bias=False)
        self.v_proj = linear(HIDDEN, kv, bias=False)
        self.attn_sub_norm = norm(q)
        self.o_proj = linear(q, HIDDEN, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, HEAD_DIM)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).view(split).transpose(1, 2) for project in projections)
        q, k = rotate(q, angles), rotate(k, angles)
        out = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(self.attn_sub_norm(out.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.gate_proj = linear(HIDDEN, FFN, bias=False)
        self.up_proj = linear(HIDDEN, FFN, bias=False)
        self.ffn_sub_norm = norm(FFN)
        self.down_proj = linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ffn_sub_norm(f.relu(self.gate_proj(x)) ** 2 * self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(HIDDEN), norm(HIDDEN)
        self.self_attn, self.mlp = Attention(linear), Mlp(linear)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(linear) for _ in range(LAYERS))
        self.norm = norm(HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(ids.shape[1])[:, None] * frequencies
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, angles)
        return f.linear(self.norm(x), self.embed_tokens.weight)


# ---- training -----------------------------------------------------------------------------------


def train(model: Model, data: Tensor, steps: int, peak: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    warmup = steps // 20
    random = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for step in range(steps):
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * rate
        places = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=random)
        rows = torch.stack([data[place : place + LENGTH + 1] for place in places])
        loss = f.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)


@torch.no_grad()
def perplexity(model: Model, ids: Tensor) -> float:
    """As `effinfer perplexity --ctx 256`: pieces of CONTEXT tokens, each from its beginning."""
    total, count = 0.0, 0
    for piece in ids.split(CONTEXT):
        if len(piece) > 1:
            logits = model(piece[None, :-1])[0]
            total += f.cross_entropy(logits, piece[1:], reduction="sum").item()
            count += len(piece) - 1
    return math.exp(total / count)


def save(model: Model, tokenizer: tokenizers.Tokenizer, folder: Path, ternary: bool) -> None:
    end = tokenizer.token_to_id(EOS)
    config = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "relu2",
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if ternary:
        config["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--float", action="store_true", help="float layers")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    texts, held_out = split_text()
    tokenizer = train_tokenizer(texts)
    data = encode(tokenizer, texts)
    print(f"{sum(map(len, texts)) / 1e6:.2f} MB of text, {len(data)} tokens")
    model = Model(nn.Linear if options.float else TernaryLinear)
    train(model, data, options.steps, peak=1.5e-3 if options.float else 3e-3)
    options.folder.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, options.folder, not options.float)
    text = "\n\n".join(held_out)
    (options.folder / "held_out.txt").write_text(text, encoding="utf-8")
    result = perplexity(model, torch.tensor(tokenizer.encode(text).ids))
    print(f"perplexity of held_out.txt: {result:.3f}")


if __name__ == "__main__":
    main()
