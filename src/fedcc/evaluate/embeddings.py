"""Features in the plane (the paper's Fig. 3): PCA whitening, then t-SNE; and how pure the clusters are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

NEIGHBOURS = 10
PERPLEXITY = 30


def whiten(features: Array, variance: float) -> Array:
    """Principal components scaled to variance 1: those that explain this share of the variance, at least two."""
    from sklearn.decomposition import PCA

    if not np.ptp(features, axis=0).any():
        return np.zeros((len(features), 2))
    pca = PCA(svd_solver="full")
    components = pca.fit_transform(np.asarray(features, np.float64))
    spread = pca.explained_variance_
    number = max(2, int(np.searchsorted(np.cumsum(pca.explained_variance_ratio_), variance)) + 1)
    scale = np.where(spread > 1e-10 * spread[0], np.sqrt(spread), np.inf)  # features that do not vary stay at 0
    result: Array = (components / scale)[:, :number]
    return result


def embed(features: Array, variance: float) -> Array:
    """Points [N, 2] of features [N, D]; deterministic."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    components = whiten(features, variance)
    if not components.any():
        return components
    start = (1e-4 * components[:, :2]).astype(np.float32)  # PCA of whitened components would be arbitrary
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):  # sums over threads depend on their number
        points = TSNE(init=start, perplexity=perplexity, random_state=0, n_jobs=1).fit_transform(components)
    return np.asarray(points, np.float64)


def purity(points: Array, labels: NDArray[np.integer[Any]]) -> float:
    """The mean share of a point's 10 nearest neighbours (fewer, if there are not so many) that have its label."""
    from sklearn.neighbors import NearestNeighbors

    nearest = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(points) - 1)).fit(points)
    return float((labels[nearest.kneighbors(return_distance=False)] == labels[:, None]).mean())


def panel(features: Array, labels: NDArray[np.integer[Any]], variance: float) -> dict[str, Any]:
    """The points of one model's features and their purity."""
    points = embed(features, variance).round(4)
    return {"points": points.tolist(), "purity": round(purity(points, labels), 6)}
