"""Reads a data set: rows by index, each with its location in the file for messages.

Owns file formats and their errors; `examples` interprets rows. A JSONL file stays on disk; only the positions
of its lines are in memory. Parquet and Hugging Face data sets stay in Arrow tables. JSON, CSV and .gz files
are loaded as Python objects, so large ones raise an error with a hint.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpipe.config.data import SPLIT_PREFIX, DataConfig, DataFormat
from rlpipe.config.limits import did_you_mean
from rlpipe.config.paths import PREFIX, resolve

Row = dict[str, Any]
_ENDINGS = {
    ".jsonl": DataFormat.JSONL,
    ".ndjson": DataFormat.JSONL,
    ".json": DataFormat.JSON,
    ".csv": DataFormat.CSV,
    ".parquet": DataFormat.PARQUET,
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LARGEST = 512 << 20  # maximum bytes of a file loaded as Python objects, which need five times as much memory
_LARGEST_TABLE = 4 << 30  # maximum bytes of a parquet file when unpacked
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


class Rows:
    """A data set. name: its name in the settings. columns: the columns of its format, or of its first row."""

    def __init__(
        self, name: str, rows: Sequence[Row], columns: Sequence[str], place: Callable[[int], str]
    ) -> None:
        self.name, self.columns, self.place = name, list(columns), place
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Return a row. Raises ValueError with the row's location if it cannot be read."""
        return self._rows[index]


def read_rows(data: DataConfig, setting: str, name: str) -> Rows:
    """Open the data set that a setting of `data` names. Raises ValueError with file, line and hint."""
    where = f"{setting}={name}"
    if name.startswith(SPLIT_PREFIX):
        if resolve(data.train).is_file():
            raise ValueError(
                f"{where}: data.train={data.train} is a file and has no splits: name a file, or a share "
                "of its rows, as in data.held_out=0.1."
            )
        return _hugging_face(where, data.train, data.subset, name.removeprefix(SPLIT_PREFIX))

    path = resolve(name)
    format = data.format if data.format is not DataFormat.AUTO else _format(where, name, path)
    if format is DataFormat.HUGGING_FACE:
        return _hugging_face(where, name, data.subset, data.split)

    _check_file(where, path)
    reader = {
        DataFormat.JSONL: _read_jsonl,
        DataFormat.JSON: _read_json,
        DataFormat.CSV: _read_csv,
        DataFormat.PARQUET: _read_parquet,
    }[format]
    try:
        rows = reader(where, name, path)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{where} is not a whole gzip file ({error}): rename it without .gz, or write it again."
        ) from None
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror or error}.") from None

    if not len(rows):
        raise ValueError(f"{where} is empty: it has no row. Name a file with at least two.")
    return rows


# --- the format -------------------------------------------------------------------------------------------


def _format(where: str, name: str, path: Path) -> DataFormat:
    """Return the format that a file name implies. Raises ValueError if it is unknown."""
    if path.is_dir():
        return DataFormat.HUGGING_FACE

    suffixes = [suffix.lower() for suffix in path.suffixes]
    ending = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes or [""])[-1]
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    if not path.exists() and _HUB_ID.fullmatch(name) and not name.startswith(PREFIX):
        return DataFormat.HUGGING_FACE
    if not path.exists():
        _check_file(where, path)

    raise ValueError(
        f"{where}: {ending or 'a name without ending'} is not a recognised format. Rename it to "
        f"{', '.join(_ENDINGS)}, or set data.format={'|'.join(f for f in DataFormat if f != 'auto')}."
    )


def _check_file(where: str, path: Path) -> None:
    """Raise ValueError if a path is not a file; the message suggests the most similar name in its folder."""
    if path.is_file():
        return
    if path.is_dir():
        raise ValueError(f"{where} is a folder: name a file in it, or set data.format=hf.")

    siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ValueError(
        f"{where}: there is no file {path}.{did_you_mean(path.name, siblings)} Correct the path; a relative "
        "one starts at the folder in which the run is started."
    )


