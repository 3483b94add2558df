"""Body and head of a language or value model as one module with one forward pass.

Embedding and output projection are often one tensor. What is sliced (FSDP) as one unit is gathered for the length of a
forward pass, so the projection has to happen within it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.engines.train.attention import packed_inputs
from verl.engines.train.loading import ValueModel
from verl.engines.train.logprobs import token_logprobs
from verl.engines.train.packing import Packing
from verl.engines.train.pipeline import Passing
from verl.engines.train.token_shares import TokenShares, add_up


class Scorer(nn.Module):
    """Log-probs and entropies, or values, of the tokens of one packed row.

    Shapes: R tokens of the row, N scored rows, D hidden.
    """

    def __init__(
        self,
        module: nn.Module,
        body: nn.Module,
        compute_dtype: torch.dtype,
        temperature: float,
        *,
        shares: TokenShares | None = None,
        inlet: Passing | None = None,
        is_last: bool = True,
    ) -> None:
        """`shares`: the rank has only some tokens of a row. `inlet`, `is_last`: it has only some layers, see `pipeline`."""
        super().__init__()
        self.shares = shares
        self._inlet = (inlet,)
        self.is_last = is_last
        self.module = module
        # Not a second child: names, and what is sliced, come from `module` alone.
        self._body_of = (body,)
        self.compute_dtype = compute_dtype
        self.temperature = temperature

    def forward(
        self, input_ids: Tensor, rows: Tensor, packing: Packing, entropy: bool, received: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`input_ids` [R]; `rows` [N]: tokens to score, each with a token before it. -> (log-probs, or values, [R], 0 where
        nothing is scored; entropies [R] or None), float32.

        On stages but the last: (hidden states [1, own tokens, D], None). `received`: those of the stage before.
        """
        count = input_ids.shape[0]
        own = slice(0, count) if self.shares is None else self.shares.mine(count)
        hidden = self._hidden_states(packed_inputs(input_ids, packing, self.shares), received)
        if not self.is_last:
            return hidden, None
        hidden = hidden[0]
        if self.shares is None:
            return self._scores(hidden, input_ids, rows, entropy)
        # A token is scored where the one before it is; numbers count from this rank's first token.
        rows = rows[(rows > own.start) & (rows <= own.stop)] - own.start
        first, second = self._scores(hidden, input_ids[own.start : own.stop + 1], rows, entropy)
        before, after = own.start, count - own.start - first.shape[0]
        first, second = (None if x is None else add_up(F.pad(x, (before, after)), self.shares.tokens) for x in (first, second))
        assert first is not None
        return first, second

    def _scores(self, hidden: Tensor, targets: Tensor, rows: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.module, ValueModel):
            values = self.module(hidden.index_select(0, rows - 1))
            return values.new_zeros(targets.shape[0]).index_copy(0, rows, values), None
        return token_logprobs(
            hidden,
            self.module.get_output_embeddings().weight,
            targets,
            rows,
            temperature=self.temperature,
            softcap=getattr(self.module.config, "final_logit_softcapping", None),
            entropy=entropy,
        )

    def _hidden_states(self, inputs: dict, received: Tensor | None) -> Tensor:
        """[1, own tokens, D] hidden states: final ones in the compute dtype, or those for the next stage in float32.

        In half precision the residual stream stays float32, as the rollout engine keeps it: sixty roundings of it would
        make two passes over the same tokens differ by far more than their matrix products do.
        """
        (body,), (inlet,) = self._body_of, self._inlet
        if inlet is not None:
            assert received is not None
            inlet.inlet = received
            # The layers take it from there; the body wants to know a shape and a dtype.
            del inputs["input_ids"]
            inputs["inputs_embeds"] = received.detach()
        if self.compute_dtype == torch.float32:
            return body(**inputs).last_hidden_state
        if inlet is None:
            inputs["inputs_embeds"] = body.get_input_embeddings()(inputs.pop("input_ids")).float()
        with torch.autocast(inputs["inputs_embeds"].device.type, dtype=self.compute_dtype):
            hidden = body(**inputs).last_hidden_state
        return hidden.to(self.compute_dtype) if self.is_last else hidden
