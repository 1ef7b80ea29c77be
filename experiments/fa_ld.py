"""FA-LD (Deng et al.): how far its chain is from a posterior, and what its samples are worth."""

from blackthorn.experiments import (
    exact_distance,
    exact_verdicts,
    posterior_fashion,
    sampled_distance,
)
from blackthorn.experiments.study import Experiment, Paper

PAPER = Paper(
    "fa-ld",
    "On convergence of federated averaging Langevin dynamics",
    "Deng, Zhang, Ma, Song and Lin: FA-LD",
    [
        Experiment(
            "distance",
            "Theorems 5.7 to 5.10: W2 to the posterior, exactly",
            "2-Wasserstein distance of the chain's law to a known posterior against step size η, "
            "local steps K, heterogeneity, shared noise ρ and participants S.",
            exact_distance.cells,
            exact_verdicts.section,
        ),
        Experiment(
            "bayes-linear",
            "Sampled chains beside the exact law",
            "Distance of a chain's samples from a known posterior.",
            sampled_distance.cells,
            sampled_distance.section,
        ),
        Experiment(
            "fashion-mnist",
            "Posterior averaging on Fashion-MNIST",
            "Accuracy and calibration of posterior averaging, of the chain's last iterate, and of "
            "FedAvg at the same cost.",
            posterior_fashion.cells,
            posterior_fashion.section,
        ),
    ],
)
