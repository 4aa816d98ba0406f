"""A compact table of whole numbers, such as the lengths of all rows of a large dataset."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[Any]

# numpy is imported in functions: it would double the time of `--help`.
_PART_ROWS = 1 << 16
_FASTEST = 1


class Table:
    """Columns of equally many non-negative integers, each in the smallest type for its largest number.

    :meth:`parts` returns 64-bit integers, large enough for sums and products.

    Args:
        columns: arrays or sequences of numbers; at least one.
    """

    def __init__(self, columns: Sequence[Any]) -> None:
        import numpy as np

        arrays = [np.asarray(column) for column in columns]
        self._columns = tuple(one.astype(np.min_scalar_type(one.max(initial=0))) for one in arrays)

    @classmethod
    def of_text(cls, text: str) -> Table:
        """Return the table with this :attr:`text`.

        Raises:
            ValueError: it is not the text of a table.
        """
        import numpy as np

        try:
            columns = [part.split(":") for part in text.split(" ")]
            return cls([np.frombuffer(zlib.decompress(base64.b64decode(data)), kind) for kind, data in columns])
        except (TypeError, zlib.error) as error:
            raise ValueError(f"not the text of a table: {error}") from error

    @property
    def text(self) -> str:
        """The table as text: for each column, its type and its compressed numbers."""

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
        """Yield successive parts of at most 65,536 rows; shape (rows, columns)."""
        for start in range(0, len(self), _PART_ROWS):
            yield self._stacked(slice(start, start + _PART_ROWS))

    def rows(self, chosen: Table | None = None) -> Numbers:
        """Return all rows, or those whose indices are the only column of ``chosen``; shape (rows, columns).

        They are 32-bit integers, enough for lengths, in half of the memory of :meth:`parts`.
        """
        return self._stacked(slice(None) if chosen is None else chosen._columns[0], "int32")

    def _stacked(self, chosen: Any, kind: str = "int64") -> Numbers:
        import numpy as np

        return np.stack([column[chosen] for column in self._columns], axis=1, dtype=kind, casting="unsafe")
