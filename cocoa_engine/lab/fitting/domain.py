"""Fits the domain of a risk: an ellipsoid around the features of the items that it was fitted on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cocoa_engine.risk.domain import SHARE_INSIDE, Domain

Floats = NDArray[np.float64]

CUT = 0.005
"""Before centre and covariance are estimated, each feature is cut at this quantile on either side."""

JITTER = 0.01
"""Added to the variance of each scaled feature, so that features which determine one another can be inverted."""


def fit_domain(scaled: Floats, folds: Sequence[tuple[NDArray[np.bool_], NDArray[np.bool_]]]) -> Domain:
    """Fit the ellipsoid on all items. Its cut-off is of items that were left out of the fit.

    Args:
        scaled: the scaled features, ``[n, k]``.
        folds: for each fold of the items, the masks of the others and of its own.
    """
    distances = np.concatenate([_distances(scaled[fold], *_ellipsoid(scaled[rest])) for rest, fold in folds])
    centre, precision = _ellipsoid(scaled)
    return Domain(
        centre=tuple(centre.tolist()),
        precision=tuple(precision.ravel().tolist()),
        cutoff=float(np.quantile(distances, SHARE_INSIDE)),
    )


def _ellipsoid(scaled: Floats) -> tuple[Floats, Floats]:
    """The centre, ``[k]``, and the precision, ``[k, k]``."""
    cut: Floats = np.asarray(np.clip(scaled, *np.quantile(scaled, [CUT, 1 - CUT], axis=0)), dtype=np.float64)
    covariance = np.atleast_2d(np.cov(cut, rowvar=False)) + JITTER * np.eye(scaled.shape[1])
    precision: Floats = np.linalg.inv(covariance).astype(np.float64)
    return cut.mean(axis=0), precision


def _distances(scaled: Floats, centre: Floats, precision: Floats) -> Floats:
    """The squared distance of each item, as :meth:`Domain.distance`."""
    apart = scaled - centre
    distances: Floats = np.einsum("nk,kl,nl->n", apart, precision, apart) / scaled.shape[1]
    return distances
