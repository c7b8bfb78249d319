"""What a container's spec says of its network: the namespace it names, sysctls, and nerdctl's annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hooks import netns
from hooks.netconfig import NetworkRecord
from hooks.participant import Finding
from hooks.sockdiag import Address

_NERDCTL_NETWORKS = "nerdctl/networks"
_NERDCTL_ADDRESS = {4: "nerdctl/ip", 6: "nerdctl/ip6"}
_NERDCTL_MAC = "nerdctl/mac-address"


def network_entry(spec: Mapping[str, Any]) -> Any:
    """The network namespace in `linux.namespaces`; None when the container uses the node's."""
    namespaces = spec.get("linux", {}).get("namespaces", [])
    return next((entry for entry in namespaces if entry.get("type") == "network"), None)


def namespace(spec: Mapping[str, Any]) -> tuple[int, int] | None:
    entry = network_entry(spec)
    if entry is None or not entry.get("path"):
        return None
    try:
        return netns.identity(str(entry["path"]))
    except OSError:
        return None


def sysctls(spec: Mapping[str, Any]) -> dict[str, str]:
    """The network settings the target's own spec asks for; runc sets them only where it makes the
    namespace."""
    asked = spec.get("linux", {}).get("sysctl") or {}
    return {name.replace(".", "/"): str(value) for name, value in asked.items() if name.startswith("net.")}


def hook_gives_addresses(spec: Mapping[str, Any]) -> bool:
    """Whether nerdctl's hook runs CNI for this container. runc runs the hooks in a restore too, when the
    namespace is there and before any socket is."""
    hooks = spec.get("hooks") or {}
    named = [hook for kind in ("createRuntime", "prestart") for hook in hooks.get(kind) or []]
    if not any("oci-hook" in (hook.get("args") or []) for hook in named):
        return False
    try:
        networks = json.loads(spec.get("annotations", {}).get(_NERDCTL_NETWORKS, "[]"))
    except ValueError:
        return False
    return any(network not in ("host", "none") and ":" not in network for network in networks)


def ask_nerdctl(spec: dict[str, Any], record: NetworkRecord, needed: set[Address]) -> None:
    """Have nerdctl's hook ask CNI for the addresses that sockets are bound to."""
    annotations = spec.setdefault("annotations", {})
    for address in needed:
        annotations.setdefault(_NERDCTL_ADDRESS[address.version], str(address))
    for interface in record.interfaces:
        if needed & {address.ip for address in interface.addresses} and interface.mac:
            annotations.setdefault(_NERDCTL_MAC, interface.mac)


def probe_hooked(spec: Mapping[str, Any], needed: set[Address]) -> Iterator[Finding]:
    for version, annotation in _NERDCTL_ADDRESS.items():
        wanted = {str(address) for address in needed if address.version == version}
        given = spec.get("annotations", {}).get(annotation)
        if len(wanted) > 1 or (given and wanted - {given}):
            yield Finding(
                f"sockets of the container are bound to {', '.join(sorted(wanted))}, and it is to have"
                f" {given or 'one address'}",
                hint="give it that address (`nerdctl run --ip`), or restore with `--tcp close`",
                fatal=True,
            )
