"""Host memory under control-group and process limits, on fake /proc and /sys/fs/cgroup trees."""

from pathlib import Path

import pytest

from flexengine.hardware.host_memory import host_memory

GIB = 2**30
NO_LIMIT = -1


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A machine with 64 GiB of RAM, 48 available, and no limits yet: folders for /proc and /sys/fs/cgroup."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"
    write_tree(tmp_path, {"proc/meminfo": meminfo, "proc/self/status": f"VmSize:\t{2 * 2**20} kB\n"})
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def test_without_limits_it_is_ram(machine: tuple[Path, Path]):
    assert host_memory(*machine, NO_LIMIT) == (64 * GIB, 48 * GIB)


def test_v2_takes_the_tightest_ancestor_and_counts_page_cache_as_free(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "0::/jobs/one\n"})
    write_tree(
        cgroups,
        {
            "jobs/one/memory.max": "max\n",
            "jobs/one/memory.current": "0\n",
            "jobs/memory.max": f"{32 * GIB}\n",
            "jobs/memory.current": f"{10 * GIB}\n",
            "jobs/memory.stat": f"anon {6 * GIB}\ninactive_file {4 * GIB}\n",
        },
    )
    assert host_memory(proc, cgroups, NO_LIMIT) == (32 * GIB, 26 * GIB)


def test_v1_in_a_container_falls_back_to_the_mount_point(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"})
    write_tree(
        cgroups / "memory",
        {
            "memory.limit_in_bytes": f"{16 * GIB}\n",
            "memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {1 * GIB}\n",
        },
    )
    assert host_memory(proc, cgroups, NO_LIMIT) == (16 * GIB, 14 * GIB)


def test_v1_without_a_limit_is_ignored(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "4:memory:/\n"})
    write_tree(cgroups / "memory", {"memory.limit_in_bytes": "9223372036854771712\n"})
    assert host_memory(proc, cgroups, NO_LIMIT) == (64 * GIB, 48 * GIB)


def test_unlimited_group_above_ram_does_not_raise_the_figure(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "0::/\n"})
    write_tree(cgroups, {"memory.max": f"{512 * GIB}\n", "memory.current": "0\n"})
    assert host_memory(proc, cgroups, NO_LIMIT) == (64 * GIB, 48 * GIB)


def test_address_space_limit_leaves_out_what_is_mapped(machine: tuple[Path, Path]):
    assert host_memory(*machine, 10 * GIB) == (10 * GIB, 8 * GIB)
    assert host_memory(*machine, 1 * GIB) == (1 * GIB, 0)


def test_this_machine():
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
