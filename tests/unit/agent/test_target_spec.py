"""The spec rules: what is taken over from an artifact, what must be allowed, what never comes through."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import NotAllowedError
from agent.spec import (
    ALLOWABLE,
    DEFAULT_CAPABILITIES,
    MASKED_PATHS,
    READONLY_PATHS,
    parse_allow,
    target_spec,
)
from base.errors import UsageError
from oci.errors import ArtifactError
from runtime.errors import IncompatibleError

Json = dict[str, Any]
FILES = {place: Path("/own") / place[5:] for place in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")}
ALL = frozenset(ALLOWABLE)


def ordinary() -> Json:
    """What `ctr run` makes (containerd, pkg/oci/spec.go)."""
    capabilities = sorted(DEFAULT_CAPABILITIES)
    return {
        "ociVersion": "1.2.0",
        "process": {
            "user": {"uid": 0, "gid": 0, "additionalGids": [0]},
            "args": ["sleep", "1"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": {name: capabilities for name in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs"},
        "mounts": [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount(
                "/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"
            ),
            _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
            _mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
            _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            _mount("/sys/fs/cgroup", "cgroup", "ro", "nosuid", "noexec", "nodev"),
            _mount("/run", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        ],
        "linux": {
            "cgroupsPath": "/k8s/other",
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
            "namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount", "network")],
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 136, "access": "rwm"},
                ]
            },
        },
    }


def _mount(place: str, kind: str, *options: str) -> Json:
    return {"destination": place, "type": kind, "source": kind, "options": list(options)}


def build(claimed: Json, *allow: str) -> Json:
    return target_spec(claimed, namespace="default", container_id="c1", files=FILES, allow=parse_allow(allow))


def refused(claimed: Json) -> NotAllowedError:
    with pytest.raises(NotAllowedError) as caught:
        build(claimed)
    assert caught.value.exit_code == 4
    return caught.value


def changed(path: str, value: Any) -> Json:
    """An ordinary spec with the value at `path` ("linux.sysctl") replaced."""
    spec = copy.deepcopy(ordinary())
    *parents, last = path.split(".")
    place = spec
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return spec


# What is harmless comes over


def test_ordinary_container_needs_nothing_allowed() -> None:
    spec = build(ordinary())
    assert spec["process"]["args"] == ["sleep", "1"]
    assert [m["destination"] for m in spec["mounts"]] == [m["destination"] for m in ordinary()["mounts"]]
    assert [m["options"] for m in spec["mounts"]] == [m["options"] for m in ordinary()["mounts"]]


def test_process_keeps_what_it_was_started_with() -> None:
    claimed = ordinary()
    claimed["process"] |= {
        "args": ["/bin/x", "ü", ""],
        "env": ["A=1", "B=", "C=x=y"],
        "cwd": "/srv//data/.",
        "terminal": True,
        "user": {"uid": 1000, "gid": 100, "additionalGids": [4, 24], "umask": 18, "username": "x"},
        "oomScoreAdj": 500,
    }
    process = build(claimed)["process"]
    assert process["args"] == ["/bin/x", "ü", ""]
    assert process["env"] == ["A=1", "B=", "C=x=y"]
    assert process["cwd"] == "/srv/data"
    assert process["terminal"] is True
    assert process["user"] == {"uid": 1000, "gid": 100, "additionalGids": [4, 24], "umask": 18}
    assert process["oomScoreAdj"] == 500


def test_marker_of_a_checkpoint_image_does_not_come_over() -> None:
    claimed = changed("process.env", ["A=1", "CEDANA_CHECKPOINT=abc"])
    assert build(claimed)["process"]["env"] == ["A=1"]


def test_host_name_and_read_only_root_come_over() -> None:
    spec = build({**ordinary(), "hostname": "db-1", "domainname": "x.org", "root": {"readonly": True}})
    assert (spec["hostname"], spec["domainname"]) == ("db-1", "x.org")
    assert spec["root"] == {"path": "rootfs", "readonly": True}


def test_limits_come_over() -> None:
    claimed = ordinary()
    claimed["linux"]["resources"] |= {
        "memory": {"limit": 512 << 20, "swap": -1, "kernelTCP": 5},
        "cpu": {"shares": 512, "quota": 50000, "period": 100000, "cpus": "0-1"},
        "pids": {"limit": 100},
        "unified": {"memory.high": "1"},
        "blockIO": {"weight": 5},
    }
    resources = build(claimed)["linux"]["resources"]
    assert resources["memory"] == {"limit": 512 << 20, "swap": -1}
    assert resources["cpu"] == {"shares": 512, "quota": 50000, "period": 100000}
    assert resources["pids"] == {"limit": 100}
    assert set(resources) == {"memory", "cpu", "pids", "devices"}


def test_fewer_capabilities_stay_fewer() -> None:
    claimed = changed("process.capabilities", {"bounding": ["CAP_CHOWN"]})
    capabilities = build(claimed)["process"]["capabilities"]
    assert capabilities["bounding"] == ["CAP_CHOWN"]
    assert capabilities["effective"] == []


def test_no_capabilities_stay_none() -> None:
    claimed = ordinary()
    del claimed["process"]["capabilities"]
    assert set(map(len, build(claimed)["process"]["capabilities"].values())) == {0}


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("net.ipv4.ip_unprivileged_port_start", "0", True),
        ("net.core.somaxconn", "1024", True),
        ("kernel.shmmax", "1", True),
        ("fs.mqueue.msg_max", "9", True),
        ("kernel.core_pattern", "|/bin/sh", False),
        ("vm.overcommit_memory", "1", False),
        ("net/../kernel/core_pattern", "|/bin/sh", False),
        ("net...kernel.core_pattern", "|/bin/sh", False),
    ],
)
def test_only_sysctls_of_own_namespaces_come_over(name: str, value: str, kept: bool) -> None:
    sysctl = build(changed("linux.sysctl", {name: value}))["linux"]["sysctl"]
    assert sysctl == ({name: value} if kept else {})


def test_network_sysctl_does_not_reach_the_hosts_network() -> None:
    claimed = changed("linux.sysctl", {"net.ipv4.ip_forward": "1"})
    claimed["linux"]["namespaces"] = [n for n in claimed["linux"]["namespaces"] if n["type"] != "network"]
    assert build(claimed, "host-network")["linux"]["sysctl"] == {}


def test_files_that_engines_mount_become_this_nodes_own() -> None:
    claimed = ordinary()
    for place in FILES:
        claimed["mounts"].append(
            {"destination": place, "type": "bind", "source": "/etc/shadow", "options": ["rbind", "rw"]}
        )
    mounts = {m["destination"]: m for m in build(claimed)["mounts"]}
    for place, path in FILES.items():
        assert mounts[place]["source"] == str(path)
        assert mounts[place]["options"] == ["bind", "rprivate"]


# What never comes over


@pytest.mark.parametrize("allow", [(), ("all",)])
def test_hooks_annotations_and_profiles_never_come_over(allow: tuple[str, ...]) -> None:
    claimed = ordinary()
    claimed["hooks"] = {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", "id"]}]}
    claimed["annotations"] = {
        "org.criu.config": "/tmp/evil.conf",
        "ai.cedana.restore-from": "evil/x",
        "cdi.k8s.io/x": "vendor.com/gpu=all",
    }
    claimed["process"] |= {"apparmorProfile": "unconfined", "selinuxLabel": "system_u:system_r:spc_t:s0"}
    claimed["linux"] |= {
        "seccomp": {"defaultAction": "SCMP_ACT_NOTIFY", "listenerPath": "/run/x.sock"},
        "mountLabel": "x",
        "rootfsPropagation": "shared",
        "intelRdt": {"closID": "x"},
        "personality": {"domain": "LINUX32"},
    }
    claimed["vm"] = {"hypervisor": {"path": "/bin/sh"}}
    spec = build(claimed, *allow)
    assert spec["annotations"] == {}
    text = json.dumps(spec)
    for word in (
        "evil",
        "hooks",
        "/bin/sh",
        "cdi",
        "unconfined",
        "spc_t",
        "seccomp",
        "shared",
        "intelRdt",
        "vm",
    ):
        assert word not in text


def test_cgroup_path_and_root_path_are_this_nodes() -> None:
    spec = build({**ordinary(), "root": {"path": "/"}})
    assert spec["linux"]["cgroupsPath"] == "/default/c1"
    assert spec["root"]["path"] == "rootfs"


def test_masked_paths_are_this_nodes() -> None:
    linux = build(ordinary())["linux"]
    assert linux["maskedPaths"] == list(MASKED_PATHS)
    assert linux["readonlyPaths"] == list(READONLY_PATHS)


def test_network_namespace_of_the_other_node_becomes_an_own_one() -> None:
    claimed = ordinary()
    claimed["linux"]["namespaces"][-1]["path"] = "/proc/1/ns/net"
    assert {"type": "network"} in build(claimed)["linux"]["namespaces"]
    assert "/proc/1" not in json.dumps(build(claimed, "all"))


@pytest.mark.parametrize("name", ["pid", "ipc", "uts"])
def test_namespace_shared_with_another_container_cannot_be_restored(name: str) -> None:
    claimed = ordinary()
    for namespace in claimed["linux"]["namespaces"]:
        if namespace["type"] == name:
            namespace["path"] = f"/proc/1/ns/{name}"
    with pytest.raises(IncompatibleError, match=f"shared the {name} namespace"):
        build(claimed, "all")


def test_user_namespace_cannot_be_restored() -> None:
    claimed = ordinary()
    claimed["linux"]["namespaces"].append({"type": "user"})
    with pytest.raises(IncompatibleError, match="user namespace"):
        build(claimed, "all")


def test_score_that_shields_from_the_oom_killer_does_not_come_over() -> None:
    assert build(changed("process.oomScoreAdj", -1000), "all")["process"]["oomScoreAdj"] == 0


# What must be allowed


def _bind(place: str = "/data", source: str = "/srv/data", *options: str) -> Json:
    claimed = ordinary()
    claimed["mounts"].append(
        {"destination": place, "type": "bind", "source": source, "options": list(options) or ["rbind", "rw"]}
    )
    return claimed


def _device(path: str) -> Json:
    return changed(
        "linux.devices", [{"path": path, "type": "c", "major": 10, "minor": 229, "fileMode": 0o666}]
    )


def _rule(**rule: Any) -> Json:
    claimed = ordinary()
    claimed["linux"]["resources"]["devices"].append({"allow": True} | rule)
    return claimed


def _without_namespace(name: str) -> Json:
    claimed = ordinary()
    claimed["linux"]["namespaces"] = [n for n in claimed["linux"]["namespaces"] if n["type"] != name]
    return claimed


def _with_mount(mount: Json) -> Json:
    claimed = ordinary()
    claimed["mounts"] = [m for m in claimed["mounts"] if m["destination"] != mount["destination"]] + [mount]
    return claimed


def _unmasked() -> Json:
    claimed = ordinary()
    claimed["linux"] |= {"maskedPaths": [], "readonlyPaths": None}
    return claimed


WANTS = {
    "bind mount": (_bind(), "mounts", "/srv/data"),
    "bind by option only": (
        _with_mount({"destination": "/x", "source": "/", "options": ["bind"]}),
        "mounts",
        "/x",
    ),
    "bind over a standard place": (
        _with_mount({"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]}),
        "mounts",
        "/proc",
    ),
    "bind that calls itself tmpfs": (
        _with_mount({"destination": "/x", "type": "tmpfs", "source": "/etc", "options": ["rbind"]}),
        "mounts",
        "/etc",
    ),
    "second proc": (_with_mount(_mount("/proc2", "proc")), "mounts", "/proc2"),
    "sysfs elsewhere": (_with_mount(_mount("/tmp/sys", "sysfs", "ro")), "mounts", "/tmp/sys"),
    "devtmpfs": (_with_mount(_mount("/dev", "devtmpfs")), "mounts", "devtmpfs"),
    "block device": (
        _with_mount({"destination": "/disk", "type": "ext4", "source": "/dev/vda", "options": ["rw"]}),
        "mounts",
        "/dev/vda",
    ),
    "overlay of the host": (
        _with_mount({"destination": "/o", "type": "overlay", "source": "x", "options": ["lowerdir=/"]}),
        "mounts",
        "overlay",
    ),
    "shared propagation": (_with_mount(_mount("/run", "tmpfs", "rshared")), "mounts", "rshared"),
    "writable sysfs": (_with_mount(_mount("/sys", "sysfs", "rw")), "privileged", "sysfs"),
    "writable cgroup": (_with_mount(_mount("/sys/fs/cgroup", "cgroup2", "rw")), "privileged", "cgroup2"),
    "unmasked": (_unmasked(), "privileged", "unmasked"),
    "capability": (
        changed("process.capabilities.bounding", ["CAP_SYS_ADMIN"]),
        "capabilities",
        "CAP_SYS_ADMIN",
    ),
    "ambient capability": (changed("process.capabilities.ambient", ["CAP_BPF"]), "capabilities", "CAP_BPF"),
    "inheritable capability": (
        changed("process.capabilities.inheritable", ["CAP_SYS_PTRACE"]),
        "capabilities",
        "CAP_SYS_PTRACE",
    ),
    "device": (_device("/dev/fuse"), "devices", "/dev/fuse"),
    "all devices": (_rule(type="a", access="rwm"), "devices", "*:*"),
    "rule without a type": (_rule(access="rw"), "devices", "*:*"),
    "block rule": (_rule(type="b", major=8, minor=0, access="r"), "devices", "8:0"),
    "rule for all of a major": (_rule(type="c", major=1, access="rw"), "devices", "1:*"),
    "rule with -1 for all": (_rule(type="c", major=-1, minor=-1, access="rw"), "devices", "*:*"),
    "host network": (_without_namespace("network"), "host-network", "network"),
    "host pid": (_without_namespace("pid"), "host-pid", "pid"),
    "host ipc": (_without_namespace("ipc"), "host-ipc", "ipc"),
    "host uts": (_without_namespace("uts"), "host-uts", "uts"),
}


@pytest.mark.parametrize("case", WANTS)
def test_more_than_usual_is_refused_and_says_what_to_allow(case: str) -> None:
    claimed, what, named = WANTS[case]
    error = refused(claimed)
    assert f"--allow {what}" in error.hint
    assert named in error.details


@pytest.mark.parametrize("case", WANTS)
def test_more_than_usual_is_refused_when_everything_else_is_allowed(case: str) -> None:
    claimed, what, _ = WANTS[case]
    with pytest.raises(NotAllowedError):
        build(claimed, *(ALL - {what}))


@pytest.mark.parametrize("case", WANTS)
def test_more_than_usual_is_granted_when_allowed(case: str) -> None:
    claimed, what, _ = WANTS[case]
    build(claimed, what)
    build(claimed, "all")


def test_allowed_bind_mount_keeps_source_and_options() -> None:
    assert build(_bind("/data", "/srv/data", "rbind", "ro"), "mounts")["mounts"][-1] == {
        "destination": "/data",
        "type": "bind",
        "source": "/srv/data",
        "options": ["rbind", "ro"],
    }


def test_allowed_device_and_rule_come_over() -> None:
    claimed = _device("/dev/fuse")
    claimed["linux"]["resources"]["devices"].append(
        {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rw"}
    )
    linux = build(claimed, "devices")["linux"]
    assert [d["path"] for d in linux["devices"]] == ["/dev/fuse"]
    assert linux["resources"]["devices"][-1] == {
        "allow": True,
        "type": "c",
        "major": 10,
        "minor": 229,
        "access": "rw",
    }
    assert linux["resources"]["devices"][0] == {"allow": False, "access": "rwm"}


def test_standard_devices_and_mknod_need_nothing() -> None:
    claimed = _device("/dev/null")
    rules = claimed["linux"]["resources"]["devices"]
    rules += [{"allow": True, "type": kind, "access": "m"} for kind in "bc"]
    rules += [{"allow": True, "type": "c", "major": 136, "minor": -1, "access": "rwm"}]
    assert "devices" not in build(claimed)["linux"]


def test_allowed_host_namespace_is_the_hosts() -> None:
    spec = build(_without_namespace("network"), "host-network")
    assert {"type": "network"} not in spec["linux"]["namespaces"]


def test_privileged_kernel_files_are_open_only_if_they_were() -> None:
    assert build(_unmasked(), "privileged")["linux"]["maskedPaths"] == []
    assert build(ordinary(), "privileged")["linux"]["maskedPaths"] == list(MASKED_PATHS)


def test_everything_refused_is_listed_at_once() -> None:
    claimed = _bind()
    claimed["process"]["capabilities"]["bounding"] = ["CAP_SYS_ADMIN", "CAP_NET_ADMIN"]
    claimed["linux"]["namespaces"] = [{"type": "mount"}]
    error = refused(claimed)
    assert {
        f"--allow {w}" for w in ("mounts", "capabilities", "host-network", "host-pid", "host-ipc", "host-uts")
    } <= {f"--allow {part.strip()}" for part in error.hint.partition(":")[2].split("--allow") if part.strip()}
    assert "CAP_NET_ADMIN" in error.details


def test_long_lists_of_refusals_are_cut() -> None:
    claimed = ordinary()
    claimed["process"]["capabilities"]["bounding"] = [f"CAP_X{chr(65 + n)}" for n in range(26)]
    assert "21 more" in refused(claimed).details


# What is malformed


MALFORMED: dict[str, Any] = {
    "no process": changed("process", None),
    "process is a list": changed("process", []),
    "no arguments": changed("process.args", []),
    "arguments are text": changed("process.args", "sh"),
    "argument is a number": changed("process.args", ["sh", 1]),
    "NUL in an argument": changed("process.args", ["sh\0"]),
    "NUL in the environment": changed("process.env", ["A=\0"]),
    "arguments beyond the limit": changed("process.args", ["x" * (3 << 20)]),
    "too many strings": changed("process.env", ["A=1"] * 70000),
    "relative cwd": changed("process.cwd", "tmp"),
    "cwd that climbs": changed("process.cwd", "/a/../../etc"),
    "negative uid": changed("process.user", {"uid": -1}),
    "uid beyond 32 bits": changed("process.user", {"uid": 1 << 32}),
    "uid is true": changed("process.user", {"uid": True}),
    "group is text": changed("process.user", {"additionalGids": ["0"]}),
    "terminal is text": changed("process.terminal", "yes"),
    "unknown capability": changed("process.capabilities.bounding", ["cap_sys_admin; rm"]),
    "capabilities are a list": changed("process.capabilities", ["CAP_CHOWN"]),
    "mounts are an object": changed("mounts", {}),
    "no proc": changed("mounts", []),
    "too many mounts": changed("mounts", [_mount("/proc", "proc")] * 2000),
    "mount is text": changed("mounts", ["/proc"]),
    "mount on the root": _with_mount(_mount("/", "tmpfs")),
    "mount on the root, written long": _with_mount(_mount("//./", "tmpfs")),
    "relative mount": _with_mount(_mount("proc", "tmpfs")),
    "mount that climbs": _with_mount(_mount("/x/../../etc", "tmpfs")),
    "mount without a place": _with_mount({"destination": None, "type": "tmpfs"}),
    "mount options are text": _with_mount({"destination": "/x", "type": "tmpfs", "options": "rw"}),
    "linux is text": changed("linux", "x"),
    "no mount namespace": _without_namespace("mount"),
    "namespace without a type": changed("linux.namespaces", [{"path": "/x"}]),
    "device path climbs": _device("/dev/../etc/x"),
    "device of no type": changed("linux.devices", [{"path": "/dev/x", "type": "q"}]),
    "device number beyond": changed("linux.devices", [{"path": "/dev/x", "type": "c", "major": 1 << 40}]),
    "rule of no type": _rule(type="zz", access="r"),
    "rule of no access": _rule(type="c", access="rx"),
    "rule allow is text": _rule(allow="yes", type="c", access="r"),
    "memory limit is text": changed("linux.resources.memory", {"limit": "1g"}),
    "memory limit below -1": changed("linux.resources.memory", {"limit": -2}),
    "sysctl is a number": changed("linux.sysctl", {"net.core.somaxconn": 1}),
    "sysctl with a line break": changed("linux.sysctl", {"net.core.somaxconn": "1\n2"}),
    "host name with a slash": {**ordinary(), "hostname": "a/b"},
    "host name with a line break": {**ordinary(), "hostname": "a\nb"},
    "host name too long": {**ordinary(), "hostname": "a" * 65},
    "root is text": {**ordinary(), "root": "rootfs"},
    "readonly is a number": {**ordinary(), "root": {"readonly": 1}},
    "spec is a list": [],
    "key is no text": {**ordinary(), 5: 1},
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("allow", [(), ("all",)])
def test_malformed_spec_is_refused_whatever_is_allowed(case: str, allow: tuple[str, ...]) -> None:
    with pytest.raises(ArtifactError, match="malformed"):
        build(MALFORMED[case], *allow)


def _values() -> st.SearchStrategy[Any]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=8)
        | st.sampled_from(["/proc", "bind", "mount", "CAP_SYS_ADMIN", "/", "..", "all", "c", "rwm", "\0"])
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    )


PATHS = [
    "process",
    "process.args",
    "process.env",
    "process.cwd",
    "process.user",
    "process.capabilities",
    "process.capabilities.bounding",
    "root",
    "mounts",
    "hostname",
    "hooks",
    "annotations",
    "linux",
    "linux.namespaces",
    "linux.devices",
    "linux.resources",
    "linux.resources.devices",
    "linux.resources.memory",
    "linux.sysctl",
    "linux.maskedPaths",
]


@given(path=st.sampled_from(PATHS), value=_values())
def test_any_value_anywhere_is_taken_or_refused_in_words(path: str, value: Any) -> None:
    try:
        spec = build(changed(path, value))
    except (ArtifactError, IncompatibleError):
        return
    assert {c for s in spec["process"]["capabilities"].values() for c in s} <= DEFAULT_CAPABILITIES
    assert not [m for m in spec["mounts"] if m["type"] == "bind"]
    assert "hooks" not in spec
    assert spec["annotations"] == {}
    assert {"pid", "ipc", "uts", "network", "mount"} <= {n["type"] for n in spec["linux"]["namespaces"]}


# --allow itself


def test_allow_takes_lists_and_repetition() -> None:
    assert parse_allow(["mounts,devices", "host-pid"]) == {"mounts", "devices", "host-pid"}


def test_allow_all_is_everything() -> None:
    assert parse_allow(["all"]) == ALL


def test_unknown_allowance_is_a_usage_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError) as caught:
        parse_allow(["mount"])
    assert "mounts" in caught.value.hint
