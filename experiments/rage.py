"""RAGE (Data and Diggavi): six attacks against the filter and its rivals."""

from collections.abc import Sequence

from blackthorn.experiments import byzantine_mnist, byzantine_verdicts
from blackthorn.experiments.study import Cell, Experiment, Numbers, Paper, Scale, Section


def _attack(name: str) -> Experiment:
    def cells(scale: Scale) -> Sequence[Cell]:
        return byzantine_mnist.cells(scale, (name,))

    def section(numbers: Numbers, scale: Scale) -> Section:
        return byzantine_verdicts.attack_section(name, numbers, scale)

    kind = byzantine_mnist.ATTACKS[name]
    return Experiment(
        name,
        f"{byzantine_mnist.FIGURES[name]}: {name}, {kind}",
        "Training loss, test accuracy and time of RAGE and its rivals, 25 of 200 clients corrupt "
        "and others in every round.",
        cells,
        section,
    )


PAPER = Paper(
    "rage",
    "Byzantine-resilient high-dimensional federated learning",
    "Data and Diggavi: RAGE",
    [
        Experiment(
            "table",
            "All attacks: test accuracy of every rule",
            "Test accuracy in %, mean over draws of the initial weights; the same runs as those of "
            "Figures 3 and 4.",
            byzantine_mnist.all_cells,
            byzantine_verdicts.table_section,
        ),
        *(_attack(name) for name in byzantine_mnist.ATTACKS),
    ],
    (
        "RAGE is the best of the robust rules under A.1 to A.4 and A.6 and not under A.5; it "
        "removes none of the corrupt clients of A.5, and those of A.2 in a round or two of 25 at "
        "most: they hide inside the honest spread and do little harm.",
    ),
)
