"""Small random models, made on the spot: `engines.make_model`, or `python support_models.py KIND FOLDER`.

Weights are drawn wide, so that outputs differ between prompts: a model that repeats one token would prove nothing.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
    "initializer_range": 0.3,
}


def llama() -> LlamaForCausalLM:
    """Two layers of full attention: one KV cache group."""
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SHAPE))


def wide_llama() -> LlamaForCausalLM:
    """As `llama`, with 13 MiB of weights, in tensors of 2 MiB."""
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **{**SHAPE, "intermediate_size": 4096}))


def phi3() -> Phi3ForCausalLM:
    """Two layers with longrope: one set of rotary factors for up to 4,096 tokens, another beyond."""
    half = SHAPE["hidden_size"] // SHAPE["num_attention_heads"] // 2
    factors = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + number / 4 for number in range(half)],
    }
    config = Phi3Config(
        num_hidden_layers=2, original_max_position_embeddings=4096, rope_parameters=factors, pad_token_id=0, **SHAPE
    )
    return Phi3ForCausalLM(config)


def gemma3(kinds: str = "sfsf", head_dim: int = 32) -> Gemma3ForCausalLM:
    """Sliding windows of 256 tokens and full attention: several KV cache groups."""
    layers = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    shape = {**SHAPE, "initializer_range": 0.15}
    config = Gemma3TextConfig(
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=256,
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        **shape,
    )
    return Gemma3ForCausalLM(config)


def uneven_gemma3() -> Gemma3ForCausalLM:
    """Two layers of full attention and five sliding windows: vLLM makes groups of 2, 2, 2 and 1 layers of them.

    A layer's page is 256 KiB, as large as in models that are served.
    """
    return gemma3("sfssfss", head_dim=128)


def gpt_oss() -> GptOssForCausalLM:
    """Sliding windows of 128 tokens and full attention, both with sinks, and experts; only in bfloat16."""
    config = GptOssConfig(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=128,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        **{**SHAPE, "dtype": "bfloat16"},
    )
    return GptOssForCausalLM(config).to(torch.bfloat16)


def qwen3_next() -> Qwen3NextForCausalLM:
    """Three layers of linear attention, with a state each, and one of full attention; only in bfloat16."""
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **{**SHAPE, "dtype": "bfloat16"},
    )
    return Qwen3NextForCausalLM(config).to(torch.bfloat16)


def cohere2() -> Cohere2ForCausalLM:
    """Three layers of sliding windows, of 256 tokens and the one itself, and one of full attention."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    return Cohere2ForCausalLM(Cohere2Config(num_hidden_layers=4, layer_types=kinds, sliding_window=256, **SHAPE))


def mistral() -> MistralForCausalLM:
    """Two layers of sliding windows of 256 tokens, and no full attention."""
    return MistralForCausalLM(MistralConfig(num_hidden_layers=2, sliding_window=256, head_dim=32, **SHAPE))


def deepseek() -> DeepseekV2ForCausalLM:
    """Two layers of latent attention (MLA): every worker holds the same latents of 512 + 64 values."""
    shape = {**SHAPE, "num_key_value_heads": 4, "dtype": "bfloat16", "initializer_range": 0.2}
    config = DeepseekV2Config(
        num_hidden_layers=2,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        **shape,
    )
    return DeepseekV2ForCausalLM(config).to(torch.bfloat16)


MODELS = {"llama": llama, "wide_llama": wide_llama, "phi3": phi3, "gemma3": gemma3, "deepseek": deepseek}
MODELS |= {"uneven_gemma3": uneven_gemma3, "gpt_oss": gpt_oss, "qwen3_next": qwen3_next, "cohere2": cohere2}
MODELS["mistral"] = mistral


def save(kind: str, folder: str, seed: int) -> None:
    torch.manual_seed(seed)
    MODELS[kind]().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2")
    fast.save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2], 0)
