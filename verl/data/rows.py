"""Rows of data files: parquet, JSONL, JSON, CSV, folders of them, and Hugging Face data sets.

Files are checked once when they are opened and kept in a compact form (Arrow tables, undecoded JSON lines);
a row becomes a dict when it is asked for.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl.data.hub import hub_reachable, looks_like_path
from verl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
Split = Literal["train", "test"]

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "val", "valid", "validation", "dev", "eval")}
"""File names that hold a split in a folder, the first that is there wins; `train-00000-of-00002` counts as `train`."""
FIELDS: dict[Split, str] = {"train": "data.train_files", "test": "data.val_files"}
"""The setting an error about a file names."""
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")
"""What `datasets` leaves in a folder it saved to."""


class Table(Sequence[Row]):
    """Rows of one file."""

    def __init__(self, rows: Sequence[Row], *, stem: str, source: str, lines: Sequence[int] | None = None) -> None:
        self.rows = rows
        self.stem = stem
        """Begins the uid of its rows."""
        self.source = source
        """The file, as errors name it."""
        self._lines = lines

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self.rows[index]

    def where(self, index: int) -> str:
        """`file:line`, or `file: row N` (from 0) for formats without lines."""
        return f"{self.source}: row {index}" if self._lines is None else f"{self.source}:{self._lines[index]}"


class Rows(Sequence[Row]):
    """Rows of several files, one after the other."""

    def __init__(self, tables: Sequence[Table], max_rows: int | None = None) -> None:
        self.tables = tables
        self._ends = list(accumulate(len(table) for table in tables))
        total = self._ends[-1] if self._ends else 0
        self._len = total if max_rows is None else min(total, max_rows)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        table, i = self._locate(index)
        return table[i]

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        """`file:line` of a row, for error messages."""
        table, i = self._locate(index)
        return table.where(i)

    def uid(self, index: int) -> str:
        """`{file stem}:{row number}`; files with one stem are told apart by their folders."""
        table, i = self._locate(index)
        return f"{table.stem}:{i}"

    def _locate(self, index: int) -> tuple[Table, int]:
        if not 0 <= index < self._len:
            raise IndexError(f"row {index} of {self._len}")
        part = bisect.bisect_right(self._ends, index)
        return self.tables[part], index - (self._ends[part - 1] if part else 0)


class _JsonLines(Sequence[Row]):
    """JSON lines, kept as bytes and decoded on access: a tenth of the memory of dicts."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return json.loads(self._lines[index])


class _ArrowRows(Sequence[Row]):
    """Rows of an Arrow table. Neighbours are converted together, since one slice at a time is slow."""

    BLOCK = 256

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._block: tuple[int, list[dict[str, Any]]] = (-1, [])

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        start, rows = self._block
        if start <= index < start + len(rows):
            return rows[index - start]
        if index != start + len(rows) and index != 0:
            # Out of order (a shuffled epoch): the neighbours would not be used.
            return self._table.slice(index, 1).to_pylist()[0]
        rows = self._table.slice(index, self.BLOCK).to_pylist()
        # One assignment, so that a reader in another thread sees the old block or the new one.
        self._block = (index, rows)
        return rows[0]


def load_rows(files: Sequence[str], *, split: Split = "train", max_rows: int | None = None) -> Rows:
    """Rows of `files` in order, the first `max_rows` of them.

    A file is parquet, JSONL, JSON (a list, or an object that holds one), CSV (every value a string); a folder
    stands for the file of `split` in it; `hf:NAME[@CONFIG][:SPLIT]` is a data set of the hub, or one that
    `datasets` saved under that path. A name without a suffix finds the file that has one.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row is not an object; the message holds file and line.
    """
    if not files:
        raise DataError(f"{FIELDS[split]} is empty; give parquet, JSONL, JSON or CSV files, a folder, or hf:NAME")
    tables = [table for file in files for table in _open(str(file), split)]
    for table in tables:
        if not len(table):
            raise DataError(f"{FIELDS[split]}: {table.source} has no rows")
    stems = [table.stem for table in tables]
    for table in tables:
        if stems.count(table.stem) > 1:
            table.stem = str(Path(table.source).with_suffix(""))
    return Rows(tables, max_rows)


def split_files(folder: Path, split: Split) -> list[Path]:
    """The files of `split` in a folder: `train.jsonl`, or `train*` in order; empty when there are none."""
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    for name in SPLIT_NAMES[split]:
        exact = [path for path in files if path.stem == name]
        found = exact[:1] or [path for path in files if path.stem.startswith((f"{name}-", f"{name}_", f"{name}."))]
        if found:
            return found
    return []


def _open(file: str, split: Split) -> list[Table]:
    if file.startswith("hf:"):
        return [_hub_table(file, split)]
    path = Path(file).expanduser()
    if path.is_dir():
        if any((path / mark).exists() for mark in SAVED_DATASET_FILES):
            return [_hub_table(f"hf:{path}", split)]
        found = split_files(path, split)
        if not found:
            there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            names = ", ".join(f"{name}.*" for name in SPLIT_NAMES[split])
            raise DataError(f"{FIELDS[split]}: folder {file} has no {names} ({' '.join(SUFFIXES)}); it holds {there}")
        return [_file_table(p, split) for p in found]
    if not path.exists():
        found = [path.with_name(path.name + suffix) for suffix in SUFFIXES]
        found = [p for p in found if p.exists()]
        if not found:
            raise DataError(f"{FIELDS[split]}: no such file or folder: {file}")
        path = found[0]
    return [_file_table(path, split)]


