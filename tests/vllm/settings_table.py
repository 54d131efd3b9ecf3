"""What each setting of vLLM has to do with K and V: read once for each release that is tested. Settings of a class by
reason. A setting that stands nowhere fails its test: read what it does; if another value of it gives other bytes, it
belongs into the namespace."""

NAMED = "it is a field of the namespace, or in one"
SHOWN = "another field shows it: the model's configuration, weights, layers, pages, keys"
NONE = "the same formula of the same inputs: speed, memory, place, what is kept, what happens to outputs"

WITHOUT_EFFECT = (
    *("SchedulerConfig", "DeviceConfig", "LoadConfig", "OffloadConfig", "UVAOffloadConfig", "PrefetchOffloadConfig"),
    *("ObservabilityConfig", "LoggingConfig", "ProfilerConfig", "WatchdogConfig", "FaultToleranceConfig"),
    *("StructuredOutputsConfig", "ReasoningConfig", "WatermarkConfig", "PoolerConfig", "AuxOutputConfig"),
    *("CompilationConfig", "PassConfig", "DynamicShapesConfig", "EPLBConfig", "EngramConfig", "HiSparseConfig"),
    *("KVTransferConfig", "KVEventsConfig", "ECTransferConfig", "EncoderCacheManagerConfig", "WeightTransferConfig"),
    *("IrOpPriorityConfig",),
)
"""Classes of which no setting changes what K and V are computed from. How weights are loaded is a field of its own."""
PARTS = ("QuantizationConfigArgs", "QuantSpec", "QuantKey", "ScalarType", "ScaleDesc")
"""Classes whose whole values are in a field: `quantization_config`."""

SETTINGS = {
    "VllmConfig": {
        NAMED: "model_config cache_config parallel_config load_config attention_config mamba_config kernel_config "
        "lora_config speculative_config diffusion_config",
        SHOWN: "quant_config",
        NONE: "scheduler_config device_config offload_config aux_output_config engram_config watermark_config "
        "structured_outputs_config observability_config logging_config compilation_config profiler_config "
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config additional_config "
        "instance_id optimization_level performance_mode weight_transfer_config shutdown_timeout watchdog_config",
    },
    "ModelConfig": {
        NAMED: "model dtype revision code_revision quantization quantization_config",
        SHOWN: "hf_config hf_text_config hf_config_path hf_overrides model_weights runner convert model_impl "
        "model_class_overrides config_format disable_sliding_window max_model_len spec_target_max_model_len "
        "multimodal_config tokenizer tokenizer_revision tokenizer_mode enable_prompt_embeds "
        "word_embeddings_untied_by_checkpoint is_submodel_config trust_remote_code",
        NONE: "seed allowed_local_media_path allowed_media_domains allow_deprecated_quantization enforce_eager "
        "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_cascade_attn "
        "skip_tokenizer_init served_model_name hf_token generation_config override_generation_config "
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator logits_processors io_processor_plugin renderer_num_workers "
        "pooler_config",
    },
    "MultiModalConfig": {
        NAMED: "mm_processor_kwargs media_io_kwargs mm_encoder_attn_dtype video_pruning_rate video_pruning_method "
        "mm_encoder_fp8_scale_path",
        SHOWN: "mm_hasher_algorithm interleave_mm_strings enable_mm_embeds",
        NONE: "language_model_only limit_per_prompt mm_device_do_normalize mm_processor_cache_gb "
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling "
        "mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb",
    },
    "CacheConfig": {
        NAMED: "cache_dtype prefix_caching_hash_algo",
        SHOWN: "block_size user_specified_block_size kv_cache_layout prefix_match_unit sliding_window "
        "kv_cache_dtype_skip_layers mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype "
        "mamba_ssm_cache_dtype replayssm_buffer_len use_replayssm use_kda_recoverssm hash_block_size "
        "effective_attention_block_size swa_bounded_replay is_attention_free _block_size_resolved",
        NONE: "gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching prefix_cache_retention_interval "
        "mamba_cache_mode enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
        "kv_cache_max_concurrency cache_hit_alignment_tokens kv_sharing_fast_prefill kv_cache_memory_bytes "
        "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
    },
    "ParallelConfig": {
        NAMED: "cp_kv_cache_interleave_size",
        SHOWN: "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size dcp_kv_cache_interleave_size world_size rank worker_cls worker_extension_cls",
        NONE: "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb is_moe_model enable_hc_sp "
        "enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb eplb_config "
        "expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce "
        "enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization "
        "ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend master_addr master_port "
        "node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds _data_parallel_master_port_list "
        "_coord_store_port dcp_comm_backend dcp_q_replicate _allow_auto_resolve_cp_interleave_size "
        "data_parallel_index _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config",
    },
    "AttentionConfig": {
        NAMED: "use_prefill_query_quantization disable_flashinfer_q_quantization",
        SHOWN: "backend backend_per_kind indexer_kv_dtype",
        NONE: "minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
        "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend "
        "indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa "
        "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
        "flex_attn_kv_block_size trtllm_ragged_backend minimax_m3_indexer_cp indexer_tp_shard_min_rows",
    },
    "MambaConfig": {
        NAMED: "enable_stochastic_rounding",
        NONE: "backend stochastic_rounding_philox_rounds ssu_algorithm",
    },
    "KernelConfig": {
        NAMED: "moe_backend linear_backend linear_backend_per_quant",
        NONE: "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
        "enable_jit_warmup sparse_indexer_topk_backend monokernel",
    },
    "LoRAConfig": {
        NAMED: "lora_dtype target_modules enable_tower_connector_lora enable_moe_shared_loras",
        SHOWN: "default_mm_loras",
        NONE: "max_lora_rank max_loras fully_sharded_loras max_cpu_loras specialize_active_lora "
        "enable_mixed_moe_lora_format max_lora_cls_labels",
    },
    # Pages of a draft are those of its own layers; what it proposes is verified by the model.
    "SpeculativeConfig": {
        SHOWN: "model method num_speculative_tokens quantization kv_cache_dtype attention_backend revision "
        "code_revision draft_model_config draft_load_config target_model_config draft_tensor_parallel_size "
        "tensor_parallel_size max_model_len draft_lm_head_quantization",
        NONE: "enforce_eager moe_backend index_share_for_mtp_iteration disable_padded_drafter_batch "
        "disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max "
        "prompt_lookup_min parallel_drafting target_parallel_config num_speculative_tokens_per_batch_size "
        "draft_parallel_config suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
        "dspark_draft_topk disable_lookahead_block_hashes xpress_topc fly_window_size fly_entropy_threshold "
        "fly_entropy_top_k",
    },
    "DiffusionConfig": {NAMED: "canvas_length max_denoising_steps"},
}

