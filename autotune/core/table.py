"""Compact tables of whole numbers, such as the lengths of every row of a large dataset."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[Any]

# numpy is imported where it is needed: `--help` does not need it, and takes twice as long with it.
_PART_ROWS = 1 << 16
_FASTEST = 1


class Table:
    """Columns of equally many whole numbers from 0 on, each in the smallest type that holds its largest.

    Calculations are on :meth:`parts`, whose numbers are large enough for sums and products.

    Args:
        columns: arrays or sequences of numbers; at least one.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        import numpy as np

        arrays = [np.asarray(column) for column in columns]
        self._columns = tuple(one.astype(np.min_scalar_type(one.max(initial=0))) for one in arrays)

    @classmethod
    def of_text(cls, text: str) -> Table:
        """Return the table of which :attr:`text` is the text.

        Raises:
            ValueError: it is no such text.
        """
        import numpy as np

        try:
            columns = [part.split(":") for part in text.split(" ")]
            return cls([np.frombuffer(zlib.decompress(base64.b64decode(data)), kind) for kind, data in columns])
        except (TypeError, zlib.error) as error:
            raise ValueError(f"no table: {error}") from error

    @property
    def text(self) -> str:
        """The table as a short text: of each column the type, and the compressed numbers."""

        def compressed(column: Any) -> str:
            return base64.b64encode(zlib.compress(column, _FASTEST)).decode()

        return " ".join(f"{column.dtype.str[1:]}:{compressed(column)}" for column in self._columns)

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self._columns)

    def __len__(self) -> int:
        return len(self._columns[0])

    def parts(self) -> Iterator[Numbers]:
        """Yield successive rows, not too many at once; shape (rows, columns)."""
        for start in range(0, len(self), _PART_ROWS):
            yield self._stacked(slice(start, start + _PART_ROWS))

    def rows(self, chosen: Table | None = None) -> Numbers:
        """Return all rows, or those that the only column of another table numbers; shape (rows, columns).

        They have 32 bits, which is enough for lengths and half of what :meth:`parts` takes.
        """
        return self._stacked(slice(None) if chosen is None else chosen._columns[0], "int32")

    def _stacked(self, chosen: Any, kind: str = "int64") -> Numbers:
        import numpy as np

        return np.stack([column[chosen] for column in self._columns], axis=1, dtype=kind, casting="unsafe")
