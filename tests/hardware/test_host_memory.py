"""Host memory under control-group and process limits, on fake /proc and control-group trees."""

import resource
from pathlib import Path

import pytest

from flexengine.hardware.host_memory import host_memory
from flexengine.hardware.slurm import slurm_memory_bytes

GIB = 2**30
NO_LIMIT = {"RLIMIT_AS": -1, "RLIMIT_DATA": -1, "RLIMIT_RSS": -1}
STATUS = f"VmSize:\t{2 * 2**20} kB\nVmRSS:\t{2**19} kB\nVmData:\t{2**20} kB\n"


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A machine with 64 GiB of RAM, 48 available, and no limits yet: folders for /proc and /sys/fs/cgroup."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n"
    write_tree(tmp_path, {"proc/meminfo": meminfo, "proc/self/status": STATUS})
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
            "jobs/memory.stat": f"anon {6 * GIB}\ninactive_file {GIB}\nactive_file {3 * GIB}\n",
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
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\ntotal_active_file {3 * GIB // 4}\n",
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


@pytest.mark.parametrize(
    ("name", "used_bytes"), [("RLIMIT_AS", 2 * GIB), ("RLIMIT_DATA", 1 * GIB), ("RLIMIT_RSS", GIB // 2)]
)
def test_process_limits_leave_out_what_counts_against_them(machine: tuple[Path, Path], name: str, used_bytes: int):
    assert host_memory(*machine, NO_LIMIT | {name: 10 * GIB}) == (10 * GIB, 10 * GIB - used_bytes)
    assert host_memory(*machine, NO_LIMIT | {name: GIB // 4}) == (GIB // 4, 0)


def test_real_limits_of_the_process_are_read(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    def limits(kind: int) -> tuple[int, int]:
        return (9 * GIB, -1) if kind == resource.RLIMIT_DATA else (-1, -1)

    monkeypatch.setattr(resource, "getrlimit", limits)
    assert host_memory(*machine) == (9 * GIB, 8 * GIB)


def test_container_of_32_gib_on_a_host_of_512_plans_for_32(tmp_path: Path):
    write_tree(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {512 * 2**20} kB\nMemAvailable: {500 * 2**20} kB\n",
            "proc/self/cgroup": "0::/\n",
            "cgroup/memory.max": f"{32 * GIB}\n",
            "cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert host_memory(tmp_path / "proc", tmp_path / "cgroup", NO_LIMIT) == (32 * GIB, 30 * GIB)


def test_memory_high_is_a_wall_too(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "0::/job\n"})
    files = {"job/memory.max": f"{32 * GIB}\n", "job/memory.high": f"{24 * GIB}\n", "job/memory.current": "0\n"}
    write_tree(cgroups, files)
    assert host_memory(proc, cgroups, NO_LIMIT) == (24 * GIB, 24 * GIB)
    write_tree(cgroups, {"job/memory.high": "max\n"})
    assert host_memory(proc, cgroups, NO_LIMIT) == (32 * GIB, 32 * GIB)


def test_swap_adds_nothing(machine: tuple[Path, Path]):
    proc, cgroups = machine
    meminfo = (proc / "meminfo").read_text()
    write_tree(proc, {"meminfo": meminfo + f"SwapTotal: {64 * 2**20} kB\n", "self/cgroup": "0::/job\n"})
    files = {"job/memory.max": f"{8 * GIB}\n", "job/memory.current": "0\n", "job/memory.swap.max": f"{64 * GIB}\n"}
    write_tree(cgroups, files)
    assert host_memory(proc, cgroups, NO_LIMIT) == (8 * GIB, 8 * GIB)


def mounts(*lines: tuple[str, Path, str]) -> str:
    """/proc/self/mountinfo of (root, mount point, "type source options") triples, in between other file systems."""
    rows = [f"3{i} 25 0:3{i} {root} {point} rw,nosuid - {kind}" for i, (root, point, kind) in enumerate(lines)]
    return "\n".join(["22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw", *rows, "a line of another kind"]) + "\n"


@pytest.mark.parametrize("controller", ["v1", "v2"])
def test_hybrid_reads_the_version_that_has_the_memory_controller(machine: tuple[Path, Path], controller: str):
    proc, cgroups = machine
    v1, v2 = cgroups / "memory", cgroups / "unified"
    kinds = (("/", v1, "cgroup cgroup rw,memory"), ("/", v2, "cgroup2 cgroup2 rw"))
    text = mounts(*kinds) if controller == "v1" else mounts(*kinds[1:])
    write_tree(proc, {"self/mountinfo": text, "self/cgroup": "4:memory:/a/b\n1:name=systemd:/a\n0::/a\n"})
    if controller == "v1":
        write_tree(v1, {"a/b/memory.limit_in_bytes": f"{12 * GIB}\n", "a/b/memory.usage_in_bytes": f"{GIB}\n"})
    else:
        write_tree(v2, {"a/memory.max": f"{12 * GIB}\n", "a/memory.current": f"{GIB}\n"})
    assert host_memory(proc, cgroups, NO_LIMIT) == (12 * GIB, 11 * GIB)


def test_container_without_a_namespace_counts_from_what_is_mounted(machine: tuple[Path, Path], tmp_path: Path):
    proc, cgroups = machine
    point = tmp_path / "mounted here"
    escaped = str(point).replace(" ", "\\040")
    write_tree(
        proc,
        {
            "self/mountinfo": mounts(("/docker/abc", Path(escaped), "cgroup cgroup rw,memory")),
            "self/cgroup": "4:memory:/docker/abc/child\n",
        },
    )
    write_tree(
        point,
        {
            "memory.limit_in_bytes": f"{30 * GIB}\n",
            "child/memory.limit_in_bytes": f"{20 * GIB}\n",
            "child/memory.usage_in_bytes": f"{4 * GIB}\n",
        },
    )
    assert host_memory(proc, cgroups, NO_LIMIT) == (20 * GIB, 16 * GIB)


def test_v1_ancestor_that_cannot_be_seen_still_limits(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "4:memory:/job\n"})
    write_tree(
        cgroups / "memory",
        {
            "job/memory.limit_in_bytes": "9223372036854771712\n",
            "job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "job/memory.stat": f"total_inactive_file {GIB}\nhierarchical_memory_limit {16 * GIB}\n",
        },
    )
    assert host_memory(proc, cgroups, NO_LIMIT) == (16 * GIB, 14 * GIB)


def test_path_out_of_the_namespace_is_ignored(machine: tuple[Path, Path]):
    proc, cgroups = machine
    write_tree(proc, {"self/cgroup": "0::/../../other\n"})
    write_tree(cgroups, {"memory.max": f"{7 * GIB}\n", "memory.current": "0\n"})
    assert host_memory(proc, cgroups, NO_LIMIT) == (7 * GIB, 7 * GIB)


def test_this_machine():
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("variables", "expected_gib"),
    [
        ({"SLURM_MEM_PER_NODE": "8192"}, 8),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "6"}, 12),
        ({"SLURM_MEM_PER_GPU": "4096", "SLURM_GPUS_ON_NODE": "2"}, 8),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_NODE": "much"}, None),
        ({}, None),
    ],
)
def test_slurm_grants_memory(variables: dict[str, str], expected_gib: int | None):
    granted = slurm_memory_bytes({"SLURM_JOB_ID": "7", **variables})
    assert granted == (None if expected_gib is None else expected_gib * GIB)
    assert slurm_memory_bytes(variables) is None


def test_slurm_bounds_what_is_free(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "16384")
    assert host_memory(*machine, NO_LIMIT) == (16 * GIB, 16 * GIB - 2**29)
