"""Log-probability and entropy of tokens, fused with the output projection, without a [tokens, vocab] tensor.

Rows go through the projection in chunks of bounded size. The backward pass computes a chunk's probabilities again,
unless those of all rows are few: then they are kept, which saves a third of the matrix products.

Softmax arithmetic is float32 whatever the compute dtype: half-precision operands are multiplied with float32
accumulation *and* float32 results (rounding logits of size 20 to bfloat16 would cost 0.06 nats a token).

Alignment: `logprobs[t]` speaks of token t given the tokens before it, so it comes from `hidden[t - 1]`.

Shapes: T tokens of the packed row, N scored rows, V vocabulary, D hidden, n rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}
"""Logits a chunk, by device type: on a CPU what a core's cache holds (1 MiB; a chunk of all rows takes 1.4 times as
long), on a GPU 512 MiB."""
_MIN_CHUNK_ROWS = 64
"""Fewer rows waste the matrix product, however large the vocabulary."""
_KEPT_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}
"""Most probabilities kept for the backward pass: what a chunk there may take anyway."""


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 accumulation and result, for half-precision [n, k] and [k, m]; exact dtype otherwise."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(logits / temperature [n, V], d capped / d raw [n, V] or None). The cap (Gemma 2) comes before the temperature."""
    logits = matmul_fp32(hidden, weight.t())
    slope = None
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        slope = 1 - squashed.square()
        logits = squashed * softcap
    return logits if temperature == 1 else logits.div_(temperature), slope


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, temperature, softcap, with_entropy, chunk_rows, kept_rows):
        ctx.set_materialize_grads(False)
        num_rows = rows.numel()
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.zeros(targets.shape[0], dtype=dtype, device=hidden.device)
        entropy = torch.zeros_like(logprobs) if with_entropy else None
        kept = None
        if num_rows <= kept_rows and softcap is None and any(ctx.needs_input_grad):
            kept = torch.empty(num_rows, weight.shape[0], dtype=dtype, device=hidden.device)
        for i, part in enumerate(rows.split(chunk_rows)):
            logits, _ = _scaled_logits(hidden.index_select(0, part - 1), weight, temperature, softcap)
            out = None if kept is None else kept[i * chunk_rows : i * chunk_rows + part.numel()]
            probs = torch.softmax(logits, -1, out=out)
            # From the largest logit, whose probability is at least 1 / V: the logarithm of a small one would underflow.
            log_total = logits.amax(-1).sub_(probs.amax(-1).log_())
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0].sub_(log_total)
            if entropy is not None:
                # The smallest weight, not -inf: a product with probability 0 must be 0.
                entropy[part] = log_total - logits.clamp_(min=torch.finfo(dtype).min).mul_(probs).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, rows, entropy, kept)
        ctx.settings = temperature, softcap, chunk_rows
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 9
        hidden, weight, targets, rows, entropy, kept = ctx.saved_tensors
        temperature, softcap, chunk_rows = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Transposed, for on a CPU a product with few rows is a third faster than one with few columns.
        grad_weight_t = weight.new_zeros(weight.t().shape, dtype=_accumulation_dtype(weight)) if need_weight else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(grad_entropy)
        for i, part in enumerate(rows.split(chunk_rows)):
            part_hidden = hidden.index_select(0, part - 1)
            slope = None
            if kept is None:
                logits, slope = _scaled_logits(part_hidden, weight, temperature, softcap)
                probs = torch.softmax(logits, -1)
                del logits
            else:
                probs = kept[i * chunk_rows : i * chunk_rows + part.numel()]
            g = grad_logprobs[part, None]
            # d logp_y / d z_j = [j = y] - p_j, and d H / d z_j = -p_j (log p_j + H).
            if grad_entropy is None:
                grad = probs * -g
            else:
                grad = probs * (-g - grad_entropy[part, None] * entropy[part, None])
                grad.sub_(torch.xlogy(probs, probs).mul_(grad_entropy[part, None]))
            grad.scatter_add_(1, targets[part, None], g)
            if temperature != 1:
                grad.div_(temperature)
            if slope is not None:
                grad.mul_(slope)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, part - 1, grad @ weight)
            if grad_weight_t is not None:
                _add_product(grad_weight_t, part_hidden.t(), grad)
        grad_weight = None if grad_weight_t is None else weight.new_empty(weight.shape).copy_(grad_weight_t.t())
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _accumulation_dtype(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(matmul_fp32(a, b))


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    rows: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] of the tokens at `rows`, and the entropies [T] (nats) of the distributions they came from.

    hidden [T, D]: last hidden states; weight [V, D]: output embedding; input_ids [T]; rows int64 [N]: distinct
    positions to score, none the first of its sequence. All other positions are 0 in the results.
    `temperature` divides the logits; `softcap` is Gemma 2's final logit cap. Gradients flow to hidden and weight
    from both results. `chunk_elements` bounds the logits alive at once (default by device).
    """
    vocabulary, kind = weight.shape[0], hidden.device.type
    chunk_rows = (
        max(1, chunk_elements // vocabulary) if chunk_elements else max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS[kind] // vocabulary)
    )
    kept_rows = (chunk_elements or _KEPT_ELEMENTS[kind]) // vocabulary
    return _TokenLogProbs.apply(hidden, weight, input_ids, rows, temperature, softcap, entropy, chunk_rows, kept_rows)
