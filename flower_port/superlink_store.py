"""What `blackthorn server` changes in the SuperLink's store.

It waits for a locked database for minutes, where Flower waits five seconds and then fails the
call. One that cannot be written ends the SuperLink, which is started again once there is room. And
a ServerApp that has died before its run was over is queued again, where Flower lets the
run fail: `server_app/serverapp.py` goes on where the last one stood. So a run outlives each of the
server's processes, the server, and the machine.

This changes Flower's private functions.
"""

import errno
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from logging import WARNING
from pathlib import Path
from typing import Any

from .serverapp_process import FOLDER_VARIABLE, forget, is_alive

# "1": ServerApps that have died are queued again.
GO_ON_VARIABLE = "BLACKTHORN_GO_ON"
# Behind it comes what a person should know, in the SuperLink's log.
NEWS = "blackthorn: "
LOCK_SECONDS = 300
# How a SuperLink ends whose store cannot be written: what SQLite calls it, and our exit status.
# (The log may be on the same disk.)
UNWRITABLE = {"SQLITE_FULL": errno.ENOSPC, "SQLITE_IOERR": errno.EIO}
# A ServerApp that dies so soon, so often in a row, will not get anywhere.
DEATHS, SOON = 5, timedelta(minutes=10)
# As long as one lives it is not taken for dead, also after a time in which nothing could be stored.
_SHORT, _LEASE = timedelta(seconds=30), timedelta(seconds=60)


def adapt_superlink() -> None:
    """In a SuperLink, before it starts."""
    wait_for_locks()
    end_when_unwritable()
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        look_after_serverapps(Path(folder), go_on=os.environ.get(GO_ON_VARIABLE) == "1")


def wait_for_locks(seconds: int = LOCK_SECONDS) -> None:
    """A call waits so long for the database, and for one of its connections."""
    sql = vars(importlib.import_module("flwr.supercore.sql_mixin"))
    pragmas = dict(sql["SQLITE_PRAGMAS"]) | {"busy_timeout": str(1000 * seconds)}
    sql["SQLITE_PRAGMAS"] = tuple(pragmas.items())
    create = sql["create_engine"]

    def create_patient(url: str, **kwargs: Any) -> Any:
        # A store in memory has one connection, for which nobody waits.
        patience = {} if "poolclass" in kwargs else {"pool_timeout": seconds}
        return create(url, **patience, **kwargs)

    sql["create_engine"] = create_patient


def end_when_unwritable(end: Callable[[int], object] = os._exit) -> None:
    """On a full disk this process ends at once, as if it were killed: nothing is half written.

    Did it answer on, rounds would be lost to their deadlines, one after the other.
    """
    from sqlalchemy import event

    sql = vars(importlib.import_module("flwr.supercore.sql_mixin"))
    create = sql["create_engine"]

    def end_if_unwritable(context: Any) -> None:
        name = getattr(context.original_exception, "sqlite_errorname", "")
        for sign, status in UNWRITABLE.items():
            if name.startswith(sign):
                end(status)

    def create_watched(url: str, **kwargs: Any) -> Any:
        engine = create(url, **kwargs)
        event.listen(engine, "handle_error", end_if_unwritable)
        return engine

    sql["create_engine"] = create_watched


def look_after_serverapps(folder: Path, *, go_on: bool) -> None:
    """Queue a run's ServerApp again (or, without `go_on`, fail the run) once it is dead."""
    core = importlib.import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState
    expire = core._cleanup_expired_task_tokens
    deaths: dict[int, int] = {}
    # Every call of an executor looks, each in its thread: a death is found once.
    one_at_a_time = threading.Lock()

    def look_and_expire(state: Any) -> None:
        with one_at_a_time:
            failed = _look(state, folder, deaths, go_on)
        expire(state)
        _say_why(state, failed)

    core._cleanup_expired_task_tokens = look_and_expire


def _look(state: Any, folder: Path, deaths: dict[int, int], go_on: bool) -> list[int]:
    """Renew the claims of ServerApps that live, queue those that died; the tasks to be failed."""
    from flwr.common.logger import log
    from flwr.supercore.constant import TaskType
    from flwr.supercore.corestate import sql_corestate as flower
    from sqlalchemy import select

    model, now = flower.TaskModel, flower.now()
    claimed = select(model).where(
        model.type == TaskType.SERVER_APP, model.token.is_not(None), model.finished_at.is_(None)
    )
    failed, counted = [], dict(deaths)
    with state.session() as session:
        for task in session.scalars(claimed).all():
            if is_alive(folder, task.token):
                # Also of one that is slow to start: Flower would start another beside it.
                if task.active_until < now + _SHORT:
                    task.active_until = now + _LEASE
                continue
            if task.running_at is None:
                # It may not have come so far as to be alive: Flower gives it half a minute.
                continue
            forget(folder, task.token)
            soon = now - task.running_at < SOON
            counted[task.task_id] = counted.get(task.task_id, 0) + 1 if soon else 1
            said = NEWS + f"the ServerApp of run {flower.int64_to_uint64(task.run_id)} has died"
            if go_on and counted[task.task_id] < DEATHS:
                log(WARNING, said + "; the run goes on")
                # A node that waits for the rest of a message would wait for minutes.
                state.cleanup_run(flower.int64_to_uint64(task.run_id))
                task.token = task.active_until = task.starting_at = task.running_at = None
            else:
                log(WARNING, said + "; the run has failed")
                task.active_until = now - _LEASE
                failed.append(task.task_id)
    # Now it is stored: on a full disk the same death would come again and again.
    deaths.update(counted)
    return failed


def _say_why(state: Any, failed: Sequence[int]) -> None:
    """Flower would say that a heartbeat is missing."""
    from flwr.supercore.corestate.sql_corestate import TaskModel
    from sqlalchemy import update

    if failed:
        with state.session() as session:
            why = update(TaskModel).where(TaskModel.task_id.in_(failed))
            session.execute(why.values(details="the ServerApp has died"))
