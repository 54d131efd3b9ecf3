"""Small models with random weights for the rows of the table of families, and what else a row needs on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, SHAPE, VOCABULARY, Family, Row
from safetensors.torch import load_file, save_file
from support_changed_models import ultravox
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

RANK = 8


def build(row: Row, folder: Path) -> None:
    """Write a row's model to `folder/model`, and its other parts beside it."""
    save(row.family, folder / "model")
    for name, part in row.parts.items():
        PARTS[part](folder / name)


def save(family: Family, folder: Path, seed: int = 0) -> None:
    """Write a model with random weights and a tokenizer of single words."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.model_type, **{**SHAPE, "dtype": family.dtype, **family.config})
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, family.dtype))
    look_far(model)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2")
    fast.save_pretrained(folder)


def look_far(model: PreTrainedModel) -> None:
    """Have the first words of a prompt change its output: attend to few tokens, forget slowly, do not repeat a word."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "q_layernorm.weight")):
                weight += 3
            elif name.endswith("A_log"):
                weight -= 6
            elif name.endswith(("embed_tokens.weight", "word_embeddings.weight")) and model.config.tie_word_embeddings:
                weight *= 0.1


def save_draft(folder: Path) -> None:
    """Another Llama, which drafts."""
    save(FAMILIES["llama"], folder, seed=1)


def save_eagle(folder: Path) -> None:
    """A head of EAGLE for a Llama: one layer, and what joins an embedding and a hidden state."""
    save(FAMILIES["llama"], folder, seed=2)
    weights = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers.0." in name}
    del kept["layers.0.input_layernorm.weight"]
    width = SHAPE["hidden_size"]
    kept["fc.weight"] = torch.randn(width, 2 * width) * 0.1
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


def save_adapter(folder: Path) -> None:
    """A LoRA adapter for the attention of a Llama."""
    torch.manual_seed(3)
    width, narrow = SHAPE["hidden_size"], SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, out in {"q_proj": width, "k_proj": narrow, "v_proj": narrow, "o_proj": width}.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, width) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(out, RANK) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def add_mtp(folder: Path) -> None:
    """A layer for multi-token prediction after the last of a model, in the manner of DeepSeek V3 and GLM 4."""
    torch.manual_seed(4)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    before, after = f"model.layers.{last}.", f"model.layers.{last + 1}."
    added = {name.replace(before, after): one.clone() for name, one in weights.items() if name.startswith(before)}
    norm = weights["model.norm.weight"]
    added |= {f"{after}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{after}eh_proj.weight"] = (torch.randn(width, 2 * width) * 0.1).to(norm.dtype)
    added[f"{after}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    added[f"{after}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights | added, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def add_hearing(folder: Path) -> None:
    """A model that takes sounds: Ultravox, with the one in the folder as its language model."""
    ultravox(folder.rename(folder.with_name("text")), folder)


PARTS = {"llama": save_draft, "eagle": save_eagle, "adapter": save_adapter, "mtp": add_mtp, "ultravox": add_hearing}
