"""Finished runs in one SQLite file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from flatmin.study._record import Record


class Store:
    """The runs of one study. Each :meth:`add` is one transaction: on disk whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = sqlite3.connect(path, timeout=30.0)
        try:
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS runs (method TEXT, seed INTEGER, status TEXT NOT NULL, "
                "record TEXT NOT NULL, PRIMARY KEY (method, seed))"
            )
            self._connection.commit()
        except sqlite3.DatabaseError:
            self._connection.close()
            raise

    def add(self, record: Record) -> None:
        """Keep ``record``; a run that is there already stays as it is, unless it had failed."""
        row = (record.method, record.seed, record.status, record.to_json())
        with self._connection:
            self._connection.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?) ON CONFLICT (method, seed) DO UPDATE "
                "SET status = excluded.status, record = excluded.record WHERE runs.status = 'failed'",
                row,
            )

    def load(self) -> dict[tuple[str, int], Record]:
        """All runs by method and seed."""
        rows = self._connection.execute("SELECT method, seed, record FROM runs")
        return {(method, seed): Record.from_json(text) for method, seed, text in rows}

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
