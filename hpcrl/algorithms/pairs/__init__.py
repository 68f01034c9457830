"""Losses on pairs of a chosen and a rejected answer, and on answers that are labelled good or bad."""
