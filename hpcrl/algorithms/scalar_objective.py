"""Objectives of a reward model, on the values at the scored tokens (hpcrl.data.head_rows); one file each."""

from __future__ import annotations

from hpcrl.algorithms.bradley_terry import BradleyTerry
from hpcrl.algorithms.interface import Objective
from hpcrl.algorithms.score_regression import ScoreRegression
from hpcrl.algorithms.step_labels import StepLabels
from hpcrl.config.head_training import HeadTrainingConfig


def make(section: HeadTrainingConfig) -> Objective:
    """The objective for the kind of rows that the section names."""
    match section.rows:
        case "pairs":
            return BradleyTerry(section.center_coef)
        case "scores":
            return ScoreRegression(section.labels)
        case "steps":
            return StepLabels()
