"""DP-NormFedAvg (Das et al.): what normalising is worth over clipping, at the same privacy."""

from blackthorn.experiments import private_fashion, private_quadratic
from blackthorn.experiments.study import Experiment, Paper

PAPER = Paper(
    "dp-normfedavg",
    "On the convergence of differentially private federated learning on non-Lipschitz objectives, "
    "and with normalized client updates",
    "Das, Hashemi, Sanghavi and Dhillon: DP-NormFedAvg",
    [
        Experiment(
            "quadratic",
            "Figures 1, 2 and 3: the synthetic quadratic",
            "Suboptimality, signal-to-noise ratio and path of clipping and normalising on 100 "
            "quadratics in 200 dimensions (section 5.3).",
            private_quadratic.cells,
            private_quadratic.section,
        ),
        Experiment(
            "fashion-mnist",
            "Table 1a: Fashion-MNIST",
            "Test accuracy of logistic regression with 3000 clients of 20 examples under "
            "client-level privacy.",
            private_fashion.cells,
            private_fashion.section,
        ),
    ],
)
