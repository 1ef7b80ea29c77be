"""Understanding clipping for federated learning (Zhang et al.): what clipping costs, and when."""

from blackthorn.experiments import clipping_cost, stationary_points, update_shapes
from blackthorn.experiments.study import Experiment, Paper

PAPER = Paper(
    "understanding-clipping",
    "Understanding clipping for federated learning: convergence and client-level differential "
    "privacy",
    "Zhang, Chen, Hong, Wu and Yi: CE-FedAvg",
    [
        Experiment(
            "stationary-points",
            "Table 4 and Claim 2.1: stationary points",
            "Where clipped FedAvg ends on three scalar quadratics.",
            stationary_points.cells,
            stationary_points.section,
        ),
        Experiment(
            "mnist",
            "Table 3 and Figure 4: the cost of clipping and of privacy on Non-IID data",
            "Test accuracy with 1920 clients, each with most of its images from two digits.",
            clipping_cost.cells,
            clipping_cost.section,
        ),
        Experiment(
            "iid",
            "Table 2: the cost of clipping and of privacy on IID data",
            "Test accuracy with 1920 clients whose images are dealt at random.",
            clipping_cost.iid_cells,
            clipping_cost.iid_section,
        ),
        Experiment(
            "updates",
            "Table 1 and Figures 1, 2 and 3: how updates spread, and what clipping them costs",
            "FedAvg and CE-FedAvg on IID and Non-IID data; norms and angles of the updates in "
            "round 16.",
            update_shapes.cells,
            update_shapes.section,
        ),
    ],
)
