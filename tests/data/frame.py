from __future__ import annotations

from typing import Any


class Frame:
    """What a data frame of pandas shows of itself: its columns, rows by number, and its records."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.columns, self.iloc = rows, list(rows[0]), rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows] if column in self.columns else [][0]

    def to_dict(self, form: str) -> list[dict[str, Any]]:
        assert form == "records"
        return self.rows
