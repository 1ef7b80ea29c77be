"""The 2-Wasserstein distance, in which FA-LD's convergence is stated (Deng et al., section 5)."""

import torch
from torch import Tensor


def gaussian_distance(
    mean: Tensor, covariance: Tensor, mean_2: Tensor, covariance_2: Tensor
) -> float:
    """W2 of two Gaussians with means [d] and covariances [d, d]:

    W2² = ‖m − m'‖² + tr(C + C' − 2 (C^½ C' C^½)^½)
    """
    root = _square_root(covariance.double())
    cross = _square_root(root @ covariance_2.double() @ root)
    squared = (mean.double() - mean_2.double()).square().sum()
    squared += torch.trace(covariance.double() + covariance_2.double() - 2 * cross)
    return float(squared.clamp(min=0).sqrt())


def _square_root(matrix: Tensor) -> Tensor:
    """The symmetric root of a symmetric positive semidefinite matrix [d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
