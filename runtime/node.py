"""What this node is: kernel, architecture, CPU. Recorded in artifacts, compared before a restore."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTIONS = (
    "3dnow 3dnowext abm adx aes amx_bf16 amx_fp16 amx_int8 amx_tile avx avx2 avx512_4fmaps avx512_4vnniw"
    " avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vp2intersect avx512_vpopcntdq"
    " avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512pf avx512vbmi avx512vl avx_ifma"
    " avx_ne_convert avx_vnni avx_vnni_int8 bmi1 bmi2 clflushopt clwb clzero cmov cx16 cx8 enqcmd erms f16c"
    " fma fma4 fpu fsgsbase fsrm fxsr gfni lahf_lm lwp mmx mmxext monitorx movbe movdir64b movdiri mpx"
    " ospke pclmulqdq pku pni popcnt prefetchwt1 ptwrite rdpid rdrand rdseed rdtscp rtm serialize sha_ni"
    " sse sse2 sse4_1 sse4_2 sse4a ssse3 tbm umip vaes vpclmulqdq waitpkg xop xsave xsavec xsaveopt xsaves"
)
"""Flags of /proc/cpuinfo (kernel, arch/x86/include/asm/cpufeatures.h) that name instructions a program
may have chosen to use; the others (mitigations, virtualisation) do not matter to it."""
_INSTRUCTION_FLAGS = frozenset(_INSTRUCTIONS.split())


@dataclass(frozen=True)
class Node:
    hostname: str
    kernel: str
    arch: str
    """As in OCI platforms: amd64, arm64."""
    cpu_flags: frozenset[str]
    """Only those that name instructions a user program may use."""


def this_node() -> Node:
    uname = os.uname()
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", "")).split()
    instructions = (f for f in flags if uname.machine != "x86_64" or f in _INSTRUCTION_FLAGS)
    return Node(uname.nodename, uname.release, arch(), frozenset(instructions))


def arch() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
