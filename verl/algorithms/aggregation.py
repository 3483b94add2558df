"""What a loss is a mean of, as one weight a token and one count, so that sums over any split add up.

Shapes: S sequences, T tokens in all.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl.data.batch import TokenBatch
from verl.errors import ConfigError

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def check_aggregation(aggregation: str, norm_length: int | None) -> None:
    """Raise ConfigError for an unknown aggregation, or for the -norm one without its length."""
    if aggregation not in get_args(Aggregation):
        raise ConfigError(f"actor.loss_aggregation={aggregation!r} is unknown; use one of {', '.join(get_args(Aggregation))}")
    if aggregation == "seq-mean-token-sum-norm" and (norm_length is None or norm_length < 1):
        raise ConfigError(f"actor.loss_aggregation={aggregation} needs a length in tokens, got {norm_length}; give at least 1")


def aggregation_weights(batch: TokenBatch, aggregation: Aggregation, norm_length: int | None = None) -> tuple[Tensor, Tensor]:
    """`(weights_T, count)`: a loss is sum(weights * token losses) / count, both sums over the whole mini-batch.

    n_i: trained tokens of sequence i.

        aggregation               weight of a trained token   count
        token-mean                1                           trained tokens (DAPO, arXiv 2503.14476, section 3.3)
        seq-mean-token-mean       1 / n_i                     sequences (GRPO, arXiv 2402.03300, equation 3)
        seq-mean-token-sum        1                           sequences
        seq-mean-token-sum-norm   1 / norm_length             sequences (Dr. GRPO, arXiv 2503.20783)

    Untrained tokens weigh 0. "Sequences" are those with at least one trained token: a sequence whose tokens are
    all masked adds neither to the sum nor to the count. (Upstream divides by the configured batch size, so that
    masked sequences shrink the step, and norms by the padded width of the micro-batch, which changes with packing.)

    A weight depends on its own sequence alone. Hence, for any split into micro-batches or ranks that keeps
    sequences whole, sums and counts add up to those of the whole.
    """
    weights_T = batch.loss_mask.to(torch.float32)
    if aggregation == "token-mean":
        return weights_T, weights_T.sum()
    trained_S = batch.response_lengths()
    count = (trained_S > 0).sum().to(torch.float32)
    if aggregation == "seq-mean-token-mean":
        weights_T = weights_T / trained_S.clamp(min=1).repeat_interleave(batch.lengths)
    elif aggregation == "seq-mean-token-sum-norm":
        assert norm_length is not None  # check_aggregation, when the loss was made
        weights_T = weights_T / norm_length
    return weights_T, count
