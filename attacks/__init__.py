"""What Byzantine clients do: to their updates, to their data, to their replies.

`get(name)` finds an attack; `AttackingGrid` lies on behalf of simulated clients,
`byzantine_app` in the place of a node's honest ClientApp.
"""

from .adaptive import RuleAt, ServerRule, adaptive
from .byzantine_app import byzantine_app
from .distance_attacks import min_max, min_sum
from .registry import Attack, DataAttack, ReplyAttack, VectorAttack, flip_labels, get, names
from .simulated import AttackingGrid, fixed_corrupt, redrawn_corrupt
from .vector_attacks import (
    all_ones,
    baruch,
    gradient_shift,
    inner_product,
    mimic,
    random_gradient,
    reverse_average,
    reverse_scaled_average,
    sign_flip,
)

__all__ = [
    "Attack",
    "AttackingGrid",
    "DataAttack",
    "ReplyAttack",
    "RuleAt",
    "ServerRule",
    "VectorAttack",
    "adaptive",
    "all_ones",
    "baruch",
    "byzantine_app",
    "fixed_corrupt",
    "flip_labels",
    "get",
    "gradient_shift",
    "inner_product",
    "mimic",
    "min_max",
    "min_sum",
    "names",
    "random_gradient",
    "redrawn_corrupt",
    "reverse_average",
    "reverse_scaled_average",
    "sign_flip",
]
