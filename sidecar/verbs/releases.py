"""The verbs that change what serves: routing tables, canaries, models."""

import argparse

from sidecar.verbs.declare import Verbs, add_by, add_query, group

_ROUTES_SET = """Without --weight, --weights and --plan the weights stay; a new version has none, unless it is the
first.
A plan is a document of YAML or JSON (docs/routing.md):
  baseline: v1
  steps: [{weight: 0.05, min: 5m, min_samples: 600}, {weight: 0.5, min: 10m}, {weight: 1}]
"""

_MODEL_LOAD = """Steps, of which each may have its --timeout: look, rest, drain, load, ready, cache, canary, weights,
revert, unload. If one fails, what was done is undone, the old model serves, and the exit code is 1. docs/hot-update.md
"""


def add_routes(verbs: Verbs) -> None:
    """`routes list` and `set`."""
    actions = group(verbs, "routes", "the services of a running sidecar, and who gets what")
    listed = add_query(
        actions,
        "list",
        "release",
        "every service, version and endpoint",
        "sidecar routes list",
        "sidecar routes list chat --json",
    )
    listed.add_argument("service", metavar="SERVICE", nargs="?", help="only this one")
    update = add_query(
        actions,
        "set",
        "release",
        "change one version of a service, in all sidecars at once",
        "sidecar routes set chat v2 --weight 0.15",
        "sidecar routes set chat v2 --endpoint http://10.0.0.9:8000 --engine vllm",
        "sidecar routes set chat v3 --endpoint http://10.0.0.8:8000 --engine triton --engine-model llama "
        "--chat-template /models/llama",
        "sidecar routes set chat v2 --weight 0.05 --schema-file chat.desc --update-id build-1207",
        "sidecar routes set chat v2 --plan canary.yaml && sidecar canary status chat --watch",
        "sidecar routes set chat v2 --weights v1=0.5,v2=0.5 --expected 1876546873761794",
        more=_ROUTES_SET,
    )
    update.add_argument("service", metavar="SERVICE")
    update.add_argument("version", metavar="VERSION")
    traffic = update.add_argument_group("traffic")
    traffic.add_argument(
        "--weight", metavar="0.15", help="the version's share of new sessions, 0-1; others keep theirs"
    )
    traffic.add_argument("--weights", metavar="v1=0.85,v2=0.15", default="", help="the whole split instead; sums to 1")
    traffic.add_argument("--plan", metavar="FILE", help="lead it to its weight step by step, judged; - reads it")
    engine = update.add_argument_group("engines")
    engine.add_argument(
        "--endpoint",
        metavar="URL",
        action="append",
        default=[],
        help="an engine of the version; may be repeated, and replaces those it has",
    )
    engine.add_argument("--no-endpoints", action="store_true", help="take away those it has")
    engine.add_argument("--zone", metavar="ZONE", default="", help="where these endpoints are")
    engine.add_argument("--engine", metavar="KIND", help="vllm, triton or deepspeed; of a new version it must be said")
    engine.add_argument(
        "--front",
        metavar="KIND",
        help="which of the engine's servers they are: triton's generate or openai, deepspeed's openai, api_server or"
        " gateway (default: the first; '' goes back to it)",
    )
    engine.add_argument(
        "--engine-model", metavar="NAME", help="what a translated engine calls its model; '': what clients call it"
    )
    engine.add_argument(
        "--chat-template",
        metavar="PATH",
        help="file or model folder, on every sidecar, that makes chats prompts for engines that have none; '': none",
    )
    engine.add_argument(
        "--model",
        metavar="GLOB",
        action="append",
        default=[],
        help="of a service that no policy file names: a model"
        " that it serves; may be repeated (default: the service's name)",
    )
    schema = update.add_argument_group("schema")
    schema.add_argument("--schema-hash", metavar="HEX", default="", help="SHA-256 of the service's schema")
    schema.add_argument("--schema-file", metavar="FILE", help="the schema itself, to be hashed here")
    schema.add_argument(
        "--compatible",
        metavar="HEX",
        action="append",
        default=[],
        help="another version's hash that clients of this one may meet; may be repeated",
    )
    schema.add_argument(
        "--signature", metavar="NAME=VALUE", action="append", default=[], help="kept, and not read; may be repeated"
    )
    order = update.add_argument_group("order")
    order.add_argument(
        "--expected", metavar="N", default="0", help="only if the table has this version, as `routes list` shows it"
    )
    order.add_argument("--update-id", metavar="ID", default="", help="the same id twice is one update: safe to repeat")
    add_by(order, "asks")


def add_canary(verbs: Verbs) -> None:
    """`canary status`, and an operator's words about one."""
    actions = group(verbs, "canary", "canaries that are led to their weight")
    status = add_query(
        actions,
        "status",
        "release",
        "how it stands with every service's last canary",
        "sidecar canary status",
        "sidecar canary status chat --watch",
    )
    status.add_argument("service", metavar="SERVICE", nargs="?")
    status.add_argument(
        "--watch", action="store_true", help="tell each change until it is over; exit code 0 if it was promoted"
    )
    for action, words in (
        ("promote", "let it go to its next step now"),
        ("abort", "take its weight away now"),
        ("hold", "leave it where it is, whatever is observed"),
        ("resume", "judge it again and lead it on"),
    ):
        order = add_query(
            actions,
            action,
            "release",
            words,
            f"sidecar canary {action} chat",
            f"sidecar canary {action} chat {'--full' if action == 'promote' else '--by ann'}",
        )
        order.add_argument(
            "service", metavar="SERVICE", nargs="?", help="default: the only one with a canary under way"
        )
        add_by(order, "orders it")
        if action == "promote":
            order.add_argument("--full", action="store_true", help="to its full weight")


