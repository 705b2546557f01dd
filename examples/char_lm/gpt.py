"""A small GPT: a transformer that predicts the next token at every position."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hydraloop.errors import UserError

_STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2."""


class GPT(nn.Module):
    """Pre-norm transformer decoder with learned positions: int64 tokens `[N, T]` to logits `[N, T, vocab_size]`.

    The output layer is the transposed token embedding (tied weights): one parameter, `token_embedding.weight`, so that
    code that shards or averages parameters sees it once. There are no biases. With the defaults, it has 836,736
    parameters.

    `Block` is the repeated layer: the class name for wrapping in FSDP and for activation checkpointing.

    Source: A. Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2), its architecture and
    initialisation; without biases, as in PaLM (A. Chowdhery et al., 2022).

    Args:
        vocab_size: number of tokens, at least 1; 256 for bytes.
        context: largest T, at least 1.
        layers: number of blocks, at least 1.
        width: features per position, a multiple of `heads`.
        heads: attention heads, at least 1.
        dropout: fraction that is set to zero in training, 0..1: of the embeddings, the attention weights and the output
            of each half of a block.

    Raises:
        UserError: a size is below 1, or `width` is not a multiple of `heads`.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 128,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "context": context, "layers": layers, "width": width, "heads": heads}
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"{size} is below 1", key=name, remedy="Use 1 or more.")
        if width % heads:
            raise UserError(
                f"{width} features cannot be shared by {heads} heads",
                key="width",
                remedy=f"Use a multiple of heads, {width - width % heads or heads} for example.",
            )
        self.vocab_size, self.context, self.layers, self.width = vocab_size, context, layers, width
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal with deviation 0.02; smaller for layers whose outputs are summed in the residual stream."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
        for block in self.blocks:
            assert isinstance(block, Block)
            for projection in (block.attention.project, block.contract):
                nn.init.normal_(projection.weight, std=_STD / math.sqrt(2 * self.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[N, T, vocab_size]` of the token after each position. No host sync.

        Raises:
            UserError: T is above `context`.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise UserError(
                f"sequences of {length} tokens are longer than the model's context of {self.context}",
                key="task.model.context",
                remedy=f"Use task.model.context={length}, or shorter sequences.",
            )
        features = self.token_embedding(tokens) + self.position_embedding.weight[:length]
        features = self.dropout(features)
        for block in self.blocks:
            features = block(features)
        return functional.linear(self.norm(features), self.token_embedding.weight)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue int64 tokens `[N, T]`, T at least 1. Returns `[N, T + length]`, the given tokens first.

        Each new token is drawn from the model's output for the last `context` tokens, in eval mode. The modes of the
        modules are restored.

        Args:
            length: number of tokens to add.
            temperature: divisor of the logits, 0 or more; 0: take the most likely token.
            top_k: draw from this many of the most likely tokens, at least 1; None: from all.
            generator: on the device of the tokens; None: torch's global one.
        """
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            tokens = torch.cat([tokens, _draw(logits, temperature, top_k, generator)], dim=1)
        for module, training in modes:
            module.training = training
        return tokens


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Map features `[N, T, width]` to features `[N, T, width]`."""
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        hidden = functional.gelu(self.expand(self.mlp_norm(features)))
        features = features + self.dropout(self.contract(hidden))
        return features


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a position sees itself and earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map features `[N, T, width]` to features `[N, T, width]`."""
        samples, length, width = features.shape
        parts = self.query_key_value(features).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # [N, heads, T, width / heads] each
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(samples, length, width))
        return projected


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token for each row of logits `[N, V]`: int64 `[N, 1]`."""
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)
