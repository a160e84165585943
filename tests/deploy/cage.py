"""Makes this mount namespace a container's and becomes the command: `python cage.py UID GID COMMAND...`, as root.

Everything is read only, `/tmp` and `/run` are new and empty, with the folder of the operators' socket. Then user and
group are given up for those of the image, and with them every capability and the way to get one. The one line that it
prints is the time of this machine's monotonic clock when it became the command, and the processor time till then.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SOCKET_FOLDER = Path("/run/llm-sidecar")
OTHERS = ("/proc", "/sys", "/dev", "/tmp", "/run")
"""The kernel's, and those that are new here: what was mounted in them is out of sight."""
HOME = Path("/root")


def main(uid: str, gid: str, *command: str) -> None:
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    # The interpreter and the image's folder may lie where something new is laid over; root's home may be nobody else's
    # to see: there are these in it, and nothing else.
    kept = [Path(sys.base_prefix), Path(os.environ["PATH"].partition(":")[0]).parent]
    kept = [folder for folder in kept if folder.is_relative_to("/tmp") or folder.is_relative_to(HOME)]
    for number, folder in enumerate(kept):
        aside(number).mkdir()
        mount("--rbind", str(folder), str(aside(number)))
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    if any(folder.is_relative_to(HOME) for folder in kept):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(HOME))
    for number, folder in enumerate(kept):
        folder.mkdir(parents=True)
        mount("--move", str(aside(number)), str(folder))
        aside(number).rmdir()
        mount("-o", "remount,bind,ro", str(folder))
    SOCKET_FOLDER.mkdir()
    SOCKET_FOLDER.chmod(0o777)  # an emptyDir's
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in points:
        if f"/{point.split('/')[1]}" not in OTHERS:
            mount("-o", "remount,bind,ro", point)
    become = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", "--bounding-set", "-all"]
    become += ["--inh-caps", "-all", "--no-new-privs"]
    shutil.rmtree("/run/mount", ignore_errors=True)  # what mount(8) notes
    print(time.monotonic(), time.process_time(), flush=True)
    os.execvp(become[0], [*become, *command])


def aside(number: int) -> Path:
    """Where a folder waits until what hides it is there."""
    return Path(f"/run/kept-{number}")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
