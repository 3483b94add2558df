"""`TokenBatch`: many trajectories as flat, ragged, immutable columns.

Shapes: S sequences, T tokens in all (S sequences laid end to end, no padding), `cu_seqlens` is [S + 1].
Token columns are aligned with the token they speak of: `old_logprobs[t]` is log p(input_ids[t] | tokens
before it in its sequence) and `values[t]` is the value of the state in which token t was chosen.
The first token of a sequence has no such state: its log-prob and value are 0 and its loss mask is False.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from verl.data.balance import karmarkar_karp, pack_by_budget
from verl.data.types import Trajectory


@dataclass(frozen=True)
class Column:
    """A column's declaration: what it is aligned with, its dtype, and what it means."""

    level: Literal["token", "sequence"]
    dtype: torch.dtype
    meaning: str


COLUMNS: dict[str, Column] = {
    "input_ids": Column("token", torch.int64, "token ids, prompt and response"),
    "loss_mask": Column("token", torch.bool, "True where the policy chose the token and is trained on it"),
    "generator_logprobs": Column("token", torch.float32, "log-prob under the distribution it was sampled from"),
    "policy_versions": Column("token", torch.int32, "version of the weights that made the token; -1 elsewhere"),
    "old_logprobs": Column("token", torch.float32, "trainer log-prob before this step's updates"),
    "ref_logprobs": Column("token", torch.float32, "log-prob under the reference model"),
    "values": Column("token", torch.float32, "critic value before this step's updates"),
    "token_rewards": Column("token", torch.float32, "reward paid at the token, KL penalty included"),
    "advantages": Column("token", torch.float32, "advantage; 0 outside the loss mask"),
    "returns": Column("token", torch.float32, "target of the value function"),
    "sequence_ids": Column("sequence", torch.int64, "position of the trajectory in the step"),
    "group_ids": Column("sequence", torch.int64, "samples of one prompt share it"),
    "rewards": Column("sequence", torch.float32, "outcome reward of the trajectory"),
    "truncated": Column("sequence", torch.bool, "the response ran into its length limit"),
}
"""Every column a batch may carry. A custom algorithm declares its own by adding an entry."""


