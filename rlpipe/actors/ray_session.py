"""Starts Ray on this machine for one run, or connects to a remote cluster.

A local Ray listens only on loopback and requires a token that only this run has; its files are in a folder
that only this user can read. Its processes have separate sessions. A signal to the driver's process group
therefore reaches only the driver, which then saves its last checkpoint. All of Ray's processes can be ended
even if Ray has failed. A thread watches them, because without gcs_server or raylet no call would ever return.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from rlpipe.config.openmp import wait_choices
from rlpipe.config.run import ClusterMode, Config
from rlpipe.types import CONTINUES

_PREFIX = "rlpipe-ray-"
_SESSIONS = "sessions"  # file with the session ids in the folder, for a later cleanup
_WATCHED = ("gcs_server", "raylet")
LOOK_S, PATIENCE_S = 0.2, 60.0  # seconds between two checks of killed processes, and limit for all checks
_LONGEST_BASE = 25  # Unix sockets have at most 107 characters, and Ray adds some 80 of them


def set_ray_environment(config: Config) -> None:
    """Set the variables that Ray reads on import; must be called before any import of Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # on a busy machine Ray starts slowly

    # Otherwise Ray starts an idle worker for every CPU; an actor's worker is started together with the actor.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")

    # Close a local Ray to other users and to the network.
    if config.cluster.mode is ClusterMode.RAY and not config.cluster.address and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # This makes Ray listen only on loopback.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def close_ray(config: Config) -> None:
    """Protect a local Ray from other users of this machine before it starts; ignore a remote cluster.

    Raises ValueError if Ray has already been imported without a token.
    """
    if not config.cluster.address and "ray" in sys.modules and "RAY_AUTH_TOKEN" not in os.environ:
        raise ValueError(
            "Ray was imported before the run could give it a token, so other users of this machine could "
            "reach it: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before, or import ray later."
        )

    set_ray_environment(config)


def module_path() -> str:
    """Return a PYTHONPATH for child processes, with this rlpipe and the user's paths."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


class RaySession:
    """Ray for a run. The constructor starts it, `stop` ends it. on_death: called with a text if it dies."""

    def __init__(self, config: Config, on_death: Callable[[str], None]) -> None:
        self._stopped = threading.Event()
        self._sessions: dict[int, float] = {}  # process id of the session leader -> its start time
        self._folder: Path | None = None
        self._variables = {"PYTHONPATH": module_path(), "PYTHONWARNINGS": "ignore"} | wait_choices()
        options: dict[str, Any] = {"runtime_env": {"env_vars": self._variables}}

        # A local Ray gets a private folder, and a CPU for every actor even if the machine has fewer. Its
        # processes inherit environment variables; with a runtime_env each worker would wait for an agent to
        # set them.
        if not config.cluster.address:
            self._folder, self._lock = _private_folder()
            run_mode = config.run.half
            actors = config.rollout.workers * run_mode.generates + config.trainer.world_size * run_mode.trains
            options = {
                "num_cpus": max(actors, os.cpu_count() or 1),
                # Use a subfolder, since Ray makes it readable to everybody.
                "_temp_dir": str(self._folder / "r"),
            }

        close_ray(config)
        import ray
        from ray._private import services

        logging.getLogger("ray").setLevel(logging.ERROR)

        # Ray starts its processes through this name; replace it to give each a separate session.
        popen, services.ConsolePopen = services.ConsolePopen, self._started
        try:
            try:
                ray.init(
                    address=config.cluster.address or "local",
                    include_dashboard=False,
                    logging_level="ERROR",
                    configure_logging=False,
                    **options,
                )
            finally:
                services.ConsolePopen = popen
        # Ray may raise a plain Exception.
        except Exception as error:
            self.stop()
            words = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"Ray did not start ({words}). Is the machine overloaded, or "
                f"cluster.address={config.cluster.address!r} wrong? cluster=inline runs without Ray."
            ) from error

        threading.Thread(target=self._watch, args=(on_death,), daemon=True).start()

    def _started(self, *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        """Start a process of Ray in a separate session, and record it; replaces Ray's Popen."""
        kwargs["env"] = {**(kwargs.get("env") or os.environ), **self._variables}
        process = subprocess.Popen(*args, **kwargs, start_new_session=True)
        self._sessions[process.pid] = psutil.Process(process.pid).create_time()

        if self._folder is not None:
            (self._folder / _SESSIONS).write_text(json.dumps(self._sessions))

        return process

    def stop(self, at_once: bool = False) -> None:
        """End Ray and all its processes, and remove its folder. at_once: skip Ray's own shutdown."""
        self._stopped.set()
        ray = sys.modules.get("ray")
        if ray is not None and not at_once:
            ray.shutdown()

        # Kill the processes that Ray has not ended.
        _end(self._sessions)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    def _watch(self, on_death: Callable[[str], None]) -> None:
        processes = {p: p.name() for p in map(psutil.Process, self._sessions) if p.name() in _WATCHED}
        while not self._stopped.wait(1.0):
            dead = [p for p in processes if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE]
            if dead and not self._stopped.is_set():
                name, pid = processes[dead[0]], dead[0].pid
                return on_death(f"Ray's process {name} (pid {pid}) died; the run needs it. {CONTINUES}")


def remove_leftovers() -> None:
    """End the remaining Ray processes of dead runs, and remove their folders."""
    for file in _base().glob(f"{_PREFIX}*/lock"):
        # The folder of another user cannot be opened, and the folder of a living run is locked.
        with suppress(OSError), file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

            # The driver may have been killed before or while it wrote the sessions.
            with suppress(FileNotFoundError, ValueError):
                sessions = json.loads((file.parent / _SESSIONS).read_text())
                _end({int(leader): started for leader, started in sessions.items()})

            shutil.rmtree(file.parent, ignore_errors=True)


def _end(sessions: Mapping[int, float]) -> None:
    """Kill all processes of these sessions."""
    kill_all(lambda: _members(sessions))


def kill_all(living: Callable[[], list[psutil.Process]]) -> None:
    """Kill the processes of `living` until there are none: they end slowly and may have started others."""
    deadline = time.monotonic() + PATIENCE_S
    while (remaining := living()) and time.monotonic() < deadline:
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(remaining, timeout=LOOK_S)


def _members(sessions: Mapping[int, float]) -> list[psutil.Process]:
    """Return the living processes of sessions, except sessions with a leader id that was reused."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            leader = os.getsid(process.pid)
            is_member = leader in sessions and _started_at(leader) in (None, sessions[leader])
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def _started_at(pid: int) -> float | None:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time()
    return None


def _base() -> Path:
    """Return the parent of Ray's folders: the temporary folder, unless its path is too long."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    return base if len(str(base)) <= _LONGEST_BASE else Path("/tmp")


def _private_folder() -> tuple[Path, IO[str]]:
    """Make a folder with mode 0700 that is locked while the run lives; remove the folders of dead runs."""
    remove_leftovers()

    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_base()))
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock
