"""Every model type of transformers as a tiny model with random weights, and how it fares.

A configuration is made of its type's defaults, with small numbers for the attributes that most
types name alike (`SMALL`), and for some types more (`OVERRIDES`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto import modeling_auto

from splitkv import UnsupportedProblem
from splitkv.integrations import transformers as integration
from splitkv.testing import assert_close

BATCH, SEQLEN, VOCABULARY = 2, 12, 99
LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_DIM = 2, 4, 2, 64, 16
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "n_embed"), WIDTH
    ),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "emb_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_encoder_layers", "encoder_num_layers", "decoder_num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads",), KV_HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "prefix_dense_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.2),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"), 0.0),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "classifier_dropout"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.0),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_nextn_predict_layers": 0,
    "use_cache": False,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gptj", "codegen"), {"rotary_dim": 16}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "reformer": {"is_decoder": True},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "esmc": {"num_key_value_heads": HEADS},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"),
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": WIDTH},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    **dict.fromkeys(("longformer", "led"), {"attention_window": 8}),
    "pegasus_x": {"block_size": 4, "num_global_tokens": 4},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"], "moe_latent_size": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "phimoe": {"sliding_window": None},
}
MOST_PARAMETERS = 8_000_000
MAPPINGS = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_MAPPING,
)


class NotBuilt(Exception):
    """Transformers makes no small model of a type here, or eager attention cannot run it."""


def config_of(model_type: str) -> Any:
    """The tiny configuration of a type."""
    return CONFIG_MAPPING[model_type](**small_of(CONFIG_MAPPING[model_type]))


def small_of(kind: Any) -> dict[str, Any]:
    """The arguments of a configuration's class that are small, those of its parts included."""
    names = set(inspect.signature(kind.__init__).parameters)
    names |= set(getattr(kind, "__dataclass_fields__", ()))
    small = {name: value for name, value in SMALL.items() if name in names}
    if "kv_lora_rank" in names:  # which has keys for every head
        small |= {n: HEADS for n in ("num_key_value_heads",) if n in names}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if name in names and hasattr(part, "model_type") and part.model_type in CONFIG_MAPPING:
            small[name] = part(**small_of(part))
    return small | OVERRIDES.get(kind.model_type, {})


def classes_of(config: Any) -> list[Any]:
    """The models of a configuration, with a head first, in the order of `MAPPINGS`."""
    found = [mapping[type(config)] for mapping in MAPPINGS if type(config) in mapping]
    return [kind[0] if isinstance(kind, tuple) else kind for kind in found]


def eager_of(model_type: str) -> Any:
    """A model of a type that runs with eager attention, the first that there is."""
    reasons = []
    with contextlib.redirect_stderr(None):
        for kind in classes_of(config := attempt_config(model_type)):
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
                if size > MOST_PARAMETERS:
                    raise NotBuilt(f"{size / 1e6:.0f} million parameters")
                eager = built(kind, config_of(model_type), "eager")
                with torch.no_grad():
                    answer(eager, questions_of(eager)["whole"])
                return eager
            except Exception as error:  # of any kind: it is transformers that raises it
                reasons.append(one_line(error))
    raise NotBuilt("; ".join(reasons) or "no model")


def attempt_config(model_type: str) -> Any:
    try:
        return config_of(model_type)
    except Exception as error:
        raise NotBuilt(one_line(error)) from error


def built(kind: Any, config: Any, name: str) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=name).eval()
    if model.config.model_type == "xmod":
        model.set_default_language("en_XX")
    return model


def one_line(error: BaseException) -> str:
    first = " ".join(str(error).split())
    return f"{type(error).__name__}: {first}"[:160]


@dataclass(frozen=True)
class Question:
    """What a model is run on; `valid` says which positions of its output count, all if None."""

    inputs: dict[str, Tensor]
    valid: Tensor | None = None


