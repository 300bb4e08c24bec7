"""Small models of transformers with random weights, whose attention is the package's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fuzz.draw import Draw, Drawn
from fuzz.oracle import expect_close

WITHOUT_SDPA = ("gpt_oss", "gemma2")  # which it computes without the sink and the soft cap
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # scores far enough apart that a wrong mask shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODERS = ("bert", "roberta", "electra", "splinter", "xlm-roberta", "camembert")
DECODERS = (
    *("gpt2", "gpt_neox", "olmo2", "granite", "cohere", "starcoder2", "stablelm", "glm", "smollm3"),
    *("olmo", "persimmon", "nemotron", "helium", "ernie4_5", "seed_oss", "arcee"),
)
KNOWN = (
    *("llama", "llama4", "qwen2", "gemma2", "qwen3", "gemma3", "mistral", "phi", "phi3"),
    *("deepseek", "gpt_oss"),
)


@cache
def interfaces() -> None:
    """The package's attention and the definition's, by their names."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    from splitkv.integrations import transformers as ours

    def mask(**kwargs: Any) -> Any:
        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(**(kwargs | whole))

    ours.register()
    AttentionInterface.register("definition", definition)
    AttentionMaskInterface.register("definition", mask)


def definition(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """By the matrix of what is visible, in the type of the model; rows that see nothing give 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    s = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if attention_mask is None:
        attention_mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    s = s.masked_fill(~attention_mask, torch.finfo(s.dtype).min)
    if s_aux is not None:
        s = torch.cat([s, s_aux.to(s)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : key.shape[2]].masked_fill(~attention_mask, 0.0)
    return (p @ value).transpose(1, 2).contiguous(), None


@lru_cache(maxsize=64)
def made(name: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model and a copy of it in float64 that attends by definition."""
    interfaces()
    if name in KNOWN:
        from models import make_model

        model = make_model(name)
    else:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **SMALL)
        kind = AutoModel if name in ENCODERS else AutoModelForCausalLM
        model = kind.from_config(config, attn_implementation="eager").eval()
    model = model.to(device=device, dtype=dtype)
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("definition")
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the one that runs in float64
    return model, exact


def numbers(result: Any) -> Tensor:
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def attended(model: Any, name: str, run: Callable[[Any], Tensor]) -> Tensor:
    model.set_attn_implementation(name)
    return run(model)


def model(d: Draw) -> Drawn:
    v = d.variant
    name = v.choice((*KNOWN, *KNOWN, *DECODERS, *ENCODERS))
    way = v.choice(("whole", "padded", "cached", "packed", "gradient", "autocast"))
    dtype = v.choice((torch.float32, torch.float32, torch.bfloat16))
    if name in ENCODERS:
        way = "padded" if way in ("cached", "packed") else way
    if way in ("autocast", "gradient"):
        dtype = torch.float32
    batch, n = d.rng.randint(1, 3), d.rng.randint(2, 30)
    ids = torch.randint(3, 99, (batch, n), generator=d.generator).to(d.device)
    lengths = [n] * batch
    inputs: dict[str, Any] = {}
    side = d.rng.choice(("left", "right"))
    real = torch.ones(batch, n, dtype=torch.bool, device=d.device)
    if way == "padded" or (way in ("gradient", "autocast", "cached") and d.chance(0.4)):
        lengths = [n, *[d.rng.randint(1, n) for _ in range(batch - 1)]]
        side = "left" if way == "cached" else side
        for b, m in enumerate(lengths):
            real[b, slice(0, n - m) if side == "left" else slice(m, n)] = False
        inputs["attention_mask"] = real.long()
    cuts: list[int] = []
    if way == "packed":
        batch, ids, real = 1, ids[:1], real[:1]
        cuts = sorted({0, n, *[d.rng.randint(1, n) for _ in range(d.rng.randint(1, 3))]})
        places = [i for a, b in zip(cuts[:-1], cuts[1:], strict=True) for i in range(b - a)]
        inputs |= {"position_ids": torch.tensor([places], device=d.device), "use_cache": False}
    first = d.rng.randint(1, n) if way == "cached" else n
    weights = d.randn(batch, n)

    def run(model: Any) -> Tensor:
        if way == "cached":
            return in_steps(model)
        if way == "packed" and model is exact:
            pairs = zip(cuts[:-1], cuts[1:], strict=True)
            return torch.cat([numbers(model(ids[:, a:b], use_cache=False)) for a, b in pairs], 1)
        return numbers(model(ids, **inputs))

    def in_steps(model: Any) -> Tensor:
        """A prompt, then the rest of the tokens in steps of one or of several."""
        from transformers import DynamicCache

        from splitkv.integrations.transformers import CACHE_ARGUMENT

        cache, out, at = DynamicCache(config=model.config), [], 0
        rest = n - first
        for step in (first, *([1] * rest if n % 2 else [rest] * (rest > 0))):
            mask = inputs.get("attention_mask")
            given = {} if mask is None else {"attention_mask": mask[:, : at + step]}
            piece = ids[:, at : at + step]
            out.append(numbers(model(piece, **{CACHE_ARGUMENT: cache}, use_cache=True, **given)))
            at += step
        return torch.cat(out, 1)

    ours, exact = made(name, d.device, dtype)

    def result_of(model: Any) -> list[Tensor]:
        if way == "autocast":
            # the gradient's own types are of the model: looking at the result is enough
            if model is not exact:
                with torch.autocast(d.device, torch.bfloat16):
                    return [run(model)[real].float()]
            return [run(model)[real]]
        if way != "gradient":
            with torch.no_grad():
                return [run(model)[real]]
        out = run(model)
        loss = (out * weights.to(out)[..., None])[real].sum()
        found = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, found, allow_unused=True)
        of = [torch.zeros_like(p) if g is None else g for p, g in zip(found, grads, strict=True)]
        return [out[real].detach(), *of]

    def function(**kwargs: Any) -> list[Tensor]:
        ours.set_attn_implementation("splitkv")
        return [x.detach() for x in result_of(ours)]

    def judge(result: Any) -> None:
        wanted = [x.detach() for x in result_of(exact)]
        near = []
        for implementation in ("eager", "definition", "sdpa"):
            if implementation == "sdpa" and (name in WITHOUT_SDPA or not ours._supports_sdpa):
                continue
            ours.set_attn_implementation(implementation)
            near.append([x.detach() for x in (apart() if way == "packed" else result_of(ours))])
        for i, (x, ref, *pts) in enumerate(zip(result, wanted, *near, strict=True)):
            pts = [pt for pt in pts if not pt.isnan().any()]  # of rows that see nothing
            if ref.isnan().any() or not pts:
                raise RuntimeError("eager and the definition give NaN: not a question")
            where = "logits" if not i else f"gradient of parameter {i}"
            expect_close(where, x, ref, pts, 3.0 if i else 2.0)

    def apart() -> list[Tensor]:
        """The sequences one after another: eager attention of packed ones may see them all."""
        with torch.no_grad():
            pairs = zip(cuts[:-1], cuts[1:], strict=True)
            parts = [numbers(ours(ids[:, a:b], use_cache=False)) for a, b in pairs]
            return [torch.cat(parts, 1)[real]]

    told = {"model": name, "way": way, "dtype": dtype, "lengths": lengths, "side": side}
    told |= {"cuts": cuts, "first": first}
    return Drawn(f"transformers {way}", function, told, judge, again=way != "gradient")
