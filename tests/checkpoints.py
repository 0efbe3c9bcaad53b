"""Tiny random checkpoints, seeded: the sources that tests pack, serve and compare.

Each function writes a folder that stock vLLM opens (Qwen3-MoE, GLM4-MoE) or that has the official tensor names, dtypes
and config keys (DeepSeek), and returns its path. Same arguments, same bytes.
"""

from __future__ import annotations

import functools
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<|{{ m['role'] if m['role'] == 'user' else 'assistant' }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Tensors = dict[str, torch.Tensor]


def qwen3_moe(
    path: Path,
    *,
    dtype: str = "bfloat16",
    experts: int = 8,
    top_k: int = 2,
    layers: int = 4,
    hidden: int = 128,
    intermediate: int = 64,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Qwen3-MoE, every layer sparse."""
    heads, kv_heads, head_dim = 4, 2, 32
    config: dict[str, Any] = dict(  # noqa: C408
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, num_experts=experts,
        num_experts_per_tok=top_k, moe_intermediate_size=intermediate, intermediate_size=intermediate,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], hidden_act="silu", rms_norm_eps=1e-6,
        vocab_size=VOCAB, max_position_embeddings=2048, rope_theta=10000.0, tie_word_embeddings=False,
        torch_dtype=dtype, bos_token_id=0, eos_token_id=1, attention_bias=False,
    )  # fmt: skip
    randn = _normal(seed, DTYPES[dtype])
    ones = functools.partial(torch.ones, dtype=DTYPES[dtype])
    tensors: Tensors = {
        "model.embed_tokens.weight": randn(VOCAB, hidden, scale=1.0),
        "lm_head.weight": randn(VOCAB, hidden, scale=0.3),
        "model.norm.weight": ones(hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= _attention(prefix, randn, ones, hidden, heads, kv_heads, head_dim)
        tensors[prefix + "self_attn.q_norm.weight"] = ones(head_dim)
        tensors[prefix + "self_attn.k_norm.weight"] = ones(head_dim)
        tensors[prefix + "mlp.gate.weight"] = randn(experts, hidden, scale=0.5)
        for expert in range(experts):
            tensors |= _mlp(f"{prefix}mlp.experts.{expert}.", randn, hidden, intermediate, 0.2)
    return _write(path, config, tensors, shards, tokenizer=True)


def glm4_moe_mtp(
    path: Path,
    *,
    dtype: str = "bfloat16",
    experts: int = 8,
    top_k: int = 2,
    layers: int = 3,
    hidden: int = 128,
    intermediate: int = 64,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """GLM4-MoE: grouped sigmoid routing, shared expert, dense first layer, one MTP layer whose block is sparse too."""
    heads, kv_heads, head_dim, dense = 4, 2, 32, 256
    config: dict[str, Any] = dict(  # noqa: C408
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, n_routed_experts=experts,
        n_shared_experts=1, num_experts_per_tok=top_k, moe_intermediate_size=intermediate, intermediate_size=dense,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        hidden_act="silu", rms_norm_eps=1e-5, vocab_size=VOCAB, max_position_embeddings=2048, rope_theta=10000.0,
        partial_rotary_factor=0.5, use_qk_norm=False, attention_bias=False, num_nextn_predict_layers=1,
        tie_word_embeddings=False, torch_dtype=dtype, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    randn = _normal(seed, DTYPES[dtype])
    ones = functools.partial(torch.ones, dtype=DTYPES[dtype])
    embed, head = randn(VOCAB, hidden, scale=1.0), randn(VOCAB, hidden, scale=0.3)
    tensors: Tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": ones(hidden),
    }
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        tensors |= _attention(prefix, randn, ones, hidden, heads, kv_heads, head_dim)
        if layer == 0:
            tensors |= _mlp(prefix + "mlp.", randn, hidden, dense, 0.08)
            continue
        tensors[prefix + "mlp.gate.weight"] = randn(experts, hidden, scale=0.5)
        tensors[prefix + "mlp.gate.e_score_correction_bias"] = randn(experts, scale=0.02).float()
        for expert in range(experts):
            tensors |= _mlp(f"{prefix}mlp.experts.{expert}.", randn, hidden, intermediate, 0.2)
        tensors |= _mlp(prefix + "mlp.shared_experts.", randn, hidden, intermediate, 0.2)
    prefix = f"model.layers.{layers}."
    tensors |= {
        prefix + "enorm.weight": ones(hidden),
        prefix + "hnorm.weight": ones(hidden),
        prefix + "eh_proj.weight": randn(hidden, 2 * hidden, scale=0.08),
        prefix + "shared_head.norm.weight": ones(hidden),
        prefix + "shared_head.head.weight": head.clone(),
        prefix + "embed_tokens.weight": embed.clone(),
    }
    return _write(path, config, tensors, shards, tokenizer=True)


def deepseek_fp4(
    path: Path,
    *,
    experts: int = 8,
    drafter_experts: int = 4,
    top_k: int = 2,
    layers: int = 2,
    drafters: int = 1,
    hidden: int = 128,
    intermediate: int = 64,
    shards: int = 2,
    seed: int = 0,
) -> Path:
    """DeepSeek-V4.1: e2m1 experts, two a byte (low nibble first), one e8m0 scale per 32 inputs; nested config."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensors:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 122, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        return {"weight": codes.view(torch.int8), "scale": scales.view(torch.float8_e8m0fnu)}

    config = _deepseek_config(experts, drafter_experts, top_k, layers, drafters, hidden, intermediate, (32, 32), "fp4")
    counts = (experts, drafter_experts)
    return _write_deepseek(path, config, matrix, generator, counts, layers, drafters, hidden, intermediate, shards)


def deepseek_fp8(
    path: Path,
    *,
    block: tuple[int, int] = (128, 128),
    experts: int = 8,
    drafter_experts: int = 4,
    top_k: int = 2,
    layers: int = 2,
    drafters: int = 1,
    hidden: int = 192,
    intermediate: int = 64,
    shards: int = 2,
    seed: int = 0,
) -> Path:
    """DeepSeek with e4m3 experts and one e8m0 scale a block; the blocks at the edges may be smaller."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensors:
        weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        scales = torch.randint(118, 122, shape, generator=generator, dtype=torch.uint8)
        return {"weight": weight, "scale": scales.view(torch.float8_e8m0fnu)}

    config = _deepseek_config(experts, drafter_experts, top_k, layers, drafters, hidden, intermediate, block, "fp8")
    counts = (experts, drafter_experts)
    return _write_deepseek(path, config, matrix, generator, counts, layers, drafters, hidden, intermediate, shards)


def _deepseek_config(
    experts: int,
    drafter_experts: int,
    top_k: int,
    layers: int,
    drafters: int,
    hidden: int,
    intermediate: int,
    block: tuple[int, int],
    expert_dtype: str,
) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block),
            "scale_fmt": "ue8m0", "expert_dtype": expert_dtype,
        },
        "text_config": {
            "model_type": "deepseek_v41_text", "vocab_size": VOCAB, "hidden_size": hidden,
            "moe_intermediate_size": intermediate, "num_hidden_layers": layers, "hidden_act": "silu",
            "swiglu_limit": 10.0, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": top_k,
            "num_nextn_predict_layers": drafters, "dspark_n_routed_experts": drafter_experts,
            "dspark_num_experts_per_tok": min(top_k, drafter_experts),
        },
    }  # fmt: skip


def _write_deepseek(
    path: Path,
    config: dict[str, Any],
    matrix: Callable[[int, int], Tensors],
    generator: torch.Generator,
    experts: tuple[int, int],
    layers: int,
    drafters: int,
    hidden: int,
    intermediate: int,
    shards: int,
) -> Path:
    shapes = {"w1": (intermediate, hidden), "w2": (hidden, intermediate), "w3": (intermediate, hidden)}
    bf16 = torch.bfloat16
    tensors: Tensors = {"embed.weight": torch.randn(VOCAB, hidden, generator=generator).to(bf16)}
    blocks = [(f"layers.{i}.ffn.", experts[0]) for i in range(layers)]
    blocks += [(f"mtp.{i}.ffn.", experts[1]) for i in range(drafters)]
    for prefix, count in blocks:
        tensors[prefix + "gate.weight"] = torch.randn(count, hidden, generator=generator).to(bf16)
        for name in [f"experts.{expert}." for expert in range(count)] + ["shared_experts."]:
            for leaf, shape in shapes.items():
                for kind, value in matrix(*shape).items():
                    tensors[f"{prefix}{name}{leaf}.{kind}"] = value
    return _write(path, config, tensors, shards, tokenizer=False)


def _normal(seed: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return randn


def _attention(
    prefix: str,
    randn: Callable[..., torch.Tensor],
    ones: Callable[[int], torch.Tensor],
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> Tensors:
    return {
        prefix + "input_layernorm.weight": ones(hidden),
        prefix + "post_attention_layernorm.weight": ones(hidden),
        prefix + "self_attn.q_proj.weight": randn(heads * head_dim, hidden, scale=0.08),
        prefix + "self_attn.k_proj.weight": randn(kv_heads * head_dim, hidden, scale=0.08),
        prefix + "self_attn.v_proj.weight": randn(kv_heads * head_dim, hidden, scale=0.08),
        prefix + "self_attn.o_proj.weight": randn(hidden, heads * head_dim, scale=0.08),
    }


def _mlp(prefix: str, randn: Callable[..., torch.Tensor], hidden: int, inner: int, scale: float) -> Tensors:
    return {
        prefix + "gate_proj.weight": randn(inner, hidden, scale=scale),
        prefix + "up_proj.weight": randn(inner, hidden, scale=scale),
        prefix + "down_proj.weight": randn(hidden, inner, scale=scale),
    }


def _write(path: Path, config: dict[str, Any], tensors: Tensors, shards: int, *, tokenizer: bool) -> Path:
    """Write the folder. One shard: no index; two: both mixed; more: the first holds no routed expert."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (path / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}\n')
    if tokenizer:
        for name, text in _tokenizer_files().items():
            (path / name).write_text(text)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = list(tensors)
    groups: list[list[str]] = []
    if shards > 2:
        groups.append([name for name in names if ".experts." not in name and "norm" not in name])
        names = [name for name in names if name not in set(groups[0])]
    parts = shards - len(groups)
    groups += [names[part * len(names) // parts : (part + 1) * len(names) // parts] for part in range(parts)]
    weight_map: dict[str, str] = {}
    for shard, mine in enumerate(groups):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in mine}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return path


@functools.lru_cache(maxsize=1)
def _tokenizer_files() -> dict[str, str]:
    """A byte-level BPE of VOCAB tokens trained on a few files of the standard library."""
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    corpus = [(library / name).read_text() for name in ("argparse.py", "datetime.py", "inspect.py", "typing.py")
              if (library / name).is_file()]  # fmt: skip
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise AssertionError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB}")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config, indent=1) + "\n"}
