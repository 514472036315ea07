"""Writes tests/data/tiny_logits.json: what transformers computes for the tiny models.

Run by hand where transformers is installed (`python -m tests.reference.make_tiny_logits`), after a
change of tests/reference/tiny.py.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.reference import tiny

ROWS = [0, 7, 17, len(tiny.TOKEN_IDS) - 1]
COLUMN_STEP = 32
TARGET = Path(__file__).parents[1] / "data" / "tiny_logits.json"


def main() -> None:
    table = {}
    for name, config in tiny.FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny.write_folder(config, Path(folder))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
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
