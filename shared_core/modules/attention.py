"""torch's MultiheadAttention, opened: its products are methods, so techniques can replace them.

The stock layer passes its weights to one function, which never calls `out_proj`, and in evaluation to a fused kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.modules.made_classes import derived

Product = Callable[[Tensor, str, slice, Tensor | None], Tensor]
"""Multiplies an input by some rows of a weight, given by its name, and adds a bias."""


def project(module: Any, inputs: Sequence[Tensor], product: Product) -> list[Tensor]:
    """Return the projected query, key and value, with as few products as torch: one if all three are one tensor.

    Args:
        module: An `nn.MultiheadAttention` with packed or separate weights.
        inputs: Query, key and value, (length, batch, features).
        product: Called as ``product(input, name of the weight, its rows, bias)``.
    """
    query, key, value = inputs
    size, bias, is_packed = module.embed_dim, module.in_proj_bias, module._qkv_same_embed_dim
    if is_packed:
        name = "in_proj_weight"
        if key is not value:
            parts = [(query, name, 0, 1), (key, name, 1, 2), (value, name, 2, 3)]
        else:
            parts = [(query, name, 0, 3)] if query is key else [(query, name, 0, 1), (key, name, 1, 3)]
    else:
        each = zip(inputs, "qkv", range(3), strict=True)
        parts = [(x, f"{letter}_proj_weight", place, place + 1) for x, letter, place in each]
    found: list[Tensor] = []
    for x, name, start, end in parts:
        rows = slice(start * size, end * size) if is_packed and end - start < 3 else slice(None)
        y = product(x, name, rows, None if bias is None else bias[start * size : end * size])
        if end - start > 1:  # in torch's layout, as others sum in another order
            y = y.view(*y.shape[:-1], end - start, size).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        found += y.unbind(0) if end - start > 1 else [y]
    return found


def each_once(change: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the three changed. Where they are one tensor they stay one."""
    new_query = change(query)
    new_key = new_query if key is query else change(key)
    return [new_query, new_key, new_key if value is key else change(value)]


class OpenAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` that calls its output projection, and computes as torch in training, to the bit.

    It has no fused evaluation.

    Example:
        >>> layer = nn.MultiheadAttention(4, 2)
        >>> x = torch.ones(3, 1, 4)
        >>> expected = layer(x, x, x)[0]
        >>> layer.__class__ = OpenAttention
        >>> torch.equal(layer(x, x, x)[0], expected)
        True
    """

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projected query, key and value."""

        def product(x: Tensor, name: str, rows: slice, bias: Tensor | None) -> Tensor:
            return F.linear(x, getattr(self, name)[rows], bias)

        return project(self, (query, key, value), product)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights, as the stock layer does.

        Raises:
            CompatibilityError: If the query is a nested tensor.
        """
        if query.is_nested:
            rule = "MultiheadAttention must get padded tensors while a technique changes it, got nested ones"
            raise CompatibilityError("attention", rule, "pass key_padding_mask, and enable_nested_tensor=False")
        torch_functions: Any = F
        batched = torch_functions._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        leaves_causal = is_causal and key_padding_mask is None and not need_weights
        key_padding_mask, attn_mask = _as_numbers(query, key_padding_mask, attn_mask, is_causal)
        attn_mask = None if leaves_causal else attn_mask
        if not batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:  # one tensor stays one
            query, key, value = each_once(lambda x: x.transpose(1, 0), query, key, value)
        length, batch, _ = query.shape
        q, k, v = self.project(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, more.repeat(1, batch, 1)]) for x, more in ((k, self.bias_k), (v, self.bias_v)))
            key_padding_mask, attn_mask = _longer(key_padding_mask), _longer(attn_mask)
        q, k, v = (x.view(len(x), batch * self.num_heads, self.head_dim).transpose(0, 1) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(len(x), 1, self.head_dim)], dim=1) for x in (k, v))
            key_padding_mask, attn_mask = _longer(key_padding_mask), _longer(attn_mask)
        attn_mask = _joined(attn_mask, key_padding_mask, self.num_heads)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            x, weights = _with_weights(q, k, v, attn_mask, dropout)
            x = x.transpose(0, 1).reshape(length * batch, self.embed_dim)
            weights = weights.view(batch, self.num_heads, length, k.shape[1])
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            q, k, v = (x.view(batch, self.num_heads, x.shape[1], self.head_dim) for x in (q, k, v))
            if attn_mask is not None:
                shape = (1, 1) if attn_mask.shape[0] == 1 else (batch, self.num_heads)
                attn_mask = attn_mask.view(*shape, -1, k.shape[2])
            x = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, leaves_causal)
            x = x.permute(2, 0, 1, 3).reshape(batch * length, self.embed_dim)
        y: Tensor = self.out_proj(x).view(length, batch, self.embed_dim)
        if not batched:
            return y.squeeze(1), weights
        return y.transpose(1, 0) if self.batch_first else y, weights


def _as_numbers(
    query: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return both masks as numbers to add."""
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    torch_functions: Any = F
    kinds = {"other_type": torch_functions._none_or_dtype(mask), "other_name": "attn_mask", "target_type": query.dtype}
    padding = torch_functions._canonical_mask(mask=padding, mask_name="key_padding_mask", **kinds)
    kinds |= {"other_type": None, "other_name": "", "check_other": False}
    return padding, torch_functions._canonical_mask(mask=mask, mask_name="attn_mask", **kinds)


def _longer(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else F.pad(mask, (0, 1))


def _joined(mask: Tensor | None, padding: Tensor | None, num_heads: int) -> Tensor | None:
    """Return the sum of both masks, (1 or batch · heads, 1 or length, source length)."""
    mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 2 else mask
    if padding is None:
        return mask
    batch, length = padding.shape
    padding = padding.view(batch, 1, 1, length).expand(-1, num_heads, -1, -1).reshape(batch * num_heads, 1, length)
    return padding if mask is None else mask + padding


def _with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    q = q * math.sqrt(1.0 / float(q.shape[-1]))
    scores = torch.bmm(q, k.transpose(-2, -1)) if mask is None else torch.baddbmm(mask, q, k.transpose(-2, -1))
    weights = F.softmax(scores, dim=-1)
    weights = F.dropout(weights, p=dropout) if dropout > 0.0 else weights
    return torch.bmm(weights, v), weights


def is_stock_attention(kind: type) -> bool:
    """Return True if a class computes `nn.MultiheadAttention`, opened or not, with its own weights."""
    if not issubclass(kind, nn.MultiheadAttention):
        return False
    is_own = getattr(kind, "project", OpenAttention.project) is OpenAttention.project
    return is_own and kind.forward in (nn.MultiheadAttention.forward, OpenAttention.forward)


def calls_projection(module: nn.Module) -> bool:
    """Return False for attention with a forward of its own, which may multiply by `out_proj` without calling it."""
    is_known = is_stock_attention(type(module)) or isinstance(module, OpenAttention)
    return is_known or not isinstance(module, nn.MultiheadAttention)


@functools.cache
def opened(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of an attention layer that calls its output projection."""
    if kind is nn.MultiheadAttention:
        return OpenAttention
    return derived("", OpenAttention, kind, _again)


def _again(kind: type[nn.Module], _: type) -> type[nn.Module]:
    return opened(kind)  # type: ignore[arg-type]
