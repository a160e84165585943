"""Makes two LoRA adapters of the tiny model, `a` and `b`, with random weights: only their words tell them apart.

Runs in vLLM's environment: `python -P make_adapters.py MODEL FOLDER`.
"""

import json
import sys
from pathlib import Path

# These live in the engine environment only, where nothing type-checks.
import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

RANK = 4


def main(model: Path, folder: Path) -> None:
    """Writes `folder/a` and `folder/b`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width, heads = config["hidden_size"], config["num_attention_heads"]
    queries = heads * (config.get("head_dim") or width // heads)
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            part = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            weights[f"{part}.lora_A.weight"] = torch.randn(RANK, width)
            weights[f"{part}.lora_B.weight"] = torch.randn(queries, RANK)
        adapter = folder / name
        adapter.mkdir(parents=True)
        save_file(weights, str(adapter / "adapter_model.safetensors"))
        shape = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["q_proj"]}
        written = json.dumps(shape | {"task_type": "CAUSAL_LM", "bias": "none"})
        (adapter / "adapter_config.json").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
