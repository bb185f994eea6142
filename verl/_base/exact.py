"""Values that one Arrow type would change: whole numbers mixed with fractions, mappings of different or no keys.

Such a column of a user's data is kept as JSON, row by row, under an Arrow type of its own, which reads as the values
themselves: 42 next to 3.5 stays 42, for rewards that compare texts, and no mapping gains the keys of another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from verl.errors import DataError


class ExactScalar(pa.ExtensionScalar):  # type: ignore[misc]
    def as_py(self, **_: Any) -> Any:
        return None if self.value is None else json.loads(self.value.as_py())


class ExactType(pa.ExtensionType):  # type: ignore[misc]
    """JSON that reads as its values."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "verl.exact")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> ExactType:
        return cls()

    def __arrow_ext_scalar_class__(self) -> type[ExactScalar]:
        return ExactScalar


pa.register_extension_type(ExactType())


def exact(values: Sequence[Any], array: pa.Array) -> pa.Array:
    """`array`, made of these values; or JSON of them, where it would give back others and JSON does not."""
    kind = array.type
    if not (pa.types.is_floating(kind) or pa.types.is_nested(kind)):
        return array
    # As text 42 differs from 42.0, and NaN equals NaN; what JSON has no form for is compared by its `repr`.
    stored, wanted = (json.dumps(each, sort_keys=True, default=repr) for each in (array.to_pylist(), list(values)))
    if stored == wanted and not _has_empty(kind):
        return array
    try:
        return _as_json(values)
    except (TypeError, ValueError, UnicodeEncodeError):
        return array


def unified(columns: Sequence[pa.ChunkedArray]) -> list[pa.ChunkedArray]:
    """One column's pieces, ready to be put together: as JSON, where any of them is or their types differ.

    Raises:
        DataError: a value that JSON cannot hold meets a column kept as JSON.
    """
    kinds = [column.type for column in columns if not pa.types.is_null(column.type)]
    is_exact = any(isinstance(kind, ExactType) for kind in kinds)
    if not is_exact and len(set(map(_family, kinds))) < 2:
        return list(columns)
    try:
        return [pa.chunked_array([_as_json(column.to_pylist())]) for column in columns]
    except (TypeError, ValueError) as error:
        if not is_exact:  # Arrow may have a common type for them
            return list(columns)
        raise DataError(f"values that Arrow keeps cannot stand beside some that are kept as JSON: {error}") from error


def _family(kind: pa.DataType) -> str:
    """What types have in common of which the widest holds the others' values."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_family(kind.value_type)}"
    if pa.types.is_integer(kind):
        return "integer"
    return "float" if pa.types.is_floating(kind) else str(kind)


def _has_empty(kind: pa.DataType) -> bool:
    """Whether mappings without a key are in it, which no Parquet file holds."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_empty(kind.value_type)
    inner = [kind.field(i).type for i in range(kind.num_fields)] if pa.types.is_struct(kind) else None
    return inner is not None and (not inner or any(map(_has_empty, inner)))


def _as_json(values: Sequence[Any]) -> pa.Array:
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.ExtensionArray.from_storage(ExactType(), pa.array(texts, pa.string()))
