"""The rows of the table of families: small models of each family that vLLM runs here, and settings that matter to KV.

Needs no vLLM: `family_models.py` builds the models, `family_table.py` runs the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

VOCABULARY = 512
WORDS = 500
"""Tokens below are words of prompts."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HYBRID = {"disable_hybrid_kv_cache_manager": False}
ONE_PROCESS = {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
"""As with one GPU. On a CPU vLLM else has a worker's process, whose block size of such a model the scheduler misses: it
divides prompts elsewhere, and vLLM's own cache misses most states."""
PREFIXES = {"enable_prefix_caching": True, **HYBRID}
STATES = {**PREFIXES, **ONE_PROCESS}
WINDOW, FULL = "sliding_attention", "full_attention"


def layers(kinds: str, **named: str) -> list[str]:
    """The kinds of layers, one letter each: f for full attention, s for a sliding window."""
    names = {"f": FULL, "s": WINDOW, "c": "chunked_attention", "l": "linear_attention", **named}
    return [names[kind] for kind in kinds]


@dataclass(frozen=True)
class Family:
    """A model to build: its type in transformers, what its configuration has beside `SHAPE`, and how vLLM runs it.

    `keeps` names what vLLM keeps of a prompt. `engine` are arguments of vLLM. `exception` is the reason why less than
    96 % of such a model comes back, or other outputs.
    """

    model_type: str
    keeps: str = "attention"
    config: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    exception: str = ""


def windows(model_type: str, kinds: str = "sfsf", window: int = 256, **config: Any) -> Family:
    """A model with sliding windows."""
    shape = {"num_hidden_layers": len(kinds), "layer_types": layers(kinds), "sliding_window": window}
    return Family(model_type, "windows", {**shape, **config}, HYBRID)


def moe(model_type: str, **config: Any) -> Family:
    """A mixture of experts with full attention."""
    return Family(model_type, config={**MOE, **config})


CONVOLUTIONS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": layers("fkff", k="conv"),
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 128,
    "block_dim": 128,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}


def states(model_type: str, **config: Any) -> Family:
    """A model with linear attention, which vLLM computes in bfloat16 alone on a CPU."""
    shape = {"num_hidden_layers": 4, "layer_types": layers("lllf"), **LINEAR}
    return Family(model_type, "states", {**shape, **config}, STATES, "bfloat16")


def mamba(model_type: str, **config: Any) -> Family:
    """A model with layers of Mamba 2. On a CPU vLLM cannot store a state within a step (`support_engine.py`)."""
    return Family(model_type, "states", {"num_hidden_layers": 4, **config}, {**STATES, "mamba_in_steps": True})