@contextmanager
def _opened(where: str, path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    """Open a file, decompressed if its name ends with .gz. Raises ValueError if it is too large."""
    size = path.stat().st_size
    if size > _LARGEST:
        raise ValueError(
            f"{where} has {size / 1e9:.1f} GB, and {path.suffix} files are held in the memory of every "
            "rollout worker as Python objects, about five times that: store it as JSONL without .gz, or as "
            "parquet, which stay on disk."
        )
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        if packed and path.suffix != ".gz":
            raise ValueError(f"{where} holds gzip data: rename it to {path.name}.gz.")
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        else:
            yield file


# --- JSON -------------------------------------------------------------------------------------------------


def _not_utf8(place: str, error: UnicodeDecodeError) -> ValueError:
    """Return the error for a text that is not UTF-8."""
    is_wide = "16" in error.encoding or error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return ValueError(
        f"{place}: byte {error.object[error.start]:#x} is not UTF-8. Save the file as UTF-8, as by "
        f"`iconv {'-f UTF-16 ' if is_wide else ''}-t UTF-8`."
    )


def _too_large(place: str, error: Exception) -> ValueError:
    """Return the error for JSON that Python cannot parse: too deep nesting, or a number that is too long."""
    reason = str(error).partition(":")[0]
    return ValueError(f"{place} cannot be read ({reason}): store that value as text, or leave it out.")


def _parse(place: str, text: bytes | str) -> Row:
    """Parse the JSON object in one line. Raises ValueError with the line's location if it is invalid."""
    try:
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from None
    except json.JSONDecodeError as error:
        shown = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise ValueError(
            f"{place} is not JSON at column {error.colno}: {error.msg}, in {shown.strip()[:60]!r}. Correct "
            "the line, or remove it."
        ) from None
    except (RecursionError, ValueError) as error:
        raise _too_large(place, error) from None
    if not isinstance(row, dict):
        hint = "set data.format=json" if isinstance(row, list) else "each line must be an object"
        raise ValueError(f'{place} is a {type(row).__name__}, not an object like {{"prompt": ...}}: {hint}.')
    return row


class _Lines(Sequence[Row]):
    """The rows of a JSONL file; a line is read from disk and parsed on each access."""

    def __init__(self, where: str, name: str, path: Path) -> None:
        self._name, self._file = name, path.open("rb")
        self._starts, self._numbers = array("Q"), array("Q")

        position = 0
        for number, line in enumerate(self._file, 1):
            if number == 1 and line.startswith(_GZIP):
                raise ValueError(f"{where} holds gzip data: rename it to {path.name}.gz.")
            if line.strip().strip(_BOM):
                self._starts.append(position)
                self._numbers.append(number)
            position += len(line)
        self._starts.append(position)

    def place(self, index: int) -> str:
        """Return the file and line number of a row."""
        return f"{self._name}:{self._numbers[index]}"

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Row:
        start, end = self._starts[index], self._starts[index + 1]
        # Several threads read concurrently, so use `pread`, which does not move the file position.
        line = os.pread(self._file.fileno(), end - start, start)
        return _parse(self.place(index), line.removeprefix(_BOM).strip())


def _read_jsonl(where: str, name: str, path: Path) -> Rows:
    """Read JSONL; the lines of a plain file stay on disk, and the lines of a compressed file in memory."""
    if path.suffix != ".gz":
        lines = _Lines(where, name, path)
        return Rows(name, lines, list(lines[0]) if len(lines) else [], lines.place)

    with _opened(where, path) as file:
        numbered = [(number, line) for number, line in enumerate(file, 1) if line.strip().strip(_BOM)]
    rows = [_parse(f"{name}:{number}", line.removeprefix(_BOM)) for number, line in numbered]
    return Rows(name, rows, list(rows[0]) if rows else [], lambda index: f"{name}:{numbered[index][0]}")


def _read_json(where: str, name: str, path: Path) -> Rows:
    """Read a JSON list of objects. Raises ValueError if it is invalid."""
    with _opened(where, path) as file:
        text = file.read().decode("utf-8-sig")
    if not text.strip():
        return Rows(name, [], [], str)

    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "set data.format=jsonl" if error.msg == "Extra data" else "correct it"
        raise ValueError(
            f"{name}:{error.lineno} is not JSON at column {error.colno}: {error.msg}. It must be one list of "
            f"objects: {hint}."
        ) from None
    except (RecursionError, ValueError) as error:
        raise _too_large(where, error) from None

    if not isinstance(rows, list):
        keys = f" with the keys {', '.join(map(repr, list(rows)[:5]))}" if isinstance(rows, dict) else ""
        raise ValueError(
            f"{where} is a {type(rows).__name__}{keys}, not a list of objects: store the list only, as in "
            '[{"prompt": ...}, ...].'
        )
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f'{where}, row {index + 1} is a {type(row).__name__}, not an object like {{"prompt": ...}}.'
            )
    return Rows(name, rows, list(rows[0]) if rows else [], lambda index: f"{name}, row {index + 1}")


