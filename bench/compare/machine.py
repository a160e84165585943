"""What the figures were measured on."""

import os
import platform
import re
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
    }