def questions_of(model: Any) -> dict[str, Question]:
    """Without padding, the same with another last token, and with padding on either side."""
    g = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"whole": Question({"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=g)})}
    if model.main_input_name != "input_ids":
        raise NotBuilt(f"takes {model.main_input_name}")
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQLEN), generator=g)
    decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters

    def ask(ids: Tensor, last: int | None = None, mask: Tensor | None = None) -> Question:
        inputs, target = {"input_ids": ids}, ids.clone()
        if last is not None:
            target[:, -1] = last
            inputs["input_ids"] = ids if decoder else target
        if decoder:
            inputs["decoder_input_ids"] = target
        if mask is not None:
            inputs["attention_mask"] = mask
        return Question(inputs, None if decoder or mask is None else mask.bool())

    right = torch.ones_like(ids)
    right[1, -5:] = 0
    left = right.flip(1)
    return {
        "whole": ask(ids),
        "another last token": ask(ids, last=4),
        "padded right": ask(ids.masked_fill(right == 0, 0), mask=right),
        "padded left": ask(ids.masked_fill(left == 0, 0), mask=left),
    }


def answer(model: Any, question: Question) -> Tensor:
    """Logits or last hidden states `[batch, positions, ..]`."""
    torch.manual_seed(2)
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = {n: x.to(kind) if x.is_floating_point() else x for n, x in question.inputs.items()}
    out = model(**inputs)
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(out, name, None), Tensor):
            return getattr(out, name)
    first = out[0] if isinstance(out, tuple) or hasattr(out, "to_tuple") else out
    if not isinstance(first, Tensor):
        raise NotBuilt("its output is no tensor")
    return first


def gradients(model: Any, question: Question) -> dict[str, Tensor]:
    model.zero_grad()
    out = answer(model, question)
    g = torch.Generator().manual_seed(3)
    (out * torch.randn(out.shape, generator=g).to(out.dtype)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Outcome:
    """equal, refused (with the reason), own (attention of the model's own), or not built."""

    kind: str
    said: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.said}".rstrip()


def outcome_of(model_type: str) -> Outcome:
    """Run a type with both; raises AssertionError where they differ, and what splitkv raised where
    it is no refusal."""
    try:
        AttentionMaskInterface.register("eager", eager_mask_of_any_type)
        integration.register()
        return _outcome_of(model_type)
    finally:
        AttentionMaskInterface.register("eager", eager_mask)
        integration.register()


def _outcome_of(model_type: str) -> Outcome:
    try:
        eager = eager_of(model_type)
        exact = exactly(eager)
        asked = questions_of(eager)
        expected = {}
        for name, question in asked.items():
            with torch.no_grad():
                expected[name] = attempt(lambda m, q=question: answer(m, q), eager, exact)
        of_whole = attempt(lambda m: gradients(m, asked["whole"]), eager, exact)
    except NotBuilt as error:
        return Outcome("not built", str(error))
    try:
        ours = built(type(eager), config_of(model_type), "splitkv")
    except KeyError as error:  # its attention is a class of a closed list
        if error.args == ("splitkv",):
            return Outcome("refused", "transformers: KeyError: 'splitkv'")
        raise
    ours.load_state_dict(eager.state_dict())
    refusals: dict[str, str] = {}
    ours_said: dict[str, Tensor] = {}
    not_run, calls = [], calls_of_splitkv()
    for name, question in asked.items():
        if isinstance(expected[name], str):
            not_run.append(name)
            continue
        try:
            with torch.no_grad():
                out = answer(ours, question)
        except (UnsupportedProblem, ValueError) as error:
            refusals[name] = refusal(error)
            continue
        pt, ref = expected[name]
        assert out.shape == ref.shape
        if question.valid is not None and out.shape[:2] == question.valid.shape:
            out, pt, ref = (x[question.valid] for x in (out, pt, ref))
        assert_close(out, ref, pt, name=f"{model_type}, {name}")
        ours_said[name] = out
    if "whole" in refusals:
        return Outcome("refused", refusals["whole"])
    expect_causal_where_eager_is(model_type, expected, ours_said)
    if isinstance(of_whole, str):
        not_run.append("gradients")
    else:
        compare_gradients(model_type, gradients(ours, asked["whole"]), *of_whole)
    parts = [f"{name} refused: {said}" for name, said in refusals.items()]
    if not_run:
        parts.append(f"eager attention does not run: {', '.join(not_run)}")
    return Outcome("equal" if calls else "own", "; ".join(parts))