class TokenBatch:
    """Flat ragged columns over S sequences. Immutable: every method returns a new batch.

    Columns read as attributes (`batch.advantages`); a missing one raises with the columns there are.
    """

    __slots__ = ("_columns", "cu_seqlens")

    input_ids: Tensor
    loss_mask: Tensor
    generator_logprobs: Tensor
    policy_versions: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    token_rewards: Tensor
    advantages: Tensor
    returns: Tensor
    sequence_ids: Tensor
    group_ids: Tensor
    rewards: Tensor
    truncated: Tensor

    def __init__(self, cu_seqlens: Tensor, **columns: Tensor) -> None:
        """`cu_seqlens`: int64 [S + 1], from 0 to T, strictly rising. `columns`: by declared name, [T, ...] or [S, ...]."""
        cu_seqlens = torch.as_tensor(cu_seqlens, dtype=torch.int64)
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or int(cu_seqlens[0]) != 0:
            raise ValueError(f"cu_seqlens must be [S + 1] and start at 0, got shape {tuple(cu_seqlens.shape)}")
        if bool((cu_seqlens.diff() <= 0).any()):
            empty = int((cu_seqlens.diff() <= 0).nonzero()[0])
            raise ValueError(f"cu_seqlens must rise strictly; sequence {empty} has {int(cu_seqlens.diff()[empty])} tokens")
        object.__setattr__(self, "cu_seqlens", cu_seqlens)
        object.__setattr__(self, "_columns", {name: self._checked(name, value) for name, value in columns.items()})
        if "input_ids" not in self._columns:
            raise ValueError("a TokenBatch needs the column input_ids")

    def _checked(self, name: str, value: Tensor) -> Tensor:
        column = COLUMNS.get(name)
        if column is None:
            raise KeyError(f"unknown column {name!r}; declare it in verl.data.batch.COLUMNS or use one of {', '.join(COLUMNS)}")
        value = torch.as_tensor(value).to(column.dtype)
        expected = self.num_tokens if column.level == "token" else self.num_sequences
        if value.ndim < 1 or value.shape[0] != expected:
            raise ValueError(f"column {name} has shape {tuple(value.shape)}, expected [{expected}, ...] ({column.level} level)")
        return value.detach()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TokenBatch is immutable; use batch.with_columns({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"TokenBatch is immutable; {name} cannot be deleted")

    def __getattr__(self, name: str) -> Tensor:
        # Only reached when normal lookup fails, i.e. for columns.
        if name in COLUMNS:
            columns = object.__getattribute__(self, "_columns")
            if name in columns:
                return columns[name]
            raise AttributeError(f"this batch has no column {name!r} ({COLUMNS[name].meaning}); it has {', '.join(columns)}")
        raise AttributeError(name)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return self.num_sequences

    def __repr__(self) -> str:
        return f"TokenBatch({self.num_sequences} sequences, {self.num_tokens} tokens, columns: {', '.join(self._columns)})"

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each sequence."""
        return self.cu_seqlens.diff()

    def sequence_index(self) -> Tensor:
        """[T] which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.cu_seqlens.device), self.lengths)

    def positions(self) -> Tensor:
        """[T] position of each token in its sequence, from 0."""
        return torch.arange(self.num_tokens, device=self.cu_seqlens.device) - self.cu_seqlens[:-1].repeat_interleave(self.lengths)

    def response_lengths(self) -> Tensor:
        """[S] tokens the policy chose in each sequence."""
        return self.sequence_sum(self.loss_mask.long())

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[T] -> [S] sum of a token-level tensor over each sequence."""
        out = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        return out.index_add(0, self.sequence_index().to(values.device), values)

    def with_columns(self, **columns: Tensor) -> TokenBatch:
        """A batch with these columns added or replaced."""
        return TokenBatch(self.cu_seqlens, **{**self._columns, **columns})

    def select(self, indices: Sequence[int] | Tensor) -> TokenBatch:
        """The sequences at `indices`, in that order (a permutation reorders, a subset filters, repeats repeat).

        A bool tensor [S] keeps the sequences where it is True.
        """
        index = torch.as_tensor(indices, device=self.cu_seqlens.device)
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.to(torch.int64)
        if index.equal(torch.arange(len(self), device=index.device)):
            return self
        lengths = self.lengths[index]
        cu = _offsets(lengths)
        # Token t of the new batch is token (t - start of its new sequence) of the old sequence.
        shift = (self.cu_seqlens[:-1][index] - cu[:-1]).repeat_interleave(lengths)
        tokens = torch.arange(int(cu[-1]), device=cu.device) + shift
        return TokenBatch(
            cu, **{n: v.index_select(0, tokens) if COLUMNS[n].level == "token" else v[index] for n, v in self._columns.items()}
        )

    @staticmethod
    def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
        """The sequences of all batches in order; all must carry the same columns."""
        if not batches:
            raise ValueError("nothing to concatenate")
        names = set(batches[0].column_names)
        for batch in batches[1:]:
            if set(batch.column_names) != names:
                raise ValueError(f"columns differ: {sorted(names ^ set(batch.column_names))}")
        cu = _offsets(torch.cat([b.lengths for b in batches]))
        return TokenBatch(cu, **{n: torch.cat([b._columns[n] for b in batches]) for n in batches[0].column_names})

    def split_indices(self, num_parts: int) -> list[list[int]]:
        """Which sequences go to which of `num_parts` ranks, balanced by tokens (Karmarkar-Karp)."""
        return karmarkar_karp(self.lengths.tolist(), num_parts)

    def split(self, num_parts: int) -> list[TokenBatch]:
        """One batch a rank, balanced by tokens; a rank's batch is empty when there are fewer sequences than ranks."""
        return [self.select(part) for part in self.split_indices(num_parts)]

    def micro_batches(self, max_tokens: int) -> Iterator[tuple[list[int], TokenBatch]]:
        """(indices, batch) groups of at most `max_tokens` tokens; a longer sequence travels alone."""
        for indices in pack_by_budget(self.lengths.tolist(), max_tokens):
            yield indices, self.select(indices)

    def scatter_tokens(self, parts: Sequence[tuple[Sequence[int], Tensor]], dtype: torch.dtype = torch.float32) -> Tensor:
        """[T] put token-level results of sub-batches, given as (sequence indices, values), back in this batch's order.

        The result is on the CPU; tokens of sequences that no part names are 0.
        """
        out = torch.zeros(self.num_tokens, dtype=dtype)
        cu = self.cu_seqlens.tolist()
        for indices, values in parts:
            expected = sum(cu[i + 1] - cu[i] for i in indices)
            if values.ndim != 1 or values.shape[0] != expected:
                raise ValueError(f"got values of shape {tuple(values.shape)} for {expected} tokens of {len(indices)} sequences")
            values = values.detach().to("cpu", dtype)
            start = 0
            for i in indices:
                n = cu[i + 1] - cu[i]
                out[cu[i] : cu[i + 1]] = values[start : start + n]
                start += n
        return out

    def to(self, device: torch.device | str) -> TokenBatch:
        return TokenBatch(self.cu_seqlens.to(device), **{n: v.to(device) for n, v in self._columns.items()})

    def save(self, path: str | Path) -> None:
        """Write all columns to one safetensors file."""
        # As arrays: columns may share memory (old_logprobs that are the generator's own), which save_file of tensors refuses.
        from safetensors.numpy import save_file

        save_file({"cu_seqlens": self.cu_seqlens.cpu().numpy(), **self._arrays()}, str(path))

    @staticmethod
    def load(path: str | Path) -> TokenBatch:
        from safetensors.torch import load_file

        columns = load_file(str(path))
        return TokenBatch(columns.pop("cu_seqlens"), **columns)

    def __reduce__(self) -> tuple:
        # NumPy arrays pickle out of band (protocol 5), so an object store can carry them without a copy.
        return _from_arrays, (self.cu_seqlens.cpu().numpy(), self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: np.ascontiguousarray(value.cpu().numpy()) for name, value in self._columns.items()}

    @staticmethod
    def from_trajectories(trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Flatten trajectories; `sequence_ids` is their order here. Rewards are a column when all have one."""
        cu = np.zeros(len(trajectories) + 1, dtype=np.int64)
        np.cumsum([len(t.prompt_ids) + t.response_length for t in trajectories], out=cu[1:])
        ids = np.empty(cu[-1], dtype=np.int64)
        mask = np.zeros(cu[-1], dtype=np.bool_)
        logprobs = np.zeros(cu[-1], dtype=np.float32)
        versions = np.full(cu[-1], -1, dtype=np.int32)
        for t, start in zip(trajectories, cu.tolist()[:-1], strict=True):
            end = start + len(t.prompt_ids)
            ids[start:end] = _array(t.prompt_ids, np.int64)
            for segment in t.segments:
                start, end = end, end + len(segment.token_ids)
                ids[start:end] = _array(segment.token_ids, np.int64)
                if segment.is_model:
                    mask[start:end] = True
                    if not len(segment.logprobs) == len(segment.policy_versions) == end - start:
                        raise ValueError(
                            f"{t.prompt.uid}: a model segment of {end - start} tokens has {len(segment.logprobs)} log-probs "
                            f"and {len(segment.policy_versions)} versions"
                        )
                    logprobs[start:end] = _array(segment.logprobs, np.float32)
                    versions[start:end] = _versions(segment.policy_versions)
        columns: dict[str, Tensor] = {
            "input_ids": torch.from_numpy(ids),
            "loss_mask": torch.from_numpy(mask),
            "generator_logprobs": torch.from_numpy(logprobs),
            "policy_versions": torch.from_numpy(versions),
            "sequence_ids": torch.arange(len(trajectories)),
            "group_ids": torch.tensor([t.group_id for t in trajectories], dtype=torch.int64),
            "truncated": torch.tensor([t.finish_reason == "length" for t in trajectories], dtype=torch.bool),
        }
        rewards = [t.reward for t in trajectories]
        if all(r is not None for r in rewards):
            columns["rewards"] = torch.tensor(rewards, dtype=torch.float32)
        return TokenBatch(torch.from_numpy(cu), **columns)


def _offsets(lengths: Tensor) -> Tensor:
    """[S] lengths -> [S + 1] starts, the total at the end."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _array(values: Sequence, dtype: type[np.generic]) -> np.ndarray:
    # fromiter is three times as fast as torch.tensor for a list; arrays and tensors pass without a copy.
    if isinstance(values, list | tuple):
        return np.fromiter(values, dtype, len(values))
    return np.asarray(values, dtype)


def _versions(values: Sequence[int]) -> np.ndarray | int:
    # Nearly always one version made the whole segment, and counting a list is far cheaper than converting it.
    if isinstance(values, list | tuple) and values and values.count(values[0]) == len(values):
        return values[0]
    return _array(values, np.int32)


def _from_arrays(cu_seqlens: np.ndarray, columns: dict[str, np.ndarray]) -> TokenBatch:
    # Arrays out of a shared object store are read-only; batches are immutable, so the warning about it is moot.
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return TokenBatch(torch.from_numpy(cu_seqlens), **{n: torch.from_numpy(v) for n, v in columns.items()})
