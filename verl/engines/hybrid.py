"""The 3D-HybridEngine: one model, two layouts. Weights go from the training engine to the rollout engine here.

Where both live in one process and the model is not sliced, the native engine reads the trainer's own parameters, so a
sync moves nothing: it only drops caches made with the old weights and takes the new version number. Any other engine is
handed a stream of whole tensors under Hugging Face names: slices are cast to the rollout's dtype, then gathered bucket by
bucket, the next one on its way while the last is loaded, so the extra memory is two buckets whatever the model's size. A
generator on other devices gets the same stream over a link (`weight_link`). Every sync ends with a comparison of both
sides' fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from verl.engines.rollout.base import RolloutEngine
from verl.engines.train.base import TrainEngine


def sync_weights(source: TrainEngine, target: RolloutEngine, *, version: int, shared: bool) -> None:
    """Bring `target` to the weights of `source`. `shared`: both use the same parameter tensors.

    A collective operation where the source is sliced: every rank calls it, each with the target beside it.

    Raises:
        RuntimeError: weights did not arrive as they were sent.
    """
    if shared:
        target.load_weights((), version)
        return
    sent: dict[str, Tensor] = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.whole_weights(target.weight_dtype):
            sent[name] = fingerprint(tensor)
            yield name, tensor

    target.load_weights(stream(), version)
    check_arrival(sent, target, version)


def check_arrival(sent: Mapping[str, Tensor | int], target: RolloutEngine, version: int) -> None:
    """Compare the fingerprints of what was sent with those of what `target` now generates with.

    Raises:
        RuntimeError: weights did not arrive as they were sent.
    """
    arrived = {name: fingerprint(tensor) for name, tensor in target.named_weights() if name in sent}
    if missing := sorted(sent.keys() - arrived.keys()):
        raise RuntimeError(f"weight sync {version}: the rollout engine has no {missing[0]} ({len(missing)} weights are missing)")
    differing = [name for name in sent if int(sent[name]) != int(arrived[name])]
    if differing:
        raise RuntimeError(f"weight sync {version}: {len(differing)} weights arrived changed, {differing[0]} first")


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 scalar of all bits of a tensor, on its device; equal tensors have equal ones, and a changed, zeroed or
    misplaced element all but surely gives another."""
    bits = tensor.detach().contiguous().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    # Weights by position make transposed and swapped elements count; the sum wraps around, which is no loss.
    places = torch.arange(1, 1 + min(bits.numel(), _PERIOD), device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _PERIOD):
        part = bits[start : start + _PERIOD].long()
        total = total * 1_000_003 + (part * places[: part.numel()]).sum()
    return total


_PERIOD = 2**22
"""Elements widened to int64 at a time."""
