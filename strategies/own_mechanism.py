"""Whether a private strategy is the mechanism as it is published: a class of one's own may add to
it, and no figure is told of one that has something else in its place.

The published classes are those that the catalogue names. What an object was given in place of a
method, and whatever its constructor or anybody else has set otherwise, is found as well; whoever
changes the library's own classes, or what lies inside of the objects that it holds, has left it.
"""

import io
import pickle
from collections.abc import Iterable
from dataclasses import fields
from types import GetSetDescriptorType, NoneType
from typing import Any
from weakref import WeakValueDictionary

from blackthorn.settings.catalogue import ALGORITHMS, load

from .adaptive_threshold import AdaptiveThreshold
from .bounding import ClipNorm
from .global_model import ServerStep
from .judging import Judge
from .learning_rate import LocalRate
from .output_iterate import OutputIterate
from .participation import (
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    RotatingParticipation,
)
from .screening import one_line

_PARTICIPATIONS = (
    PoissonParticipation,
    FixedParticipation,
    FullParticipation,
    RotatingParticipation,
)
_ROOT = "blackthorn.strategies.private_averaging:PrivateAveraging"
# What an own class that claims privacy may have: all else is the mechanism's.
_OUTSIDE_THE_MECHANISM = {"Options", "build", "facts", "on_aggregate", "summary", "__init__"}
_OF_EVERY_CLASS = {
    "__weakref__",
    "__annotations__",
    "__annotate_func__",
    "__annotations_cache__",
    "__firstlineno__",
    "__static_attributes__",
    "__init_subclass__",
    "__orig_bases__",
    "__parameters__",
}
# What a strategy may hold otherwise than its constructor left it: it changes the model, and no sum
# that a claim is about.
OF_NO_CLAIM = {
    *(
        "_rate",
        "_local_lr",
        "_step",
        "_output",
        "_observers",
        "_seed",
        "_evaluate_every",
        "_series",
        # Looked at for itself.
        "after_release",
    ),
    # What it held when the published constructor was through.
    "_built",
}
# What a run changes by itself.
_OF_A_RUN = {
    *("_has_enrolled", "_model", "_iterates", "_round", "_asked_round", "rounds_begun", "told"),
    *("knows_rounds_begun", "output_round", "is_judged", "between_rounds", "_configured"),
    *("_configured_evaluation", "_sent_in", "_population", "_refusal"),
}
_STRATEGY, _OBSERVER = "strategy", "observer"
_PLAIN = frozenset({bool, int, float, str, NoneType})
# What `seeing_releases_alone` has made, by its id.
_MADE: WeakValueDictionary[int, Any] = WeakValueDictionary()
OR_NO_CLAIM = "or claim = False in its privacy plan (no figure is then told)"


def check_published(strategy: Any) -> None:
    """Raises ValueError, one line, where a claim is made of `strategy`, a PrivateAveraging that has
    anything in place of the mechanism, in its classes or on the object."""
    if not strategy.privacy.claim:
        return
    found, built = type(strategy), vars(strategy).get("_built")
    if built is None:
        raise ValueError(
            f"the constructor of {found.__name__} has not called that of PrivateAveraging, so that "
            f"no privacy is claimed for it: call it, {OR_NO_CLAIM}"
        )
    base, held = published(found), vars(strategy)
    _check_parts(strategy, base)
    # In a class they would stand before the object's, as a property does.
    usual = built if found is base else vars(base(strategy.privacy))
    hidden = in_own_classes(found, base) & usual.keys()
    shadowed = (held.keys() - built.keys()) & names_of(base)
    fixed = built.keys() - OF_NO_CLAIM - _OF_A_RUN
    changed = {name for name in fixed if held.get(name) is not built[name]}
    after = held["after_release"]
    if after is not strategy and _MADE.get(id(after)) is not after:
        changed.add("after_release")
    check_untouched(found.__name__, overridden(found) | hidden | shadowed | changed, OR_NO_CLAIM)


def _check_parts(strategy: Any, base: Any) -> None:
    """Nor have the plan, what it is made of, or what acts on rates and releases methods of
    somebody's own, which could hang on more than is released; nor the numbers and texts in them."""
    plan = strategy.privacy
    parts: tuple[tuple[str, Any, tuple[type, ...]], ...] = (
        ("privacy", plan, (base.plan_kind,)),
        ("clip_norm", plan.clip_norm, (ClipNorm,)),
        ("participation", plan.participation, _PARTICIPATIONS),
        ("adaptive", plan.adaptive, (NoneType, AdaptiveThreshold)),
        ("local_rate", strategy._rate, (LocalRate,)),
        ("server_step", strategy._step, (ServerStep,)),
        ("output", strategy._output, (OutputIterate,)),
        ("output.judge", strategy._output.judge, (Judge,)),
    )
    known = _PLAIN.union(*(kinds for _, _, kinds in parts))
    for name, one, kinds in parts:
        if type(one) not in kinds:
            allowed = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
            raise ValueError(
                f"{name} is of class {type(one).__name__}, so that no privacy is claimed: use "
                f"{allowed} as published, {OR_NO_CLAIM}"
            )
        for field in () if one is None else fields(one):
            found = type(vars(one)[field.name])
            if found not in known:
                raise ValueError(
                    f"{name}.{field.name} is of class {found.__name__}, so that no privacy is "
                    f"claimed: use Python's own numbers and texts, {OR_NO_CLAIM}"
                )


