"""MII's RESTful gateway, unmodified, before a deployment that MII did not start itself.

The gateway asks `mii.client` where its deployment is, which reads a file that `mii.serve` leaves in MII's cache. Here
MII's own function writes that file, with the servicer's port in it, and MII's own launcher then runs the gateway.

Runs inside the engine environment: `python -P deepspeed_gateway.py DEPLOYMENT FOLDER SERVICER_PORT PORT`. The
environment's MII_CACHE_PATH says where the file goes, and must be this process's alone.
"""

import sys

# These live in the engine environment only, where nothing type-checks.
from mii.config import MIIConfig  # type: ignore[import-not-found]
from mii.launch.multi_gpu_server import main as launch  # type: ignore[import-not-found]
from mii.score import create_score_file  # type: ignore[import-not-found]

PROCESSES = 32  # MII's default: each request is a fork, so many at once


def main(deployment: str, folder: str, servicer_port: int, port: int) -> None:
    """Serves until it is told to end: GET /terminate, or a signal."""
    create_score_file(
        MIIConfig(
            deployment_name=deployment,
            model_config={"model_name_or_path": folder},
            port_number=servicer_port,
            enable_restful_api=True,
            restful_api_host="127.0.0.1",
            restful_api_port=port,
            restful_processes=PROCESSES,
        )
    )
    flags = f"--restful-gateway --restful-gateway-host 127.0.0.1 --restful-gateway-procs {PROCESSES}".split()
    sys.argv[1:] = [*flags, "--deployment-name", deployment, "--restful-gateway-port", str(port)]
    launch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