def add_model(verbs: Verbs) -> None:
    """`model load`, `unload` and `status`."""
    actions = group(verbs, "model", "models that are loaded and unloaded while traffic flows")
    load = add_query(
        actions,
        "load",
        "models",
        "let a new model serve: loaded, ready, asked, and only then given traffic; or the old one stays",
        "sidecar model load llama --model-version 2 --expect Paris          Triton, from its repository",
        "sidecar model load sql --path /models/sql-v2 --service chat        vLLM, a LoRA adapter",
        "sidecar model load llama --wake --endpoint http://10.0.0.9:8000    vLLM, from its sleep",
        "sidecar model load llama --version v2 --endpoint http://10.0.0.9:8000 --engine vllm --old sleep",
        "sidecar model load llama --version v2 --plan canary.yaml --timeout drain=1h",
        more=_MODEL_LOAD,
    )
    load.add_argument("--path", metavar="DIR", default="", help="a LoRA adapter: its folder, as the engine sees it")
    load.add_argument("--wake", action="store_true", help="wake up engines that sleep")
    load.add_argument(
        "--version", metavar="VERSION", default="", help="its endpoints are this version's, of the routes"
    )
    repository = load.add_argument_group("Triton's repository (without --path, --wake and --version)")
    repository.add_argument("--model-version", metavar="N", default="", help="this version of it (default: as it says)")
    repository.add_argument("--config", metavar="FILE", help="this configuration, as JSON, instead of the repository's")
    version = load.add_argument_group("with --version")
    version.add_argument("--engine", metavar="KIND", choices=("vllm", "triton", "deepspeed"), help="of a new version")
    version.add_argument("--front", metavar="KIND", help="which server of its engine, of new endpoints")
    version.add_argument("--engine-model", metavar="NAME", help="what the engine calls its model, of new endpoints")
    version.add_argument("--chat-template", metavar="PATH", help="what makes prompts of chats, of new endpoints")
    version.add_argument("--weight", metavar="0.5", help="its share of new sessions at the end (default: 1)")
    version.add_argument("--plan", metavar="FILE", help="lead it there step by step, judged; - reads it")
    version.add_argument(
        "--old",
        choices=("leave", "unload", "sleep", "terminate"),
        default="leave",
        help="what the old endpoints do when their streams have ended: Triton may unload, vLLM sleep, MII's gateway"
        " terminate (default: leave them)",
    )
    canary = load.add_argument_group("its canary")
    canary.add_argument("--canary-prompt", metavar="TEXT", default="", help="what the new model is asked first")
    canary.add_argument(
        "--canary-tokens", metavar="N", default="0", help="how many it may answer (1; with --expect 16)"
    )
    canary.add_argument("--expect", metavar="TEXT", default="", help="what its answer must contain")
    load.add_argument(
        "--in-rotation",
        action="store_true",
        help="let endpoints serve while their model changes, and by the new one before its canary was answered",
    )
    unload = add_query(
        actions,
        "unload",
        "models",
        "take a model away, after its streams",
        "sidecar model unload llama --endpoint http://10.0.0.9:8000     Triton",
        "sidecar model unload sql --adapter --service chat              vLLM, a LoRA adapter",
        "sidecar model unload llama --sleep --endpoint 10.0.0.9:8000    vLLM goes to sleep",
        "sidecar model unload llama --version v2 --end terminate        its share goes to the others, then it ends",
    )
    unload.add_argument("--adapter", action="store_true", help="a LoRA adapter")
    unload.add_argument("--sleep", action="store_true", help="let the engine sleep")
    unload.add_argument("--level", choices=("0", "1", "2"), default="1", help="how deep; 1")
    unload.add_argument("--version", metavar="VERSION", default="", help="this version of the routes")
    unload.add_argument(
        "--end",
        choices=("leave", "unload", "sleep", "terminate"),
        default="leave",
        help="what the version's endpoints do when their streams have ended (default: nothing)",
    )
    unload.add_argument("--anyway", action="store_true", help="also if nobody else serves then")
    for verb in (load, unload):
        verb.add_argument("model", metavar="NAME", help="the model, as the engine calls it")
        verb.add_argument("--service", metavar="SERVICE", help="whose (default: the one that serves NAME)")
        verb.add_argument(
            "--endpoint",
            metavar="URL",
            action="append",
            default=[],
            help="where, as `routes list` shows it or as a URL; may be repeated (default: all that can)",
        )
        verb.add_argument(
            "--timeout",
            metavar="STEP=10m",
            action="append",
            default=[],
            help="how long a step may take, 1s to 30d; may be repeated",
        )
        verb.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True, help="tell each step; yes")
        add_by(verb, "asks")
    status = add_query(
        actions,
        "status",
        "models",
        "how it stands with every service's last model update",
        "sidecar model status",
        "sidecar model status chat --watch",
    )
    status.add_argument("service", metavar="SERVICE", nargs="?")
    status.add_argument(
        "--watch",
        action="store_true",
        help="tell each step until it is over, of SERVICE also if it is already; exit code 0 if it is done",
    )
