"""The best assignment between two sets, such as the boxes of a response and of its row's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best_sum(values: Sequence[Sequence[float]]) -> float:
    """The largest sum of values of a matrix, at most one per row and one per column. No value is negative.

    The Hungarian method with potentials in O(n^2 m) for a shorter side n, where the cost of a pair is minus its value:
    each row in turn is assigned along the cheapest augmenting path. Column 0 stands for "not assigned".
    """
    if len(values) > len(values[0]):
        values = list(zip(*values, strict=True))
    columns = len(values[0]) + 1
    row_potential, column_potential = [0.0] * len(values), [0.0] * columns
    row_of = [-1] * columns
    for start in range(len(values)):
        row_of[0], column = start, 0
        slack, before = [math.inf] * columns, [0] * columns
        visited = [False] * columns
        while row_of[column] >= 0:
            visited[column] = True
            row, nearest = row_of[column], 0
            for other in range(1, columns):
                if visited[other]:
                    continue
                cost = -values[row][other - 1] - row_potential[row] - column_potential[other]
                if cost < slack[other]:
                    slack[other], before[other] = cost, column
                if not nearest or slack[other] < slack[nearest]:
                    nearest = other
            step = slack[nearest]
            for other in range(columns):
                if visited[other]:
                    row_potential[row_of[other]] += step
                    column_potential[other] -= step
                else:
                    slack[other] -= step
            column = nearest
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    return math.fsum(values[row][column - 1] for column, row in enumerate(row_of) if column and row >= 0)
