"""The system call filter as a program: run by an interpreter of its few instructions."""

import errno
import struct

import pytest

from rlpipe.envs.sandbox.seccomp import denied, program

pytestmark = pytest.mark.unit
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
READ = {"x86_64": 0, "aarch64": 63}


def verdict(machine, arch, number):
    """What the kernel would answer to a call."""
    code = program(machine)
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    data, register, at = {0: number, 4: arch}, 0, 0
    while True:
        kind, yes, no, k = steps[at]
        at += 1
        if kind == 0x20:
            register = data[k]
        elif kind == 0x06:
            return k
        else:
            at += yes if {0x15: register == k, 0x35: register >= k}[kind] else no


@pytest.mark.parametrize("machine", ARCH)
def test_listed_calls_fail_with_their_errno_and_all_others_pass(machine):
    listed = dict(denied(machine).values())
    assert len(listed) == len(denied(machine)) == 32
    for number in range(600):
        expected = 0x00050000 | listed[number] if number in listed else 0x7FFF0000
        assert verdict(machine, ARCH[machine], number) == expected
    assert READ[machine] not in listed


def test_both_machines_deny_the_same_calls():
    assert denied("x86_64").keys() == denied("aarch64").keys()


def test_a_foreign_architecture_ends_the_process_and_x32_is_unknown():
    assert verdict("x86_64", 0x40000003, 0) == 0x80000000
    assert verdict("aarch64", ARCH["x86_64"], 0) == 0x80000000
    x32 = denied("x86_64")["keyctl"][0] + 0x40000000
    assert verdict("x86_64", ARCH["x86_64"], x32) == 0x00050000 | errno.ENOSYS


def test_a_machine_without_a_table_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"filter for riscv64, .*: set env.sandbox.backend=docker"):
        program("riscv64")
