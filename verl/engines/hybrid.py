"""The 3D-HybridEngine: one model, two layouts. Weights go from the training engine to the rollout engine here.

In one process the native engine reads the trainer's own parameters, so a sync moves nothing: it only
drops caches made with the old weights and takes the new version number. Any other engine is handed the
stream of named weights.
"""

from __future__ import annotations

from verl.engines.rollout.base import RolloutEngine
from verl.engines.train.base import TrainEngine


def sync_weights(source: TrainEngine, target: RolloutEngine, *, version: int, shared: bool) -> None:
    """Bring `target` to the weights of `source`. `shared`: both use the same parameter tensors."""
    target.load_weights(() if shared else source.named_weights(), version)
