"""Is the Hugging Face hub there? Asked once, in a second, so that an offline machine fails at once and in one line."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 3.0


@cache
def hub_reachable() -> bool:
    """Whether the hub answers. Without this check its client retries for up to a minute and logs every attempt."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = urlsplit(constants.ENDPOINT)
    if any(os.environ.get(name) for name in (f"{url.scheme}_proxy", f"{url.scheme.upper()}_PROXY", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def looks_like_path(name: str) -> bool:
    """Whether `name` can only mean a place on disk, or is one; otherwise it may be a hub id such as `owner/model`."""
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
