"""Reading data files: every form gives the same rows, and every mistake one line that says where and what."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.rows import load_rows, split_files
from verl.errors import DataError

ROWS = [
    {"question": "Wie viel ist 1 + 1?", "answer": "2", "tags": ["a", "b"], "meta": {"level": 1}},
    {"question": 'So,\nzwei Zeilen; "quoted" – 漢字', "answer": "3", "tags": [], "meta": {"level": 2}},
    {"question": "c", "answer": "4", "tags": ["c"], "meta": {"level": 3}},
]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows=ROWS):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def loaded(path, **options):
    return list(load_rows([str(path)], **options))


@pytest.mark.parametrize(
    "write",
    [
        lambda d: write_jsonl(d / "train.jsonl"),
        lambda d: write_parquet(d / "train.parquet"),
        lambda d: write_json(d / "train.json", ROWS),
        lambda d: write_json(d / "train.json", {"version": 1, "data": ROWS}),
        lambda d: write_json(d / "raw.json", {"train": ROWS, "test": ROWS[:1]}),
        lambda d: write_jsonl(d / "lines_under_the_wrong_suffix.json"),
        lambda d: write_jsonl(d / "train.jsonl").parent,
        lambda d: write_parquet(d / "train.parquet").with_suffix(""),
    ],
    ids=["jsonl", "parquet", "json", "json-object", "json-splits", "jsonl-as-json", "folder", "no-suffix"],
)
def test_every_form_gives_the_same_rows(write, tmp_path):
    assert loaded(write(tmp_path)) == ROWS


def test_csv_cells_stay_text(tmp_path):
    (tmp_path / "rows.csv").write_text('\ufeffquestion,answer\n"a,\nb",007\nc,2\n', encoding="utf-8")
    assert loaded(tmp_path / "rows.csv") == [{"question": "a,\nb", "answer": "007"}, {"question": "c", "answer": "2"}]


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path):
    (tmp_path / "rows.jsonl").write_text('\ufeff{"a": 1}\n\n  \n{"a": 2}\n', encoding="utf-8")
    rows = load_rows([str(tmp_path / "rows.jsonl")])
    assert list(rows) == [{"a": 1}, {"a": 2}]
    assert rows.where(1).endswith("rows.jsonl:4")


def test_several_files_follow_each_other_and_rows_know_their_origin(tmp_path):
    first = write_jsonl(tmp_path / "first.jsonl")
    second = write_parquet(tmp_path / "second.parquet", [{"question": "z"}])
    rows = load_rows([str(first), str(second)])
    assert [row["question"] for row in rows] == [*(row["question"] for row in ROWS), "z"]
    assert [rows.uid(i) for i in range(4)] == ["first:0", "first:1", "first:2", "second:0"]
    assert rows.where(2) == f"{first}:3"
    assert rows.where(3) == f"{second}: row 0"
    assert len(load_rows([str(first), str(second)], max_rows=2)) == 2
    with pytest.raises(IndexError):
        rows[4]


def test_files_of_one_name_keep_their_uids_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train.jsonl", ROWS[:1])
    rows = load_rows([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [rows.uid(i) for i in range(2)] == [f"{tmp_path}/a/train:0", f"{tmp_path}/b/train:0"]


def test_parquet_rows_read_in_any_order_are_the_same(tmp_path):
    rows = [{"n": i, "text": str(i) * 3} for i in range(1000)]
    read = load_rows([str(write_parquet(tmp_path / "many.parquet", rows))])
    assert [read[i] for i in (999, 0, 1, 2, 500, 501, 255, 256, 257)] == [
        rows[i] for i in (999, 0, 1, 2, 500, 501, 255, 256, 257)
    ]
    assert list(read) == rows


def test_a_folder_gives_the_files_of_its_split(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "training_notes", "validation", "test_rows_0_9"):
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])
    assert [p.stem for p in split_files(tmp_path, "train")] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert [p.stem for p in split_files(tmp_path, "test")] == ["test_rows_0_9"]
    write_jsonl(tmp_path / "train.jsonl")
    assert [p.stem for p in split_files(tmp_path, "train")] == ["train"]


@pytest.mark.parametrize("form", ["hf:{path}:train", "hf:{path}", "{path}"])
def test_saved_hugging_face_data_sets_load(form, tmp_path):
    import datasets

    data = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:1])})
    data.save_to_disk(str(tmp_path / "saved"))
    path = form.format(path=tmp_path / "saved")
    assert loaded(path) == ROWS
    if ":train" not in form:
        assert loaded(path, split="test") == ROWS[:1]
    assert load_rows([path]).uid(2) == "saved:2"


def test_a_saved_single_split_loads(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).select([2, 0]).save_to_disk(str(tmp_path / "one"))
    assert loaded(f"hf:{tmp_path / 'one'}") == [ROWS[2], ROWS[0]]


def test_a_local_folder_loads_through_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl")
    assert loaded(f"hf:{tmp_path / 'set'}:train") == ROWS


def test_an_unreachable_hub_is_one_line_and_quick(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.data.rows.hub_reachable", lambda: False)
    with pytest.raises(
        DataError, match=r"hf:openai/no-such-set cannot be loaded: .*; the hub cannot be reached: give a local"
    ) as error:
        load_rows(["hf:openai/no-such-set"])
    assert "\n" not in str(error.value)


def bad(name, content):
    def write(folder):
        (folder / name).write_text(content, encoding="utf-8")
        return folder / name

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda d: d / "none.jsonl", r"data.train_files: no such file or folder: .*none.jsonl"),
        (lambda d: d, r"has no train\.\* \(\.parquet \.jsonl \.json \.csv\); it holds nothing"),
        (bad("rows.jsonl", ""), r"rows.jsonl has no rows"),
        (bad("rows.jsonl", '{"a": 1}\n{"a": \n'), r"rows.jsonl:2: not a JSON object"),
        (bad("rows.jsonl", '{"a": 1}\n[1]\n'), r"rows.jsonl:2: a row must be a JSON object, got list"),
        (bad("rows.json", "[1, 2"), r"rows.json is not JSON"),
        (bad("rows.json", "3"), r"rows.json holds a JSON int; it must hold a list of rows"),
        (bad("rows.json", '{"a": [], "b": []}'), r"it has lists under a, b"),
        (bad("rows.json", '{"a": 1}'), r"it has keys a and no list"),
        (bad("rows.json", '[{"a": 1}, 2]'), r"rows.json: row 1: a row must be a JSON object, got int"),
        (bad("rows.parquet", "PAR0"), r"rows.parquet is not a parquet file"),
        (bad("rows.csv", "a,b\n1,2\n3\n"), r"rows.csv:3: 1 cells under 2 columns \(a, b\)"),
        (bad("rows.txt", "x"), r"rows.txt has no known suffix; it must end in .parquet, .jsonl, .json, .csv"),
        (lambda d: f"hf:{d}/nothing", r"data.train_files: no such folder: .*/nothing"),
    ],
)
def test_mistakes_are_one_line_with_the_place(write, message, tmp_path):
    with pytest.raises(DataError, match=message) as error:
        load_rows([str(write(tmp_path))])
    assert "\n" not in str(error.value)


def test_no_files_at_all_names_the_setting():
    with pytest.raises(DataError, match=r"data\.val_files is empty"):
        load_rows([], split="test")


def test_an_unknown_split_names_those_there_are(tmp_path):
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="has no split dev; it has train"):
        load_rows([f"hf:{tmp_path / 'saved'}:dev"])
