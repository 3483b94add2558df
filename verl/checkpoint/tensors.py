"""Named tensors on disk, whole or in slices, through torch.distributed.checkpoint (DCP): every rank writes what it has,
and any number of ranks reads back what each of them needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.checkpoint.manager import noticing_full_disk
from verl.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write `tensors` (DTensors by their slices) into `folder`; a collective operation where there are several ranks.

    group: of all ranks, that nothing else uses meanwhile: to write in a thread while training communicates.
    """
    from torch.distributed.checkpoint import api, state_dict_saver

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with noticing_full_disk(folder), _quiet():
            state_dict_saver.save(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_writer=_writer(folder),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except api.CheckpointException as error:  # no Exception, so that whoever catches those would let it pass
        raise RuntimeError(f"{folder}: cannot be written\n{error}") from None


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, in host memory; of DTensors this rank's slices."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # Shared memory is small in containers, and pinned memory is dear to get: neither is needed to write a file.
    copier = DefaultStager(StagingOptions(False, False, False, False))
    copies = copier.stage({name: tensor.detach() for name, tensor in tensors.items()})
    assert isinstance(copies, dict)  # without asynchronous staging
    return copies


def _writer(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Writer(FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            with noticing_full_disk(folder):  # here: what caused an exception does not travel from rank to rank
                return super().write_data(*args, **kwargs)

    return Writer(folder, single_file_per_rank=True, sync_files=False)


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place from what `save_tensors` wrote, whatever slices it was written in.

    Raises UserError when a name is missing or a file cannot be read.
    """
    from torch.distributed.checkpoint import api, filesystem, state_dict_loader

    if missing := sorted(set(tensors) - set(saved_shapes(folder))):
        raise UserError(f"{folder}: {len(missing)} tensors are missing, {missing[0]} first; this checkpoint is of another kind")
    if not tensors:
        return
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        with _quiet(), torch.no_grad():
            reader = filesystem.FileSystemReader(folder)
            state_dict_loader.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise UserError(f"{folder}: cannot be read ({cause}); this is not a complete checkpoint of the training engine") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor in `folder`, whole, in memory; by one process alone."""
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in _saved(folder).items()}
    load_tensors(folder, tensors)
    return tensors


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Name -> shape of every tensor in `folder`. Raises UserError when it holds none."""
    return {name: entry.size for name, entry in _saved(folder).items()}


def _saved(folder: Path) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint import filesystem, metadata

    if not (folder / ".metadata").is_file():
        raise UserError(f"{folder}: no .metadata; this is not a complete checkpoint of the training engine")
    entries = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, metadata.TensorStorageMetadata)}


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that a single process has no process group, which is what `no_dist` says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
