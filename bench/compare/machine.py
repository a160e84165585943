"""What the figures were measured on, and of which state of the sources."""

import os
import platform
import re
import subprocess
from datetime import date
from pathlib import Path


def machine() -> dict[str, str]:
    """CPU, cores, kernel, Python, load before the run, day."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "CPU": cpu[1] if cpu else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory[1]) / 1048576:.0f} GiB" if memory else "unknown",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "load average before": f"{os.getloadavg()[0]:.2f}",
        "day": date.today().isoformat(),
        "commit": _commit(),
    }


def _commit() -> str:
    """The sources' commit, and whether they had been changed since; unknown outside a repository."""
    here = str(Path(__file__).parent)
    try:
        commit = _git("-C", here, "rev-parse", "--short", "HEAD")
        changed = _git("-C", here, "status", "--porcelain", "--", ":/sidecar")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (", with changes in sidecar/" if changed else "")


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], capture_output=True, text=True, check=True, timeout=30).stdout.strip()
