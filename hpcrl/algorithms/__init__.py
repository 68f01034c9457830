"""Advantage estimators and objectives, one file each; `spec` defines the algorithms as pairs of them."""
