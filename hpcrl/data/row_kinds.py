"""How the rows of each kind (hpcrl.spec.kinds.RowKind) are parsed."""

from __future__ import annotations

from collections.abc import Mapping

from hpcrl.data.labelled import parse_labelled
from hpcrl.data.pairs import parse_pair
from hpcrl.data.rows import ReadRow, parse_row
from hpcrl.spec.kinds import RowKind

READERS: Mapping[RowKind, ReadRow] = {"answers": parse_row, "pairs": parse_pair, "labelled": parse_labelled}
"""Kind of the rows of data.train -> parser of a raw row."""
