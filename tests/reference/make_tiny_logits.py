"""Writes tests/data/tiny_logits.json: what transformers computes for the tiny models.

Run by hand where transformers is installed (`python -m tests.reference.make_tiny_logits`), after a
change of tests/reference/tiny.py.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # ternary layers would be compiled
import torch
import transformers
from transformers.integrations.bitnet import replace_with_bitnet_linear

from tests.reference import tiny

ROWS = [0, 7, 17, len(tiny.TOKEN_IDS) - 1]
COLUMN_STEP = 32
TARGET = Path(__file__).parents[1] / "data" / "tiny_logits.json"


def load(config: tiny.Config) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_folder(config, Path(folder))
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )


def load_ternary(config: tiny.Config) -> torch.nn.Module:
    """Full precision, then the layers are replaced: the loader itself wants a GPU. BitNet before
    2B4T is no class of its own there, but for its activation it is the same."""
    kind = "bitnet" if tiny.is_bitnet(config) else "llama"
    names = {"bitnet": "BitNetForCausalLM", "llama": "LlamaForCausalLM"}
    plain = {**config, "model_type": kind, "architectures": [names[kind]]}
    model = load({**plain, "quantization_config": None})
    quantization = tiny.TERNARY_FAMILIES["bitnet"]["quantization_config"]
    options = {key: value for key, value in quantization.items() if key != "quant_method"}
    replace_with_bitnet_linear(model, ["lm_head"], transformers.BitNetQuantConfig(**options))
    state = {name: torch.tensor(array) for name, array in tiny.weights(config).items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model


def main() -> None:
    table = {}
    for name, config in {**tiny.FAMILIES, **tiny.TERNARY_FAMILIES}.items():
        model = load_ternary(config) if name in tiny.TERNARY_FAMILIES else load(config)
        with torch.inference_mode():
            logits = model(torch.tensor([tiny.TOKEN_IDS])).logits[0]
        picked = logits[ROWS][:, ::COLUMN_STEP].tolist()
        table[name] = [[round(value, 5) for value in row] for row in picked]
    result = {
        "source": f"transformers {transformers.__version__}, float32, eager attention",
        "rows": ROWS,
        "column_step": COLUMN_STEP,
        "logits": table,
    }
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
