"""What makes a run start fast. Imported before anything that imports torch: torch comes in without garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection inside the block; what is alive after it is never looked at again.

    Importing transformers and building a model makes a million objects, nearly all of which stay. Walking them over and
    over is a fifth of the start-up, and later a pause in the middle of a step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


with gc_paused():
    import torch  # noqa: F401
