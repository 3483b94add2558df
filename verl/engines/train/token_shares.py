"""One row of tokens worked on by several ranks, each with a run of them, and what they exchange.

Between attention and MLP a rank has only its own tokens (R / ranks of them). Tensor ranks gather their tokens before they
use their part of a layer's matrices, and add up their partial results while handing the tokens back (Korthikanti et al.
2022, "sequence parallelism"). Sequence ranks exchange tokens for heads around attention (Ulysses, Jacobs et al. 2023).
So whatever parameter a rank uses, its gradient is of its own tokens or heads, and gradients of all ranks add up.

Shapes: R tokens of a row, H heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Peers:
    """A process group and this rank's place in it."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Peers:
        return Peers(group, dist.get_world_size(group), dist.get_rank(group))

    @staticmethod
    def alone() -> Peers:
        return Peers(None, 1, 0)

    def global_rank(self, rank: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)


@dataclass(frozen=True, kw_only=True)
class TokenShares:
    """A row is cut into equal runs for the sequence ranks, and each of them for the tensor ranks."""

    tokens: Peers
    """All ranks of a row."""
    tensor: Peers | None
    sequence: Peers | None

    def padding(self, rows: int) -> int:
        """Tokens to add to a row of `rows`, so that all runs are alike."""
        return -rows % self.tokens.size

    def mine(self, rows: int) -> slice:
        """This rank's run of tokens."""
        size = rows // self.tokens.size
        return slice(self.tokens.rank * size, (self.tokens.rank + 1) * size)

    def in_attention(self, rows: int) -> slice:
        """Tokens whose queries, keys and values this rank computes: those of its tensor ranks together."""
        if self.sequence is None:
            return slice(0, rows)
        size = rows // self.sequence.size
        return slice(self.sequence.rank * size, (self.sequence.rank + 1) * size)


def gather_tokens(x: Tensor, peers: Peers) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...] on all. Gradients of all ranks are added up on the way back."""
    return _GatherTokens.apply(x, peers)  # type: ignore[return-value]


def add_up_tokens(x: Tensor, peers: Peers) -> Tensor:
    """Partial [ranks * n, ...] of each rank -> the sum's [n, ...] that is the rank's own."""
    return _AddUpTokens.apply(x, peers)  # type: ignore[return-value]


def tokens_to_heads(x: Tensor, peers: Peers) -> Tensor:
    """[n, H, D] of each rank -> [ranks * n, H / ranks, D]: all tokens of some heads."""
    return _Exchange.apply(x, peers, True)  # type: ignore[return-value]


def heads_to_tokens(x: Tensor, peers: Peers) -> Tensor:
    """The way back."""
    return _Exchange.apply(x, peers, False)  # type: ignore[return-value]


def add_up(x: Tensor, peers: Peers) -> Tensor:
    """The sum over ranks, on all, of what each has a part of. What follows is the same on each, so each takes the gradient
    of its own part, which is that of the sum."""
    return _AddUp.apply(x, peers)  # type: ignore[return-value]


def _gather(x: Tensor, peers: Peers) -> Tensor:
    out = x.new_empty(peers.size * x.shape[0], *x.shape[1:])
    all_gather(out, x.contiguous(), group=peers.group)
    return out


def _reduce(x: Tensor, peers: Peers) -> Tensor:
    # In float32: a sum of partial products in half precision would round once more a rank.
    total = x.new_empty(x.shape[0] // peers.size, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
    reduce_scatter(total, x.to(total.dtype).contiguous(), group=peers.group)
    return total


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return _gather(x, peers)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reduce(grad, ctx.peers).to(grad.dtype), None


class _AddUpTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers, ctx.dtype = peers, x.dtype
        return _reduce(x, peers)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _gather(grad.to(ctx.dtype), ctx.peers), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers, to_heads: bool) -> Tensor:
        ctx.peers, ctx.to_heads = peers, to_heads
        return _exchange(x, peers, to_heads)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _exchange(grad, ctx.peers, not ctx.to_heads), None, None


def _exchange(x: Tensor, peers: Peers, to_heads: bool) -> Tensor:
    n, heads, size = *x.shape[:2], peers.size
    parts = (x.view(n, size, heads // size, *x.shape[2:]).transpose(0, 1) if to_heads else x).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out.view(-1), parts.view(-1), group=peers.group)
    if to_heads:
        return out.view(size * n, heads // size, *x.shape[2:])
    back = out.view(size, n // size, heads, *x.shape[2:]).transpose(0, 1)
    return back.reshape(n // size, size * heads, *x.shape[2:])


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=peers.group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None
