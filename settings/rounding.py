"""Figures that bound something, as people are told them: a bound that is rounded down is none."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def upward(figure: float, digits: int = 3) -> str:
    """The smallest number of `digits` significant digits that is not below `figure` ≥ 0, without
    an exponent; "inf" for infinity.

    Of an epsilon, or of a noise multiplier that keeps to one: neither may be less than it is.
    """
    return _rounded(figure, digits, ROUND_CEILING)


def downward(figure: float, digits: int = 3) -> str:
    """The largest number of `digits` significant digits that is not above `figure` ≥ 0: of a lower
    bound on an epsilon, or of noise that there is."""
    return _rounded(figure, digits, ROUND_FLOOR)


def exact(figure: float) -> str:
    """The number itself, as short as can be: of a δ or a rate for which another figure holds."""
    short = f"{figure:g}"
    return short if float(short) == figure else repr(float(figure))


def _rounded(figure: float, digits: int, direction: str) -> str:
    number = Decimal(repr(float(figure)))
    if not number.is_finite():
        return f"{figure:g}"
    return f"{Context(prec=digits, rounding=direction).plus(number):f}"
