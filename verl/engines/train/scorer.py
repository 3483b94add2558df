"""Body and head of a language or value model as one module with one forward pass.

Embedding and output projection are often one tensor. What is sliced (FSDP) as one unit is gathered for the length of a
forward pass, so the projection has to happen within it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl.engines.train.attention import packed_inputs
from verl.engines.train.loading import ValueModel
from verl.engines.train.logprobs import token_logprobs
from verl.engines.train.packing import Packing


class Scorer(nn.Module):
    """Log-probs and entropies, or values, of the tokens of one packed row.

    Shapes: R tokens of the row, N scored rows, D hidden.
    """

    def __init__(self, module: nn.Module, body: nn.Module, compute_dtype: torch.dtype, temperature: float) -> None:
        super().__init__()
        self.module = module
        # Not a second child: names, and what is sliced, come from `module` alone.
        self._body_of = (body,)
        self.compute_dtype = compute_dtype
        self.temperature = temperature

    def forward(self, input_ids: Tensor, rows: Tensor, packing: Packing, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """`input_ids` [R]; `rows` [N]: tokens to score, each with a token before it. -> (log-probs [R], 0 where nothing is
        scored; entropies [R] or None), or for a value model (values [N], None), float32."""
        hidden = self._hidden_states(packed_inputs(input_ids, packing))
        if isinstance(self.module, ValueModel):
            return self.module(hidden.index_select(0, rows - 1)), None
        return token_logprobs(
            hidden,
            self.module.get_output_embeddings().weight,
            input_ids,
            rows,
            temperature=self.temperature,
            softcap=getattr(self.module.config, "final_logit_softcapping", None),
            entropy=entropy,
        )

    def _hidden_states(self, inputs: dict) -> Tensor:
        """[R, D] final hidden states, in the compute dtype.

        In half precision the residual stream stays float32, as the rollout engine keeps it: sixty roundings of it would
        make two passes over the same tokens differ by far more than their matrix products do.
        """
        (body,) = self._body_of
        if self.compute_dtype == torch.float32:
            return body(**inputs).last_hidden_state[0]
        embeddings = body.get_input_embeddings()(inputs.pop("input_ids")).float()
        with torch.autocast(embeddings.device.type, dtype=self.compute_dtype):
            hidden = body(inputs_embeds=embeddings, **inputs).last_hidden_state[0]
        return hidden.to(self.compute_dtype)
