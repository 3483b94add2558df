"""Capture and restore every random generator a run draws from, as JSON-ready values (no pickle)."""

from __future__ import annotations

import base64
import random
from typing import Any, cast

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's global generators, the CUDA devices' included; `json.dumps` takes it."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state(legacy=True))
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned. CUDA states apply to the devices that are there."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    for device, encoded in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_decode(encoded), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