NEW = 6  # tokens


def generation_of(model_type: str) -> dict[str, str]:
    """What becomes of greedy generation, with a cache that grows and with a static one, without
    padding and with: "equal", why it is refused, or nothing where eager attention does not run."""
    integration.register()
    model, found = eager_of(model_type), {}
    for cache in (None, "static"):
        for padding in (0, 4):
            try:
                eager = generated(model, "eager", cache, padding)
            except Exception:  # of any kind: it is transformers that raises it
                continue
            name = f"{cache or 'growing'}, {padding} of padding"
            try:
                ours = generated(model, "splitkv", cache, padding)
            except (UnsupportedProblem, ValueError) as error:
                found[name] = refusal(error)
                continue
            assert torch.equal(ours.sequences, eager.sequences), f"{model_type}, {name}: tokens"
            for a, b in zip(ours.scores, eager.scores, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
            found[name] = "equal"
    return found


def generated(model: Any, name: str, cache: str | None, padding: int) -> Any:
    model.set_attn_implementation(name)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQLEN), generator=g)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
            cache_implementation=cache,
            disable_compile=True,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )


def attempt(run: Callable[[Any], Any], eager: Any, exact: Any) -> Any:
    """What eager attention gives in float32 and in float64, or why it does not."""
    try:
        pt = run(eager)
    except Exception as error:
        return one_line(error)
    with contextlib.suppress(Exception):  # of a model that mixes float32 into it
        ref = run(exact)
        if all(x.isfinite().all() for x in (ref.values() if isinstance(ref, dict) else [ref])):
            return pt, ref
    return run(nudged(eager)), pt


def nudged(model: Any) -> Any:
    """A copy whose every weight is off by half a unit in the last place or less."""
    near, g = copy.deepcopy(model), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in near.parameters():
            if p.is_floating_point():
                by = torch.finfo(p.dtype).eps * (torch.rand(p.shape, generator=g) - 0.5)
                p.mul_(1 + 2 * by.to(p.dtype))
    return near


def exactly(eager: Any) -> Any:
    """A copy in float64."""
    exact = copy.deepcopy(eager).double()
    with contextlib.suppress(Exception):  # models without experts
        exact.set_experts_implementation("eager")
    return exact


def eager_mask_of_any_type(*, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The mask of eager attention, with float32's least number in it.

    With float64's, a row that sees nothing turns into NaN in the models that take the softmax in
    float32.
    """
    mask = eager_mask(dtype=torch.float32, **options)
    return mask if mask is None else mask.to(dtype)


def refusal(error: BaseException) -> str:
    """Its first line, which has to be in the grammar of refusals."""
    lines = str(error).splitlines()
    said = [line.strip() for line in lines if ": expected " in line]
    if isinstance(error, ValueError) and not said:
        raise error
    return said[0] if said else " ".join(lines)


def expect_causal_where_eager_is(
    model_type: str, eager: dict[str, Any], ours: dict[str, Tensor]
) -> None:
    """The first token's output stays where it is when the last token changes."""
    pair = ("whole", "another last token")
    if all(name in ours for name in pair):
        first, second = (eager[name][0][:, 0] for name in pair)
        if torch.equal(first, second):
            first, second = (ours[name][:, 0] for name in pair)
            assert torch.equal(first, second), f"{model_type}: the first token sees the last"


def compare_gradients(
    model_type: str, ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    assert ours.keys() == eager.keys() == exact.keys()
    exact = {n: x for n, x in exact.items() if x.numel()}
    least = 1e-3 * max(x.abs().max().item() for x in exact.values())
    sizes = {n: max(x.abs().max().item(), least) for n, x in exact.items()}
    a, ref, pt = (
        torch.cat([of[n].flatten() / size for n, size in sizes.items()])
        for of in (ours, exact, eager)
    )
    assert_close(a, ref, pt, factor=3.0, name=f"{model_type}, gradients")


def calls_of_splitkv() -> list[str]:
    """The layers that call splitkv from now on."""
    calls: list[str] = []

    def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return integration.attention_forward(module, *args, **kwargs)

    AttentionInterface.register("splitkv", spy)
    return calls