# --- tables -----------------------------------------------------------------------------------------------


def _read_csv(where: str, name: str, path: Path) -> Rows:
    """Read a CSV table whose first line names the columns. Raises ValueError if it is invalid."""
    csv.field_size_limit(1 << 30)
    with _opened(where, path) as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        rows, lines = [], []
        try:
            columns = next(reader, [])
            if len(columns) == 1 and (separators := [each for each in ";\t|" if each in columns[0]]):
                raise ValueError(
                    f"{where} separates its columns by {separators[0]!r} ({columns[0]}): write commas."
                )
            for values in reader:
                if len(values) not in (0, len(columns)):
                    raise ValueError(
                        f"{name}:{reader.line_num} has {len(values)} values, and the first line names "
                        f"{len(columns)} columns ({', '.join(columns)}): quote values that hold commas or "
                        "line breaks."
                    )
                if values:
                    rows.append(dict(zip(columns, values, strict=True)))
                    lines.append(reader.line_num)
        except csv.Error as error:
            raise ValueError(f"{name}:{reader.line_num} is not CSV: {error}. Correct its quotes.") from None

    if len(set(columns)) < len(columns):
        raise ValueError(f"{where} names a column twice in {', '.join(columns)}: rename one.")
    return Rows(name, rows, columns, lambda index: f"{name}:{lines[index]}")


class _Slices(Sequence[Row]):
    """The rows of an Arrow table, converted one by one."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: Any) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]


def _read_parquet(where: str, name: str, path: Path) -> Rows:
    """Read a parquet table, memory-mapped. Raises ValueError if it is invalid or too large."""
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{where} needs pyarrow: pip install pyarrow, or store the rows as JSONL.") from None

    try:
        size = pyarrow.parquet.ParquetFile(path).metadata
        unpacked = sum(size.row_group(group).total_byte_size for group in range(size.num_row_groups))
        if unpacked > _LARGEST_TABLE:
            raise ValueError(
                f"{where} has {unpacked / 1e9:.1f} GB when unpacked, in the memory of every rollout worker: "
                "store it as JSONL, or as a saved Hugging Face data set, which stay on disk."
            )
        table = pyarrow.parquet.read_table(path, memory_map=True)
    except pyarrow.lib.ArrowException as error:
        raise ValueError(
            f"{where} is not a parquet file: {str(error).splitlines()[0]} Write it again, as by "
            "DataFrame.to_parquet."
        ) from None
    return Rows(name, _Slices(table), table.column_names, lambda index: f"{name}, row {index + 1}")


def _hugging_face(where: str, name: str, subset: str, split: str) -> Rows:
    """Read a data set from the hub or from a folder. Raises ValueError if it cannot be loaded."""
    path = resolve(name)
    saved = path.is_dir() and any((path / f).is_file() for f in ("state.json", "dataset_dict.json"))
    if path.is_dir() and not any(path.iterdir()):
        raise ValueError(f"{where} is an empty folder: name one with a data set, or a file.")

    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{where} is not a file, so it is a Hugging Face data set, which needs the library datasets: "
            "pip install datasets, or store the rows as JSONL."
        ) from None

    datasets.disable_progress_bars()
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else name, subset or None)
    except Exception as error:  # the library, its builders and its network code raise many kinds
        reason = str(error).partition("\n")[0]
        hint = (
            "name one of its subsets with data.subset"
            if "onfig name is missing" in str(error)
            else (
                "name a folder with data files, or a file"
                if path.is_dir()
                else "correct the id, or, where there is no network, name a file or folder"
            )
        )
        raise ValueError(f"{where} cannot be loaded ({type(error).__name__}: {reason}): {hint}.") from None

    if isinstance(loaded, datasets.DatasetDict):
        splits = [str(each) for each in loaded]
        if split not in splits:
            raise ValueError(
                f"{where} has no split {split!r}: it has {', '.join(splits)}.{did_you_mean(split, splits)} "
                "Set data.split."
            )
        loaded = loaded[split]
    rows: Any = loaded
    return Rows(name, rows, loaded.column_names, lambda index: f"{name}, {split} row {index + 1}")
