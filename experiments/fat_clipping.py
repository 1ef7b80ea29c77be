"""FAT-Clipping (Yang et al.): what clipping is worth where gradients have fat tails."""

from blackthorn.experiments import catastrophes, synthetic_noise, update_tails
from blackthorn.experiments.study import Experiment, Paper

PAPER = Paper(
    "fat-clipping",
    "Taming fat-tailed (“heavier-tailed” with potentially infinite variance) noise in federated "
    "learning",
    "Yang, Qiu and Liu: FAT-Clipping",
    [
        Experiment(
            "tail-index-laws",
            "Figure 2, the estimator: tail index of laws whose α is known",
            "What the tail-index estimator answers for symmetric α-stable vectors in ten "
            "dimensions, and for the norms of the same vectors.",
            update_tails.law_cells,
            update_tails.law_section,
        ),
        Experiment(
            "tail-index-updates",
            "Figures 1 and 2: tail index of the clients' updates",
            "Tail index of the pseudo-gradient noise u_i − mean(u) against the classes a client "
            "has (p) and the local steps (K).",
            update_tails.update_cells,
            update_tails.update_section,
        ),
        Experiment(
            "failure",
            "Figure 3: a catastrophic training failure",
            "Test accuracy and the longest update of FedAvg, round by round.",
            catastrophes.failure_cells,
            catastrophes.failure_section,
        ),
        Experiment(
            "cauchy",
            "Figure 4: three methods under Cauchy noise",
            "‖x‖² on f(x, ξ) = ½‖x‖² + ⟨ξ, x⟩ in ten dimensions with Cauchy noise ξ.",
            synthetic_noise.cauchy_cells,
            synthetic_noise.cauchy_section,
        ),
        Experiment(
            "tail-indices",
            "Figure 5: convergence against the tail index",
            "The same problem with symmetric α-stable noise, α = 0.5, 1 and 1.5.",
            synthetic_noise.alpha_cells,
            synthetic_noise.alpha_section,
        ),
        Experiment(
            "success",
            "Figure 6: how often training succeeds",
            "Share of trials without a catastrophic failure, by method and heterogeneity.",
            catastrophes.success_cells,
            catastrophes.success_section,
        ),
    ],
)