VARIABLES_SHOWN = """
    VLLM_KV_CACHE_LAYOUT VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_PP_LAYER_PARTITION VLLM_PLUGINS
    VLLM_TEST_FORCE_LOAD_FORMAT VLLM_MODEL_REDIRECT_PATH VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_TARGET_DEVICE
    VLLM_USE_V2_MODEL_RUNNER VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION
    VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_USE_FASTOKENS
"""
"""Variables of vLLM that another field shows."""
VARIABLES_WITHOUT_EFFECT = """
    VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS CMAKE_BUILD_TYPE VERBOSE CUDA_HOME LD_LIBRARY_PATH LOCAL_RANK
    CUDA_VISIBLE_DEVICES NO_COLOR FORCE_COLOR VLLM_USE_PRECOMPILED* VLLM_SKIP_* VLLM_DOCKER_* VLLM_BUILD_* VLLM_IMAGE_*
    VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_USE_MODELSCOPE VLLM_LOG*
    VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_NCCL_* VLLM_CUDART_SO_PATH VLLM_ENGINE_READY_TIMEOUT_S VLLM_CHAT_TEMPLATE_*
    VLLM_API_KEY VLLM_DEBUG_* S3_* VLLM_USAGE_* VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_CONFIGURE_LOGGING
    VLLM_TRACE_FUNCTION VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV
    VLLM_CPU_ATTN_SPLIT_KV VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_USE_RAY_* VLLM_RAY_* VLLM_XPU_PP_MICROBATCH
    VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_WORKER_* VLLM_ASSETS_* VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT
    VLLM_MEDIA_* VLLM_MAX_* VLLM_XLA_* VLLM_TPU_USING_PATHWAYS VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_HTTP_* VLLM_LORA_* VLLM_USE_TRITON_AWQ VLLM_TRITON_* VLLM_ALLOW_RUNTIME_LORA_UPDATING
    VLLM_USE_HW_AGNOSTIC VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL VLLM_DISABLE_PYNCCL
    VLLM_USE_OINK_OPS VLLM_REPLICATE_EMBED VLLM_GPU_SYNC_CHECK VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES
    VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_PATTERN_MATCH_DEBUG VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK
    VLLM_FORCE_AOT_LOAD VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_FLASHINFER_SAMPLER VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
    VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE
    VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_TRITON_GEMM
    VLLM_ROCM_AITER_* VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ENABLE_V1_MULTIPROCESSING VLLM_DISABLE_COMPILE_CACHE
    VLLM_USE_LAYERNAME VLLM_USE_RUST_* VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
    VLLM_DP_* VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_MARLIN_USE_ATOMIC_ADD VLLM_HUMMING_MOE_GEMM_TYPE
    VLLM_V1_USE_OUTLINES_CACHE VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES
    VLLM_DCP_Q_REPLICATE VLLM_DEEP_GEMM_WARMUP VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_MOE_SKIP_PADDING VLLM_KIMI_K3_*
    VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_ENABLE_GEMM_RS
    VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_USE_FLASHINFER_MOE_INT4 VLLM_XGRAMMAR_CACHE_MB
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_NIXL_* VLLM_P2P_* VLLM_EC_* VLLM_MOONCAKE_* MOONCAKE_*
    VLLM_FLASHINFER_AUTOTUNE_* VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
    VLLM_TOOL_* VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_HAS_FLASHINFER_CUBIN VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_ALLREDUCE_*
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_TUNED_CONFIG_FOLDER VLLM_ENABLE_STARTUP_PLAN VLLM_GPT_OSS_*
    VLLM_SYSTEM_START_DATE VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_DEEPEP_* VLLM_DBO_COMM_SMS
    VLLM_ENABLE_INDUCTOR_* VLLM_USE_NCCL_SYMM_MEM VLLM_GC_DEBUG VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_WEIGHT_OFFLOADING_*
    VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_DISABLE_LOG_LOGO
    VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH VLLM_ELASTIC_EP_*
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_USE_SAMPLER_KERNEL
    VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_DIRECT_* VLLM_USE_SPINLOOP_EXT VLLM_GPU_NIC_PCIE_MAPPING
    VLLM_NIC_SELECTION_VARS VLLM_ENABLE_HPC_OPS VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_REQUEST_BODY_LOG_LEVEL
    VLLM_TRITON_USE_TD
"""
"""Names of variables, or the beginnings of families of them, that change no K and no V."""
