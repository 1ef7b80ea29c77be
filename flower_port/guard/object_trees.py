"""What an announcement may say of objects that are not there yet.

A message is announced as a tree of object ids, hashes of contents that are uploaded afterwards, and
Flower's stores share equal objects between all nodes. So who can guess an object of somebody else
(a count, the configuration of the next round) may announce it first, as consisting of other parts:
Flower then refuses the honest announcement, or keeps the false tree. Here

* what a ServerApp says of its objects replaces what nodes said of them;
* nodes that contradict each other, or a content that is there, are all heard: each may upload what
  it announced, and the store keeps the tree that it had, until the content is there. So an
  announcement tells nobody what others have stored. ServerApps that pull by `grpc_grid` go by
  contents alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .checks import head_children

_of_a_serverapp: ContextVar[bool] = ContextVar("of_a_serverapp", default=False)
_HEARS_ALL = "_hears_all"


@contextmanager
def announced_by_a_serverapp() -> Iterator[None]:
    """What is announced in this context is a ServerApp's."""
    token = _of_a_serverapp.set(True)
    try:
        yield
    finally:
        _of_a_serverapp.reset(token)


def hear_all() -> None:
    """Change Flower's stores, once in a process."""
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    for store, preregister, put in (
        (SqlObjectStore, _in_sql, _put_in_sql),
        (InMemoryObjectStore, _in_memory, _put_in_memory),
    ):
        if not hasattr(store.preregister, _HEARS_ALL):
            patched: Any = store
            patched.preregister = _around(preregister, store.preregister)
            patched.put = _around(put, store.put)


Flowers = Callable[..., Any]


def _around(ours: Flowers, flowers: Flowers) -> Flowers:
    def method(store: Any, *arguments: Any, **named: Any) -> Any:
        return ours(store, flowers, *arguments, **named)

    setattr(method, _HEARS_ALL, True)
    return method


def _in_memory(store: Any, flowers: Flowers, run_id: int, object_tree: Any) -> list[str]:
    """Flower keeps here what was announced first."""
    with store.lock_store:
        missing: list[str] = flowers(store, run_id, object_tree)
        for part in _parts(object_tree) if _of_a_serverapp.get() else ():
            if not store.store[part.object_id].is_available:
                _replace_in_memory(store, part.object_id, _children(part))
    return missing


def _put_in_memory(store: Any, flowers: Flowers, object_id: str, object_content: bytes) -> None:
    with store.lock_store:
        flowers(store, object_id, object_content)
        _replace_in_memory(store, object_id, sorted(head_children(object_content)))


def _replace_in_memory(store: Any, object_id: str, children: list[str]) -> None:
    before = store.store[object_id].child_object_ids
    if set(before) != set(children) and all(child in store.store for child in children):
        store.store[object_id].child_object_ids = children
        for child in before:
            store.store[child].ref_count -= 1
        for child in children:
            store.store[child].ref_count += 1


def _in_sql(store: Any, flowers: Flowers, run_id: int, object_tree: Any) -> list[str]:
    """Flower raises ValueError here for what was announced otherwise before."""
    with store._mutation_session() as session:
        others = _announced_otherwise(session, object_tree)
        if not others:
            missing: list[str] = flowers(store, run_id, object_tree)
            return missing
        missing = []
        for part in others:
            # They have to be there before they are anybody's parts.
            for child in part.children:
                missing += _in_sql(store, flowers, run_id, child)
            missing.append(part.object_id)
            if _of_a_serverapp.get():
                _replace_in_sql(session, part.object_id, _children(part))
        stored = _as_stored(store, object_tree, {part.object_id for part in others})
        found = {*missing, *flowers(store, run_id, stored)}
        return [part.object_id for part in _parts(object_tree) if part.object_id in found]


def _announced_otherwise(session: Any, tree: Any) -> list[Any]:
    """The parts of a tree, each behind its own, of which the store has other children."""
    from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
    from sqlalchemy import select

    parts = {part.object_id: part for part in _parts(tree)}
    there = select(StoredObject.object_id).where(StoredObject.object_id.in_(list(parts)))
    found = set(session.scalars(there))
    stored: dict[str, set[str]] = {object_id: set() for object_id in found}
    rows = select(ObjectChild.parent_id, ObjectChild.child_id)
    for parent, child in session.execute(rows.where(ObjectChild.parent_id.in_(found))):
        stored[parent].add(child)
    return [p for i, p in parts.items() if i in found and stored[i] != set(_children(p))]


def _put_in_sql(store: Any, flowers: Flowers, object_id: str, object_content: bytes) -> None:
    from flwr.supercore.state.schema.objectstore_models import ObjectChild
    from sqlalchemy import select

    rows = select(ObjectChild.child_id).where(ObjectChild.parent_id == object_id)
    # Flower's lock for changes of trees is taken where one is changed: uploads are many.
    with store.session() as session:
        flowers(store, object_id, object_content)
        children = head_children(object_content)
        if set(session.scalars(rows)) != children:
            with store._mutation_session():
                _replace_in_sql(session, object_id, sorted(children))


def _replace_in_sql(session: Any, object_id: str, children: list[str]) -> None:
    from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
    from sqlalchemy import delete, insert, select, update

    there = select(StoredObject.object_id).where(StoredObject.object_id.in_(children))
    if set(session.scalars(there)) != set(children):
        return
    mine = ObjectChild.parent_id == object_id
    before = list(session.scalars(select(ObjectChild.child_id).where(mine)))
    session.execute(delete(ObjectChild).where(mine))
    for parts, change in ((before, -1), (children, 1)):
        counted = update(StoredObject).where(StoredObject.object_id.in_(parts))
        session.execute(counted.values(ref_count=StoredObject.ref_count + change))
    for child in children:
        session.execute(insert(ObjectChild).values(parent_id=object_id, child_id=child))


def _as_stored(store: Any, tree: Any, others: set[str]) -> Any:
    """The tree with those parts as the store has them."""
    from flwr.proto.message_pb2 import ObjectTree

    if tree.object_id in others:
        return store.get_object_tree(tree.object_id)
    children = [_as_stored(store, child, others) for child in tree.children]
    return ObjectTree(object_id=tree.object_id, children=children)


def _parts(tree: Any) -> Iterator[Any]:
    """Every object of a tree, each behind those of which it consists."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    return iterate_object_tree(tree)


def _children(part: Any) -> list[str]:
    return [child.object_id for child in part.children]
