"""aiohttp end to end, as a careful user of it would relay: its low-level server, one client session, uvloop.

A yardstick for trusted load on one machine, not a proxy to be used. What is tuned: no application or router, no access
log, no limit of connections, no decompression, no cookies, chunks passed on as they come.
"""

import argparse
import asyncio
import contextlib
import gc
import signal

import aiohttp
import uvloop
from aiohttp import web

HOP_BY_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "te", "upgrade", "host"))


async def serve(port: int, upstream_port: int) -> None:
    upstream = f"http://127.0.0.1:{upstream_port}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:

        async def relay(request: web.BaseRequest) -> web.StreamResponse:
            headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
            body = await request.read()
            url = upstream + request.raw_path
            async with session.request(request.method, url, headers=headers, data=body) as answer:
                kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP]
                if answer.content_length is not None:
                    whole = await answer.read()
                    return web.Response(status=answer.status, headers=kept, body=whole)
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response

        runner = web.ServerRunner(web.Server(relay, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        await stop.wait()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", type=int, required=True, help="port on 127.0.0.1")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(serve(args.port, args.upstream))


if __name__ == "__main__":
    main()