def _file_table(path: Path, split: Split) -> Table:
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".csv": _read_csv}
    try:
        if path.suffix in readers:
            return readers[path.suffix](path)
        if path.suffix == ".json":
            return _read_json(path, split)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{FIELDS[split]}: {path} cannot be read: {_first_line(error)}") from error
    raise DataError(f"{FIELDS[split]}: {path} has no known suffix; it must end in {', '.join(SUFFIXES)}")


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        _check_columns(pq.read_schema(path, memory_map=True).names, path)
        table = pq.read_table(path, memory_map=True)
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a parquet file: {_first_line(error)}") from error
    return Table(_ArrowRows(table), stem=path.stem, source=str(path))


def _read_jsonl(path: Path) -> Table:
    lines: list[bytes] = []
    numbers: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.strip().removeprefix(b"\xef\xbb\xbf")
            if line:
                _check_object(_parse(line, f"{path}:{number}"), f"{path}:{number}")
                lines.append(line)
                numbers.append(number)
    return Table(_JsonLines(lines), stem=path.stem, source=str(path), lines=numbers)


def _read_json(path: Path, split: Split) -> Table:
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    try:
        value = json.loads(text)
    except ValueError as error:
        # JSON lines under the wrong suffix are common.
        if text.startswith(b"{") and b"\n" in text:
            return _read_jsonl(path)
        raise DataError(f"{path} is not JSON: {_first_line(error)}") from error
    _check_text(text, value, str(path))
    if isinstance(value, dict):
        value = _list_in(value, path, split)
    if not isinstance(value, list):
        raise DataError(f"{path} holds a JSON {type(value).__name__}; it must hold a list of rows, or an object with one")
    for i, row in enumerate(value):
        _check_object(row, f"{path}: row {i}")
    return Table(value, stem=path.stem, source=str(path))


def _list_in(value: dict[str, Any], path: Path, split: Split) -> Any:
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    for name in SPLIT_NAMES[split]:
        if name in lists:
            return lists[name]
    if len(lists) != 1:
        found = f"lists under {', '.join(lists)}" if lists else f"keys {', '.join(value) or '(none)'} and no list"
        raise DataError(
            f"{path} must hold a list of rows, or an object with one list or with lists train and test; it has {found}"
        )
    return next(iter(lists.values()))


def _read_csv(path: Path) -> Table:
    rows: list[Row] = []
    lines: list[int] = []
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            _check_columns(header, path)
            for cells in reader:
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}:{reader.line_num}: {len(cells)} cells under {len(header)} columns ({', '.join(header)})"
                    )
                rows.append(dict(zip(header, cells, strict=True)))
                lines.append(reader.line_num)
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from error
    return Table(rows, stem=path.stem, source=str(path), lines=lines)


def _check_columns(names: Sequence[str], path: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path}: there are {names.count(twice[0])} columns named {twice[0]!r}; rename or drop one")


def _parse(line: bytes, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not a JSON object: {_first_line(error)}") from error
    _check_text(line, value, where)
    return value


def _check_text(source: bytes, value: Any, where: str) -> None:
    """JSON may write half of a surrogate pair (`\\ud83d` alone), which is no character that a tokenizer or file takes."""
    if b"\\ud" not in source.lower():
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{where}: holds {half}, half of a surrogate pair, which is no character; mend the text") from None


def _check_object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, got {type(row).__name__}")


def _hub_table(file: str, split: Split) -> Table:
    """`hf:NAME[@CONFIG][:SPLIT]`: a saved data set when NAME is a path, else a data set of the hub."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{FIELDS[split]}: {file} needs the package datasets; run: pip install datasets") from error
    field = FIELDS[split]
    name, _, wanted = file.removeprefix("hf:").partition(":")
    name, _, config = name.partition("@")
    local = looks_like_path(name)
    if local and not Path(name).expanduser().exists():
        raise DataError(f"{field}: no such folder: {name} (from {file})")
    if not local and not hub_reachable():
        datasets.config.HF_HUB_OFFLINE = True
    try:
        if local and any((Path(name).expanduser() / mark).exists() for mark in SAVED_DATASET_FILES):
            data = datasets.load_from_disk(str(Path(name).expanduser()))
        else:
            data = datasets.load_dataset(name, config or None)
    except Exception as error:  # The library raises a dozen types, its own and its dependencies'.
        hint = "" if local or hub_reachable() else "; the hub cannot be reached: give a local file instead"
        raise DataError(f"{field}: {file} cannot be loaded: {_first_line(error)}{hint}") from error
    if isinstance(data, dict):
        choices = [wanted] if wanted else [name for name in SPLIT_NAMES[split] if name in data]
        if not choices or choices[0] not in data:
            raise DataError(f"{field}: {file} has no split {wanted or split}; it has {', '.join(data)}")
        data = data[choices[0]]
    data = data.with_format("arrow")
    return Table(_ArrowRows(data[:]), stem=Path(name).name, source=file)


def digest_of(files: Sequence[str]) -> str:
    """A digest of the contents of data files and folders; of the name alone for what is on the hub."""
    digest = hashlib.blake2b(digest_size=16)
    for name in files:
        path = Path(name).expanduser()
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
        for file in inside:
            digest.update(str(name).encode())
            if file.is_file():
                with file.open("rb") as stream:
                    while block := stream.read(1 << 22):
                        digest.update(block)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
