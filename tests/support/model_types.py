"""What becomes of every model type of transformers that `sweeping.py` can build.

As of transformers 5.23, and 5.24 where that is newer. A type that is not here has no model so
small, or one that takes other inputs than tokens or images, or a package that is not installed.
"""

from __future__ import annotations

from splitkv.integrations.transformers import CACHE_ARGUMENT

# Logits or hidden states and gradients are those of eager attention.
EQUAL = """
afmoe aimv2_vision_model albert apertus arcee aria_text axk1 bamba bart beam beit bert
bert-generation biogpt bitnet blenderbot blenderbot-small camembert chinese_clip_vision_model
clip_text_model clip_vision_model cohere cohere2 cohere2_moe ctrl cwm data2vec-text deepseek_v2
deepseek_v3 deepseek_v4 deit diffllama dinov2 dinov2_with_registers dinov3_vit distilbert dots1
dpr dpt electra embedding_gemma2 embedding_gemma2_text ernie ernie4_5 ernie4_5_moe esm esmc
eurobert exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma4 gemma4_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss
granite granite_docling_text granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared gte helium higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax ijepa internlm3 internvl_vision iquestcoder jais2 jamba jetmoe jina_embeddings_v3
kolibri1 laguna lfm2 lfm2_moe llama llama4_text m2m_100 marian mbart mellum mimo_v2_flash
minicpm3 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral
mistral4 mixtral mlcd mlcd_vision_model mllama mobilebert modernbert modernbert-decoder
molmo2_text moshi muse_glimmer_text muse_spark_text nanochat nemotron nemotron_h neomme nllb-moe
nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter opt pegasus pegasus_x
persimmon phi phi3 phimoe pixio plbart qianfan_ocr_vision qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text
recurrent_gemma roberta roberta-prelayernorm roc_bert sam3_vit_model sapiens2 seamless_m4t
seamless_m4t_v2 seed_oss siglip_vision_model smollm3 solar_open splinter stablelm starcoder2
step3p7 t5gemma tipsv2 tipsv2_text_model tipsv2_vision_model ultrabert vaultgemma vit vit_mae
vit_msn whisper xlm-roberta xlm-roberta-xl xmod youtu
"""

# Refused: the model has attention of its own beside the interface, which computes with the mask.
MATRIX = """
axk2 big_bird bigbird_pegasus bloom canine codegen convbert deepseek_v32 doge dots3_note_text
flava glm_moe_dsa gpt_neox_japanese hy_v4 ibert imagegpt led longformer megatron-bert
mistral_large4_text mpnet mpt mvp nystromformer rembert roformer squeezebert tapas trocr
visual_bert xglm
"""

# Refused: the model makes a mask matrix of its own.
MATRIX_GIVEN = """
layoutlm markuplm pixtral
"""

# Refused: a bias on the scores.
BIAS = """
inkling2_text inkling_text longt5 mt5 switch_transformers t5 umt5
"""

# Refused by transformers, whose model looks the name up in a list of its own.
CLOSED = """
data2vec-vision falcon git gpt_neo gptj sam_hq_vision_model sam_vision_model
"""

# Nothing to replace: no attention, or one that asks for no implementation.
OWN = """
bailing_hybrid deberta deberta-v2 falcon_mamba flaubert fnet fsmt lfm3 mamba mamba2 mra
openai-gpt prophetnet rwkv vitdet xlm xlnet xlstm yoso
"""

# Equal from transformers 5.24 on, and among the refused above before that.
EQUAL_SINCE_5_24 = """
codegen gptj
"""

OUTCOMES = {
    model_type: kind
    for kind, types in (
        ("equal", EQUAL),
        ("refused", MATRIX + MATRIX_GIVEN + BIAS + CLOSED),
        ("own", OWN),
        ("equal", EQUAL_SINCE_5_24 if CACHE_ARGUMENT == "cache" else ""),
    )
    for model_type in types.split()
}

# Decoders, experts, windows and chunks, latent and hybrid attention; encoders and decoders of both;
# encoders of tokens and of images; every reason for a refusal.
SAMPLED = """
llama gpt2 gpt_neox falcon opt phi gemma2 gemma3_text cohere2 mistral mixtral qwen2_moe gpt_oss
llama4_text deepseek_v3 qwen3_next nemotron_h gpt_bigcode modernbert-decoder bloom doge hy_v4
bart pegasus_x nllb-moe bigbird_pegasus whisper t5gemma t5 m2m_100
bert splinter clip_text_model roberta modernbert albert layoutlm
deit dinov2 mamba
"""
SAMPLE = SAMPLED.split()
