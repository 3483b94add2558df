"""The built-in rollout engine: paged cache, continuous batching, exact log-probs, the trainer's own parameters."""

from verl.engines.rollout.native.engine import EngineStats, NativeEngine

__all__ = ["EngineStats", "NativeEngine"]
