"""A compact Qwen3-MoE in plain torch, and its checkpoint in the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as fn

from chat import END_ID, PAD_ID, VOCAB


@dataclass(frozen=True, slots=True)
class Geometry:
    vocab: int = VOCAB
    hidden: int = 192
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 16
    top_k: int = 2
    intermediate: int = 128  # of one expert
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    positions: int = 4096

    def hf_config(self) -> dict:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate,
            "intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.positions,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
        }


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x: [..., D] -> [..., D], same dtype; the mean square is taken in f32."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain.to(x.dtype)


def rotary_table(g: Geometry, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """-> cos, sin: [tokens, D/2] f32."""
    inverse = g.rope_theta ** (-torch.arange(0, g.head_dim, 2, device=device).float() / g.head_dim)
    angle = torch.arange(tokens, device=device).float()[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, N, D]; the two halves of D are the pairs (NeoX order)."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def matrix(rows: int, columns: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * std)


class Attention(nn.Module):
    def __init__(self, g: Geometry):
        super().__init__()
        self.g, h, q, kv = g, g.hidden, g.heads * g.head_dim, g.kv_heads * g.head_dim
        self.q, self.k, self.v = matrix(q, h, h**-0.5), matrix(kv, h, h**-0.5), matrix(kv, h, h**-0.5)
        self.o = matrix(h, q, (2 * g.layers * q) ** -0.5)
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(g.head_dim)), nn.Parameter(torch.ones(g.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, H] -> [B, T, H]; causal."""
        g, (b, t, _) = self.g, x.shape
        q = fn.linear(x, self.q).view(b, t, g.heads, g.head_dim)
        k = fn.linear(x, self.k).view(b, t, g.kv_heads, g.head_dim)
        v = fn.linear(x, self.v).view(b, t, g.kv_heads, g.head_dim)
        q = rotate(rms_norm(q, self.q_norm, g.norm_eps), cos, sin)
        k = rotate(rms_norm(k, self.k_norm, g.norm_eps), cos, sin)
        k, v = (y.repeat_interleave(g.heads // g.kv_heads, 2) for y in (k, v))
        y = fn.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return fn.linear(y.transpose(1, 2).reshape(b, t, -1), self.o)


class Experts(nn.Module):
    """All experts are computed for all tokens: at this size two large products beat a sort by expert."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.g, h, i = g, g.hidden, g.intermediate
        self.router = matrix(g.experts, h, h**-0.5)
        self.gate, self.up = matrix(g.experts * i, h, h**-0.5), matrix(g.experts * i, h, h**-0.5)
        self.down = matrix(h, g.experts * i, (2 * g.layers * i) ** -0.5)

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, T, H], real: [B, T] f32, 0 for padding -> y: [B, T, H], balance loss: scalar, routed: [E] f32."""
        g = self.g
        p = fn.linear(x, self.router).float().softmax(-1)
        top, picked = p.topk(g.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        share = torch.zeros_like(p).scatter(-1, picked, top)
        h = fn.silu(fn.linear(x, self.gate)) * fn.linear(x, self.up)
        h = h.unflatten(-1, (g.experts, g.intermediate)) * share.to(h.dtype).unsqueeze(-1)
        y = fn.linear(h.flatten(-2), self.down)
        # The load-balancing loss of Switch Transformers: 1 at a uniform load.
        mask = real.unsqueeze(-1)
        routed = ((share > 0).float() * mask).sum((0, 1)).detach()
        mean_p = (p * mask).sum((0, 1)) / real.sum()
        return y, g.experts * (routed / routed.sum() * mean_p).sum(), routed


class Layer(nn.Module):
    def __init__(self, g: Geometry):
        super().__init__()
        self.eps = g.norm_eps
        self.input_norm, self.post_norm = nn.Parameter(torch.ones(g.hidden)), nn.Parameter(torch.ones(g.hidden))
        self.attention, self.experts = Attention(g), Experts(g)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(rms_norm(x, self.input_norm, self.eps), cos, sin)
        y, balance, routed = self.experts(rms_norm(x, self.post_norm, self.eps), real)
        return x + y, balance, routed


class Qwen3Moe(nn.Module):
    """The embedding is also the output head."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.g = g
        self.embed = matrix(g.vocab, g.hidden, 0.02)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
        self.norm = nn.Parameter(torch.ones(g.hidden))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids: [B, T] i64 -> hidden: [B, T, H] after the last norm, balance loss: scalar, routed: [layers, E] f32."""
        cos, sin = rotary_table(self.g, ids.shape[1], ids.device)
        real = (ids != PAD_ID).float()
        x = fn.embedding(ids, self.embed)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        balances, routed = [], []
        for layer in self.layers:
            x, b, n = layer(x, cos, sin, real)
            balances.append(b)
            routed.append(n)
        return rms_norm(x, self.norm, self.g.norm_eps), torch.stack(balances).mean(), torch.stack(routed)


def named_tensors(model: Qwen3Moe) -> dict[str, Tensor]:
    """Views of the parameters under their Hugging Face names, one an expert."""
    g, out = model.g, {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for n, layer in enumerate(model.layers):
        a, m, p = layer.attention, layer.experts, f"model.layers.{n}."
        out |= {p + "input_layernorm.weight": layer.input_norm, p + "post_attention_layernorm.weight": layer.post_norm}
        out |= {f"{p}self_attn.{x}_proj.weight": getattr(a, x) for x in "qkvo"}
        out |= {f"{p}self_attn.{x}_norm.weight": getattr(a, f"{x}_norm") for x in "qk"}
        out[p + "mlp.gate.weight"] = m.router
        gate, up = (w.view(g.experts, g.intermediate, g.hidden) for w in (m.gate, m.up))
        down = m.down.view(g.hidden, g.experts, g.intermediate)
        for e in range(g.experts):
            q = f"{p}mlp.experts.{e}."
            out |= {q + "gate_proj.weight": gate[e], q + "up_proj.weight": up[e], q + "down_proj.weight": down[:, e]}
    return out


def save(model: Qwen3Moe, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16)."""
    out.mkdir(parents=True, exist_ok=True)
    generation = {"eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": False}
    for name, data in (("config", model.g.hf_config()), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    tensors = {k: t.detach().to("cpu", torch.bfloat16).contiguous().clone() for k, t in named_tensors(model).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def load(model: Qwen3Moe, source: Path) -> None:
    """Copy a checkpoint's tensors into `model`."""
    tensors = load_file(source / "model.safetensors")
    with torch.no_grad():
        for name, view in named_tensors(model).items():
            view.copy_(tensors[name])
