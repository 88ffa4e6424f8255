"""What is read, called or replaced of Ray outside of its documented interface, and the versions on which it was tested.

Another version may rename any of it. `check_ray` looks for all of it before a process joins or starts a cluster.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import ray

from rlhf_data.errors import EngineError
from rlhf_rollout.private_names import missing

TESTED_VERSIONS = ("2.56.1", "2.60.0")  # from old to new
# What Ray starts these for, a run's own cluster does not have: a dashboard, logs in the terminal, nodes to add.
_UNUSED_PARTS = ("start_api_server", "start_log_monitor", "start_monitor")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# By module, or class of a module.
NAMES: Mapping[str, tuple[str, ...]] = {
    "ray._private.node:Node": _UNUSED_PARTS,
    "ray._private.ray_constants": ("ENABLE_RAY_CLUSTER",),
    "ray._private.services": ("ConsolePopen", "canonicalize_bootstrap_address", "find_bootstrap_address"),
    "ray._private.utils": ("get_dashboard_dependency_error", "set_sigterm_handler"),
    "ray._private.worker": ("_global_node",),
    "ray._raylet:AuthenticationTokenLoader": ("instance",),
    "ray._raylet:Config": ("initialize",),
}


def check_ray() -> None:
    """Raise EngineError if this version of Ray lacks what a run needs."""
    if lost := missing(NAMES):
        message = f"Ray {ray.__version__} is untested, and has no {', '.join(lost)}"
        raise EngineError(message, hint=f"install ray=={TESTED_VERSIONS[-1]}, which is tested")


def session_folder() -> str:
    """Return the folder of the session that this process is connected to."""
    return ray._private.worker._global_node.get_session_dir_path()


def process_name(handle: Any) -> str:
    """Return the name of an actor's process."""
    return handle._actor_id.hex()


def last_cluster() -> str | None:
    """Return the address of the cluster that `ray start` last started on this machine, if it was not stopped."""
    return import_module("ray._private.services").find_bootstrap_address(None)


def bootstrap_address(address: str) -> str:
    """Return the host and port that `ray.init` goes to for `address`, which may be "auto" or name this machine.

    Raises ConnectionError or ValueError if there is none.
    """
    return import_module("ray._private.services").canonicalize_bootstrap_address(address)


def outlive_sigterm() -> None:
    """Have Ray leave SIGTERM alone, at which it would end the process before the state of the run is saved."""
    ray._private.utils.set_sigterm_handler = lambda handler: None


def use_token() -> None:
    """Authenticate with this account's Ray token, if there is one; clusters from `ray start` then require it."""
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # Ray before 2.60 asks for a token only where RAY_AUTH_MODE says so
        return
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def changed_start() -> Iterator[None]:
    """Change what `ray.init` starts, for the time of a `with` block.

    Ray does not start `_UNUSED_PARTS`, which import for seconds; the agent of the dashboard, which it needs, starts as
    where no dashboard is installed. Its servers get process groups of their own: this process needs them until its end,
    also after a SIGTERM to its group, as `timeout` sends it. When it is killed, Linux kills them.
    """
    node, services = (import_module(f"ray._private.{name}") for name in ("node", "services"))
    own: dict[tuple[Any, str], Any] = {(node.Node, name): lambda *_, **__: None for name in _UNUSED_PARTS}
    own[ray._private.utils, "get_dashboard_dependency_error"] = ImportError
    own[services, "ConsolePopen"] = partial(services.ConsolePopen, process_group=0)
    with ExitStack() as stack:
        for (owner, name), function in own.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        yield


@contextmanager
def private_cluster() -> Iterator[None]:
    """Let Ray and the workers that it starts listen on the loopback address only, and ask for a token, for the time of
    a `with` block. RAY_AUTH_MODE has no effect on this: such a cluster always has a token."""
    constants = import_module("ray._private.ray_constants")
    loopback = dict.fromkeys(_INTERFACES, "lo") | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    own = loopback | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in own}
    has_network = constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray is imported
    os.environ.update(own)
    constants.ENABLE_RAY_CLUSTER = False
    _read_authentication()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        constants.ENABLE_RAY_CLUSTER = has_network
        _read_authentication()


def _read_authentication() -> None:
    """Let Ray read RAY_AUTH_MODE and RAY_AUTH_TOKEN again, which it does once per process."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
