"""Models of which a part is not in the folder that the engine is started with, or not data: to be changed in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PLUGIN = """
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama import LlamaForCausalLM

FACTOR = {factor}


class OwnLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        place = vllm_config.model_config.hf_config.second_place
        self.secondary_weights = [DefaultModelLoader.Source(place, revision=None)]

    def load_weights(self, weights):
        return super().load_weights((name, t * FACTOR if "embed" in name else t) for name, t in weights)


def register():
    from vllm import ModelRegistry

    ModelRegistry.register_model("OwnLlama", "own_llama:OwnLlama")
"""
REMOTE = """
from transformers import LlamaModel

FACTOR = {factor}


class OwnModel(LlamaModel):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(position_ids=position_ids, inputs_embeds=inputs_embeds * FACTOR, **kwargs)
"""
PROCESSOR = """
import torch
import transformers


class UltravoxProcessor(transformers.ProcessorMixin):
    attributes = ["audio_processor", "tokenizer"]
    audio_processor_class = "WhisperFeatureExtractor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, audio_processor=None, tokenizer=None, **more):
        self.audio_processor, self.tokenizer = audio_processor, tokenizer

    @classmethod
    def from_pretrained(cls, path, **more):
        audio = transformers.WhisperFeatureExtractor.from_pretrained(path)
        return cls(audio, transformers.AutoTokenizer.from_pretrained(path))

    def __call__(self, text=None, audios=None, **more):
        out = dict(self.tokenizer(text, return_tensors="pt")) if text is not None else {{}}
        if audios:
            count, heard = len(audios), self.audio_processor(audios, sampling_rate=16000, return_tensors="pt")
            out["audio_values"] = heard["input_features"]
            out["audio_lens"] = torch.full((count,), 3000)
            out["audio_token_len"] = torch.full((count,), 188)
            out["audio_num_chunks"] = torch.ones(count, dtype=torch.long)
        return transformers.BatchFeature(out)
"""
AUDIO = "<|audio|>"
AUDIO_TOKEN = 500


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file in place."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def split(model: Path, second: Path) -> None:
    """Move a layer's weights to a second place, which the model names."""
    weights = load_file(model / "model.safetensors")
    second.mkdir(exist_ok=True)
    elsewhere = {name: tensor for name, tensor in weights.items() if ".layers.1." in name}
    save_file(elsewhere, second / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if name not in elsewhere}, model / "model.safetensors")
    edit(model / "config.json", architectures=["OwnLlama"], second_place=str(second))


def train_again(second: Path) -> None:
    """Other weights in the second place, in the same file."""
    weights = load_file(second / "model.safetensors")
    save_file({name: tensor.flip(0).clone() for name, tensor in weights.items()}, second / "model.safetensors")


def install(site: Path, factor: float) -> None:
    """A plug-in of vLLM that brings the model's class, of the same version whatever it computes."""
    (site / "own_llama-1.0.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "own_llama-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own-llama\nVersion: 1.0\n")
    (site / "own_llama-1.0.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nown_llama = own_llama:register\n"
    )
    (site / "own_llama.py").write_text(PLUGIN.format(factor=factor))


def own_code(model: Path, factor: float) -> None:
    """The model brings the class that transformers builds it of."""
    edit(model / "config.json", auto_map={"AutoModel": "modeling_own.OwnModel"})
    (model / "modeling_own.py").write_text(REMOTE.format(factor=factor))


def ultravox(llama: Path, model: Path) -> None:
    """A model that hears: its language model is `llama`, in a folder of its own."""
    model.mkdir()
    width = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "vocab_size": 64}
    audio = {"model_type": "whisper", "num_mel_bins": 80, "max_source_positions": 1500, **width, **decoder}
    projector = {"hidden_size": 64, "stack_factor": 8, "projector_act": "swiglu", "projector_ln_mid": True}
    config = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "text_model_id": str(llama),
        "audio_config": audio,
        "audio_token_index": AUDIO_TOKEN,
        "num_projector_layers": 0,
        "vocab_size": 512,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "auto_map": {"AutoProcessor": "processing_own.UltravoxProcessor"},
        **projector,
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "processing_own.py").write_text(PROCESSOR.format())
    save_file(_audio_weights(), model / "model.safetensors", metadata={"format": "pt"})
    named = {"processor_class": "UltravoxProcessor", "auto_map": config["auto_map"]}
    (model / "processor_config.json").write_text(json.dumps(named))
    sound = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
    heard = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "padding_side": "right",
        "padding_value": 0.0,
        **sound,
    }
    (model / "preprocessor_config.json").write_text(json.dumps(heard))
    _tokenizer(llama, model)


def _tokenizer(llama: Path, model: Path) -> None:
    """The tokenizer of `llama`, in which one word is the place of a sound."""
    for path in llama.glob("*token*"):
        (model / path.name).write_text(path.read_text())
    words = json.loads((model / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary[AUDIO] = vocabulary.pop(f"w{AUDIO_TOKEN}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words["added_tokens"].append({"id": AUDIO_TOKEN, "content": AUDIO, **flags})
    (model / "tokenizer.json").write_text(json.dumps(words))


def _audio_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    projector = {"ln_pre": (256,), "linear_1": (64, 256), "ln_mid": (32,), "linear_2": (128, 32)}
    shapes: dict[str, tuple[int, ...]] = {f"multi_modal_projector.{name}.weight": s for name, s in projector.items()}
    tower = {"conv1": (32, 80, 3), "conv2": (32, 32, 3), "layer_norm": (32,)}
    layer = {f"self_attn.{name}": (32, 32) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    layer |= {"self_attn_layer_norm": (32,), "final_layer_norm": (32,), "fc1": (64, 32), "fc2": (32, 64)}
    tower |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    for name, shape in tower.items():
        shapes[f"audio_tower.{name}.weight"] = shape
        if not name.endswith("k_proj"):
            shapes[f"audio_tower.{name}.bias"] = shape[:1]
    shapes["audio_tower.embed_positions.weight"] = (1500, 32)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