HYBRIDS: dict[str, Family] = {
    "mamba2": mamba("mamba2", num_hidden_layers=2, state_size=16, expand=2, num_heads=8, n_groups=1, chunk_size=64),
    "granite4": mamba(
        "granitemoehybrid",
        **MAMBA,
        layer_types=layers("mfmf", m="mamba", f="attention"),
        num_local_experts=0,
        shared_intermediate_size=256,
    ),
    "falcon_h1": mamba("falcon_h1", **MAMBA, mamba_d_ssm=256, key_multiplier=4.0, attention_out_multiplier=4.0),
    "nemotron_h": mamba(
        "nemotron_h",
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=64,
    ),
}
FAMILIES: dict[str, Family] = {
    **HYBRIDS,
    **{
        name: Family(name)
        for name in (
            *("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "stablelm", "gemma", "smollm3", "seed_oss"),
            *("starcoder2", "hunyuan_v1_dense", "ernie4_5", "apertus", "arcee"),
        )
    },
    "glm4": Family("glm4", config={"partial_rotary_factor": 0.5}),
    "opt": Family("opt", config={"ffn_dim": 256, "word_embed_proj_dim": 128, "do_layer_norm_before": True}),
    "gpt2": Family("gpt2", config={"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 4096}),
    "bloom": Family("bloom", config={"n_layer": 2, "n_head": 4, "tie_word_embeddings": True}),
    "cohere": Family("cohere", config={"logit_scale": 1.0}),
    "phi3": Family("phi3", config={"original_max_position_embeddings": 4096}),
    "mixtral": moe("mixtral"),
    "qwen2_moe": moe("qwen2_moe", shared_expert_intermediate_size=64, decoder_sparse_step=1),
    "qwen3_moe": moe("qwen3_moe", decoder_sparse_step=1),
    "olmoe": moe("olmoe"),
    "granitemoe": moe("granitemoe"),
    "glm4_moe": moe(
        "glm4_moe", n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "mistral with a window": Family("mistral", "windows", {"sliding_window": 256, "num_hidden_layers": 4}, HYBRID),
    "gemma2": windows("gemma2", query_pre_attn_scalar=32, initializer_range=0.15, tie_word_embeddings=True),
    "gemma3": windows("gemma3_text", query_pre_attn_scalar=32, initializer_range=0.15),
    "olmo3": windows("olmo3"),
    "exaone4": windows("exaone4", "sssf", sliding_window_pattern="LLLG"),
    "cohere2": windows("cohere2", logit_scale=1.0, sliding_window_pattern=2),
    "gpt_oss": Family(
        "gpt_oss",
        "windows",
        {**MOE, "num_hidden_layers": 4, "layer_types": layers("sfsf"), "sliding_window": 128, "rope_scaling": None},
        HYBRID,
        dtype="bfloat16",
    ),
    "llama4": Family(
        "llama4_text",
        "chunks",
        {
            **MOE,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 256,
            "attention_chunk_size": 256,
            "layer_types": layers("cccf"),
            "no_rope_layers": [1, 1, 1, 0],
            "moe_layers": [1, 3],
            "interleave_moe_layer_step": 2,
        },
        HYBRID,
    ),
    "qwen3_next": states("qwen3_next", **MOE, shared_expert_intermediate_size=64, decoder_sparse_step=1),
    "lfm2": Family("lfm2", "states", CONVOLUTIONS, STATES, exception="vLLM's own cache changes outputs likewise"),
}


@dataclass(frozen=True)
class Row:
    """A row of the table: a model, arguments of vLLM, and what goes with each question.

    `parts` are folders, the model's or others beside it, and what `family_models.py` makes there; `{folder}` in
    arguments is where they are. `control` goes with the questions of a second control, which are those measured.
    `exception` is why less comes back, or another output.
    """

    name: str
    family: Family
    engine: dict[str, Any]
    ask: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] | None = None
    parts: dict[str, str] = field(default_factory=dict)
    exception: str = ""


def plain(name: str, family: Family) -> Row:
    """A model as vLLM serves it by default."""
    engine = {"max_model_len": 4096, "dtype": family.dtype, **family.engine}
    return Row(name, family, engine, exception=family.exception)


def setting(name: str, model: str, engine: dict[str, Any], **more: Any) -> Row:
    """A model of `FAMILIES` with other arguments."""
    row = plain(name, FAMILIES[model])
    return replace(row, engine=row.engine | engine, **more)


def drafts(method: str, **config: Any) -> dict[str, Any]:
    """Arguments for speculative decoding."""
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3} | config}


OFF = "vLLM leaves `enable_prefix_caching` off for models of states alone; set it to `true`"
MTP = drafts("mtp", num_speculative_tokens=1)


def settings() -> list[Row]:
    """Models with settings that change what is kept, how, or under which key."""
    sounds = {"trust_remote_code": True, "limit_mm_per_prompt": {"audio": 1}}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    return [
        setting("llama, fp8 keys and values", "llama", {"kv_cache_dtype": "fp8"}),
        setting("llama, n-gram speculation", "llama", drafts("ngram", prompt_lookup_max=3)),
        setting("llama, EAGLE", "llama", drafts("eagle", model="{folder}/eagle"), parts={"eagle": "eagle"}),
        setting("llama, draft model", "llama", drafts("draft_model", model="{folder}/draft"), parts={"draft": "llama"}),
        setting(
            "llama, LoRA", "llama", lora, ask={"adapter": "{folder}/adapter"}, control={}, parts={"adapter": "adapter"}
        ),
        setting("glm4_moe, MTP", "glm4_moe", MTP, parts={"model": "mtp"}),
        setting("ultravox", "llama", sounds, ask={"do": "listen"}, parts={"model": "ultravox"}),
        setting("llama, cache salt", "llama", {}, ask={"salt": "a tenant"}),
        setting("llama, embedding", "llama", {"runner": "pooling", "convert": "embed"}, ask={"do": "embed"}),
        setting("llama, two blocks a chunk", "llama", {"connector": {"blocks_per_chunk": 2}}),
        setting("llama, four blocks a chunk", "llama", {"connector": {"blocks_per_chunk": 4}}),
        setting("gemma3, two blocks a chunk", "gemma3", {"connector": {"blocks_per_chunk": 2}}),
        setting("mamba2, as vLLM sets it", "mamba2", {"enable_prefix_caching": None}, exception=OFF),
        setting("llama, two workers", "llama", {"tensor_parallel_size": 2}),
    ]


def rows() -> dict[str, Row]:
    """Every row by its name."""
    found = [*(plain(name, family) for name, family in FAMILIES.items()), *settings()]
    return {row.name: row for row in found}


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.2,
}


def latent(model_type: str, **config: Any) -> Family:
    """A model with latent attention (MLA)."""
    dense = {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}
    return Family(model_type, "latents", {**LATENT, **dense, **config}, dtype="bfloat16")


def gpu_rows() -> dict[str, Row]:
    """Rows that vLLM runs on a GPU only, by name."""
    sparse = {
        "q_lora_rank": 256,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "num_attention_heads": 64,
    }
    kimi = {"num_hidden_layers": 4, "layer_types": layers("llfl"), "linear_num_heads": 4, "linear_head_dim": 128}
    found = {
        "deepseek_v2": latent("deepseek_v2"),
        "deepseek_v3": latent("deepseek_v3", first_k_dense_replace=1),
        "deepseek_v32": latent("deepseek_v32", **sparse, num_key_value_heads=64),
        "kimi_linear": latent("kimi_linear", **kimi),
        "olmo_hybrid": states("olmo_hybrid", linear_num_value_heads=2),
        **{name: replace(family, dtype="bfloat16", engine=PREFIXES) for name, family in HYBRIDS.items()},
    }
    rows = [plain(name, replace(family, engine=family.engine | ONE_PROCESS)) for name, family in found.items()]
    rows.append(replace(rows[1], name="deepseek_v3, MTP", engine=rows[1].engine | MTP, parts={"model": "mtp"}))
    rows.append(setting("llama, two stages", "llama", {"pipeline_parallel_size": 2, "dtype": "bfloat16"}))
    return {row.name: row for row in rows}


SGLANG_RELEASE, SGLANG_DAY = "0.5.23", "27 November 2026"
SGLANG = (
    *("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "stablelm", "gemma", "starcoder2", "ernie4_5", "arcee"),
    *("glm4", "phi3", "mixtral", "qwen3_moe", "granitemoe"),
)
"""Families that SGLang runs on a CPU, for `tests/sglang/test_families.py`, and the day on which all of them passed."""
