"""Which processes are ranks of the Ray cluster that a test is connected to."""

from pathlib import Path

import ray


def hosts() -> list[int]:
    """Process ids of the ranks on this machine, in the order of their start. Ranks of other clusters do not count, nor do
    processes that have ended and wait for their parent."""
    mark = ray.get_runtime_context().gcs_address
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            is_host = (folder / "cmdline").read_bytes().startswith(b"ray::_Host")
            if is_host and mark.encode() in Path("/proc", parent, "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return sorted(found)