def seeing_releases_alone(strategy: Any) -> Any:
    """Whose `on_aggregate` is called in the place of `strategy`'s, a PrivateAveraging.

    Under a claim, of an own class, an object of that class that holds a copy of the plan and of
    what its constructor left of its own, as of before the first round, and nothing of the run. So
    what it does after the noise hangs on what is released alone, and its attributes live on from
    one release to the next.

    Raises ValueError, one line, where what the constructor left cannot be pickled.
    """
    found, before = type(strategy), strategy.after_release
    if before is not strategy or not strategy.privacy.claim or found is published(found):
        return before
    alone = object.__new__(found)
    own = vars(strategy).keys() - vars(published(found)(strategy.privacy)).keys()
    _copy_attributes(strategy, alone, {"privacy", *own})
    _MADE[id(alone)] = alone
    return alone


class _Writes(pickle.Pickler):
    """The strategy is written as a name, so that what refers to it refers to its copy; so are its
    observers, which have seen single updates and have no copies."""

    original: Any

    def persistent_id(self, one: Any) -> str | None:
        if one is self.original:
            return _STRATEGY
        return _OBSERVER if any(one is each for each in self.original._observers) else None


class _Reads(pickle.Unpickler):
    copied: Any

    def persistent_load(self, name: str) -> Any:
        return self.copied if name == _STRATEGY else None


def _copy_attributes(original: Any, copied: Any, names: set[str]) -> None:
    """By way of bytes, which share nothing. Python's own copy shares functions with what they close
    over, weak references and whatever says itself how it is copied; functions and classes at the
    top of a module are shared here too, as names."""
    content = io.BytesIO()
    writes, reads = _Writes(content, pickle.HIGHEST_PROTOCOL), _Reads(content)
    writes.original, reads.copied = original, copied
    name, ordered = "", sorted(names)
    try:
        # By the same two for all: what is in two attributes is one object in the copies as well.
        for name in ordered:
            writes.dump(vars(original)[name])
        content.seek(0)
        for name in ordered:
            vars(copied)[name] = reads.load()
    except Exception as error:
        raise ValueError(
            f"{name} of {type(original).__name__} cannot be pickled ({one_line(str(error))}), so "
            "that no privacy is claimed for what it does after the noise: make it data, or a "
            f"function or class at the top of the file, {OR_NO_CLAIM}"
        ) from error


def check_untouched(who: str, touched: Iterable[str], instead: str) -> None:
    """Raises ValueError, one line, where anything of the mechanism is `touched`."""
    names = ", ".join(sorted(touched))
    if names:
        raise ValueError(
            f"{who} overrides {names} of PrivateAveraging, so that no privacy is claimed for it: "
            f"leave the mechanism alone, {instead}"
        )


def overridden(found: type) -> set[str]:
    """What a class has in place of the mechanism's own, special methods included, whoever wrote
    the class that it has it from."""
    base = published(found)
    touched = in_own_classes(found, base) & names_of(base)
    # A metaclass decides what every attribute is, whenever it is asked for.
    return touched if type(found) is type(base) else touched | {"__class__"}


def in_own_classes(found: type, base: type) -> set[str]:
    """The names in all classes of `found` that are none of the published `base`."""
    others = set(found.__mro__) - set(base.__mro__)
    # Every class without such a base has a __dict__ of its own, which Python makes.
    return {
        name
        for one in others
        for name, value in vars(one).items()
        if not isinstance(value, GetSetDescriptorType)
    }


def published(found: type) -> Any:
    """The published class, nearest to `found`, on which it stands."""
    root = load(_ROOT)
    known = {root, *(load(facts.noised) for facts in ALGORITHMS.values() if facts.noised)}
    return next(one for one in found.__mro__ if one in known)


def names_of(base: type) -> set[str]:
    """What is the mechanism of a published class."""
    of_every_class = vars(type("Nothing", (load(_ROOT),), {})).keys() | _OF_EVERY_CLASS
    return set(dir(base)) - of_every_class - _OUTSIDE_THE_MECHANISM
