"""Which controllers a machine lends, by its files; groups of both versions, by what is written into them."""

import pytest

from rlpipe.envs.sandbox import cgroup

pytestmark = pytest.mark.unit
MOUNT = "30 20 0:2{n} {root} {at} rw,relatime - {kind} {kind} rw{options}"


def machine(tmp_path, membership, *mounts):
    """A /proc/self that says so. mounts: (kind, root, mount point, options)."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(membership)
    lines = [
        MOUNT.format(n=n, kind=kind, root=root, at=at, options=options)
        for n, (kind, root, at, options) in enumerate(mounts)
    ]
    (proc / "mountinfo").write_text("\n".join([*lines, "40 20 0:50 / /tmp rw - tmpfs tmpfs rw"]))
    return proc


def unified(directory, handed):
    directory.mkdir(parents=True)
    (directory / "cgroup.controllers").write_text("cpu memory pids")
    (directory / "cgroup.subtree_control").write_text(handed)
    return directory


def test_version_1_gives_each_controller_below_our_own_group(tmp_path):
    for name in ("memory/ours", "cpu", "blkio"):
        (tmp_path / name).mkdir(parents=True)
    mounts = [("cgroup", "/", tmp_path / name, f",{name}") for name in ("memory", "cpu", "blkio")]
    membership = "4:memory:/ours\n3:blkio:/\n2:cpu:/\n0::/\n"
    found = cgroup.parents(machine(tmp_path, membership, *mounts))
    assert found == {"memory": tmp_path / "memory" / "ours", "cpu": tmp_path / "cpu"}


def test_a_mount_that_shows_a_part_of_a_hierarchy_is_read_from_there(tmp_path):
    (tmp_path / "memory").mkdir()
    mount = ("cgroup", "/docker/abc", tmp_path / "memory", ",memory")
    proc = machine(tmp_path, "4:memory:/docker/abc\n", mount)
    assert cgroup.parents(proc) == {"memory": tmp_path / "memory"}


def test_a_group_outside_of_the_part_that_is_mounted_gives_nothing(tmp_path):
    proc = machine(tmp_path, "4:memory:/elsewhere\n", ("cgroup", "/docker/abc", tmp_path, ",memory"))
    assert cgroup.parents(proc) == {}


def test_version_2_gives_the_nearest_group_that_hands_all_controllers_down(tmp_path):
    root = unified(tmp_path / "unified", "cpu memory pids io")
    above = unified(root / "app.slice", "cpu memory pids")
    unified(above / "run.scope", "")
    proc = machine(tmp_path, "0::/app.slice/run.scope\n", ("cgroup2", "/", root, ""))
    assert cgroup.parents(proc) == dict.fromkeys(("memory", "pids", "cpu"), above)


def test_version_2_that_hands_nothing_down_gives_nothing(tmp_path):
    root = unified(tmp_path / "unified", "")
    assert cgroup.parents(machine(tmp_path, "0::/\n", ("cgroup2", "/", root, ""))) == {}


def test_a_group_of_version_2_has_its_bounds_by_their_names_there():
    given = {"memory": 1 << 20, "processes": 7, "cores": 1.5}
    written = [cgroup.bounds(name, True, **given) for name in cgroup.CONTROLLERS]
    assert written == [
        {"memory.max": "1048576", "memory.swap.max": "0"},
        {"pids.max": "7"},
        {"cpu.max": "150000 100000"},
    ]


def test_a_group_that_cannot_be_bounded_is_not_left(tmp_path):
    with pytest.raises(OSError):
        cgroup.Group("x", {"memory": tmp_path / "absent"}, memory=1, processes=1, cores=1.0)
    assert list(tmp_path.iterdir()) == []
