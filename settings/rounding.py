"""Figures that bound something, as people are told them: a bound that is rounded down is none."""

from decimal import ROUND_CEILING, Context, Decimal


def upward(figure: float, digits: int = 3) -> str:
    """The smallest number of `digits` significant digits that is not below `figure` ≥ 0, without
    an exponent; "inf" for infinity.

    Of an epsilon, or of a noise multiplier that keeps to one: neither may be less than it is.
    """
    exact = Decimal(repr(float(figure)))
    if not exact.is_finite():
        return f"{figure:g}"
    return f"{Context(prec=digits, rounding=ROUND_CEILING).plus(exact):f}"
