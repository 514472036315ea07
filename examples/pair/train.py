"""Trains two byte-level models, of 6 layers and of 1, on one text: a target, and a draft for it.

    python train.py FOLDER
    effinfer quantize -m FOLDER/target --type q8_0 -o target.gguf
    effinfer quantize -m FOLDER/draft --type q8_0 -o draft.gguf

Llama's architecture, made small; tokens are bytes. The text is what help() says of Python
(pydoc_data.topics). The draft learns the text, not the target: what the two have in common is what
they both know of it. Needs torch, tokenizers and safetensors; takes some minutes on two cores.
"""

import argparse
import json
import math
import time
from pathlib import Path
from pydoc_data import topics

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as f

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 2, 32
CONTEXT, THETA, EPS = 512, 10000.0, 1e-5
BATCH, LENGTH = 16, 160
EOS = "<eos>"
LAYERS = {"target": 6, "draft": 1}


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE without a merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, EOS])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + HEAD_DIM / 2) of [batch, heads, tokens, HEAD_DIM]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        split = (*x.shape[:2], -1, HEAD_DIM)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).view(split).transpose(1, 2) for project in projections)
        q, k = rotate(q, angles), rotate(k, angles)
        out = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, FFN), linear(HIDDEN, FFN)
        self.down_proj = linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(f.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(ids.shape[1])[:, None] * frequencies
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, angles)
        return f.linear(self.norm(x), self.embed_tokens.weight)


def train(model: Model, data: Tensor, steps: int, peak: float) -> float:
    """The mean loss of the last 100 steps, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    random = torch.Generator().manual_seed(0)
    start, losses = time.perf_counter(), []
    for step in range(steps):
        rate = min((step + 1) / 40, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * rate
        places = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=random)
        rows = torch.stack([data[place : place + LENGTH + 1] for place in places])
        loss = f.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: {sum(losses[-100:]) / 100:.3f}, {seconds:.0f} s", flush=True)
    return sum(losses[-100:]) / 100


def save(model: Model, layers: int, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    end = tokenizer.token_to_id(EOS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.embed_tokens.num_embeddings,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer()
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    data = torch.tensor(tokenizer.encode(text).ids)
    for name, layers in LAYERS.items():
        torch.manual_seed(0)
        model = Model(layers, tokenizer.get_vocab_size())
        loss = train(model, data, options.steps, peak=3e-3)
        save(model, layers, tokenizer, options.folder / name)
        print(f"{name}: {layers} layers, {loss / math.log(2):.2f} bits a byte")


if __name__ == "__main__":
    main()
