"""The command `sidecar`: verbs, their flags, their exit codes (0 ok, 1 refused or failed, 2 usage).

What a verb needs is imported when the verb runs: `sidecar breakers list` must not wait for the relay's imports. Verbs
that ask a running sidecar are in `sidecar.operate`, `sidecar.release` and `sidecar.chronicle`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from sidecar.settings import EMBEDDED_PACKAGE, Here, Settings, UsageError, add_arguments, from_arguments

OK, FAILED, USAGE = 0, 1, 2

_EXAMPLES = """examples:
  sidecar run --upstream http://127.0.0.1:8000
  sidecar run --policy /etc/sidecar --listen :9400 --admin :9401 --log-format json
  sidecar run --policy /etc/sidecar --redis redis://redis:6379
  sidecar demo --fault stall
  sidecar validate policies/
  sidecar simulate --policy chat.yaml --trace monday.jsonl --fault stall:5m:8m:0
  sidecar breakers list
  sidecar breakers open node 127.0.0.1:8000 --for 10m
  sidecar routes set chat v2 --plan canary.yaml
  sidecar canary status --watch
  sidecar model load llama --model-version 2 --expect Paris
  sidecar quota show acme
  sidecar log tail --follow
  sidecar log replay --policy stricter.yaml --since 2h

Every flag of `run` is also an environment variable: --log-format is SIDECAR_LOG_FORMAT.
Exit codes: 0 ok, 1 refused or failed, 2 usage."""

_SIMULATE = """The engines are simulated, the sidecar is not. A trace in jsonl has one request a line:
  {"arrival": 12.5, "prompt_tokens": 800, "output_tokens": 120, "session": "a"}     arrival in seconds; session optional
azure and burstgpt read the columns of those public traces.

A fault has a KIND: step, ramp, cold, reload (slower by the factor STRENGTH; reload refuses first), errors, multi,
stall, gray (of the share STRENGTH of requests), zone (STRENGTH seconds later), outage (refuses); BEGIN and END, in
seconds from the first request, or 90s, 5m, 2h; and PODS: an endpoint, its number from 0, several with commas, or all.

"""

_ROUTES_SET = """Without --weight, --weights and --plan the weights stay; a new version has none, unless it is the
first.
A plan is a document of YAML or JSON (docs/routing.md):
  baseline: v1
  steps: [{weight: 0.05, min: 5m, min_samples: 600}, {weight: 0.5, min: 10m}, {weight: 1}]

"""

_MODEL_LOAD = """Steps, of which each may have its --timeout: look, rest, drain, load, ready, cache, canary, weights,
revert, unload. If one fails, what was done is undone, the old model serves, and the exit code is 1. docs/hot-update.md

"""

Verb = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in `argv` (default: the process's arguments); the exit code. Never raises for what a user typed."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exc:  # argparse leaves by itself: 0 after --help, 2 after a usage error
        return exc.code if isinstance(exc.code, int) else USAGE
    verb: Verb | None = getattr(arguments, "verb", None)
    if verb is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        code = verb(arguments)
        sys.stdout.flush()
        return code
    except UsageError as exc:
        print(f"sidecar: {exc}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # `| head` closed our output; the interpreter's own flush at exit must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidecar",
        description="A sidecar for LLM engines: relays, observes, breaks on evidence.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_const", const=_version, dest="verb", help="as the verb `version`")
    parser.set_defaults(json=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    run = _add(
        verbs,
        "run",
        _run,
        "relay traffic to engines",
        "sidecar run --upstream http://127.0.0.1:8000",
        "sidecar run --policy /etc/sidecar/policies --listen :9400 --admin :9401 --log-format json",
        "sidecar run --policy /etc/sidecar/policies --redis rediss://sidecar:PASSWORD@redis.example:6379",
        "sidecar run --upstream unix:///run/vllm.sock --tls-cert tls.crt --tls-key tls.key",
    )
    add_arguments(run)

    demo = _add(
        verbs,
        "demo",
        _demo,
        "a sidecar and three simulated engines, ready to be called",
        "sidecar demo",
        "sidecar demo --fault stall",
        "sidecar demo --canary --fault slow",
    )
    demo.add_argument(
        "--fault", metavar="KIND", help="let one engine fail, such as stall: see a breaker open and close"
    )
    demo.add_argument(
        "--canary", action="store_true", help="lead a new version to half of the traffic; with --fault it has that"
    )
    add_arguments(demo)

    xds = _add(
        verbs,
        "xds",
        _xds,
        "tell Envoys the routes, and relay nothing",
        "sidecar xds --policy /etc/sidecar/policies --redis redis://redis:6379 --xds :9403",
        "sidecar xds --redis redis://redis:6379 --xds :9403 --control-tls-cert tls.crt --control-tls-key tls.key",
    )
    add_arguments(xds)

    validate = _add(
        verbs,
        "validate",
        _validate,
        "check policy files; tell every error",
        "sidecar validate policies/",
        "sidecar validate chat.yaml --json",
    )
    validate.add_argument("path", metavar="FILE|DIR")
    validate.add_argument("--json", action="store_true", help="print JSON")

    simulate = _add(
        verbs,
        "simulate",
        _simulate,
        "what a policy would have done with recorded traffic, and with faults",
        "sidecar simulate --policy chat.yaml --trace monday.jsonl",
        "sidecar simulate --policy chat.yaml --trace conv.csv --format azure --pods 8 --scale 2",
        "sidecar simulate --policy chat.yaml --trace monday.jsonl --fault step:5m:8m:127.0.0.1:8001:6 --json",
        "sidecar simulate --policy chat.yaml --trace monday.jsonl --fault stall:300:480:0 --fault outage:900:945:all",
        more=_SIMULATE,
    )
    simulate.add_argument("--policy", metavar="FILE|DIR", required=True, help="the policy to try")
    simulate.add_argument("--trace", metavar="FILE", required=True, help="who came when, with how many tokens")
    simulate.add_argument(
        "--format", choices=("jsonl", "azure", "burstgpt"), default="jsonl", help="how the trace is written; jsonl"
    )
    simulate.add_argument("--service", metavar="NAME", help="which of the policy's services is asked; its only one")
    simulate.add_argument("--pods", metavar="N", help="N simulated endpoints instead of the service's own")
    simulate.add_argument(
        "--fault",
        metavar="KIND:BEGIN:END:PODS[:STRENGTH]",
        action="append",
        default=[],
        help="let endpoints fail for a while; may be repeated",
    )
    simulate.add_argument("--scale", metavar="X", default="1", help="X times as many requests a second; 1")
    simulate.add_argument("--limit", metavar="N", default="0", help="only the first N requests; 0: all")
    simulate.add_argument("--seed", metavar="N", default="1", help="the same seed gives the same result; 1")
    simulate.add_argument("--json", action="store_true", help="print JSON")

    _add_inject(verbs)

    status = _add_query(
        verbs,
        "status",
        "status",
        "whether a running sidecar can serve, and why not",
        "sidecar status",
        "sidecar status --live   (the health check of an image)",
    )
    status.add_argument("--live", action="store_true", help="only whether it runs, whatever it can serve")

    drain = _add_query(
        verbs,
        "drain",
        "drain",
        "have a running sidecar take nobody in any more, and end when its last reply has",
        "sidecar drain --wait 10m",
        more="With --wait: 0 once nothing is under way any more or the sidecar has ended, 1 if that took longer.",
    )
    drain.add_argument("--wait", metavar="600s", help="wait for the end, for so long at most")

    _add_query(
        verbs,
        "admission",
        "admission",
        "who waits for a turn, by service and class, and what each endpoint may have",
        "sidecar admission",
        "sidecar admission --json | jq '.[].classes[] | select(.warning)'",
    )

    _add_quota(verbs)

    breakers = verbs.add_parser("breakers", help="the breakers of a running sidecar", allow_abbrev=False)
    actions = breakers.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_query(
        actions,
        "list",
        "breakers",
        "every breaker and its state",
        "sidecar breakers list",
        "sidecar breakers list --json --admin unix:///run/sidecar.sock",
    )
    for action, words, lasts in (
        ("open", "refuse traffic from now on", True),
        ("close", "let traffic flow again", False),
        ("reset", "let traffic flow again, and forget everything that was counted", False),
        ("hold", "leave it as it is, open or closed, whatever is observed", True),
    ):
        order = _add_query(
            actions,
            action,
            "override",
            words,
            f"sidecar breakers {action} node 127.0.0.1:8000{' --for 10m' if lasts else ''}",
            f"sidecar breakers {action} request 'POST /v1/chat/completions' --by ann",
        )
        order.set_defaults(action=action, duration=None)
        order.add_argument("scope", choices=("request", "session", "node"))
        order.add_argument("key", metavar="KEY", help="as `breakers list` shows it: host:port, a session's id, ...")
        order.add_argument("--by", metavar="NAME", help="who orders it (default: the login name)")
        if lasts:
            order.add_argument(
                "--for", metavar="10m", dest="duration", help="how long, 1s to 30d (default: until the next order)"
            )

    log = verbs.add_parser(
        "log", help="what sidecars say to each other: who moved which breaker, and why", allow_abbrev=False
    )
    logs = log.add_subparsers(title="actions", metavar="ACTION", required=True)
    tail = _add_query(
        logs,
        "tail",
        "log",
        "the last records, and on a terminal those that come, until Ctrl-C",
        "sidecar log tail",
        "sidecar log tail --key '127.0.0.1:*' --since 10m -n 1000 --no-follow",
        "sidecar log tail --follow --json | jq .why",
        ask=_log,
        json_help="print a JSON object a line",
    )
    tail.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="go on with those that come (default: on a terminal)",
    )
    tail.add_argument("--key", metavar="GLOB", help="only of these: node:chat/127.0.0.1:8000, or what follows the /")
    show = _add_query(
        logs,
        "show",
        "key",
        "one breaker's history: who said what, why, and because of which request",
        "sidecar log show node 127.0.0.1:8000",
        "sidecar log show node:chat/127.0.0.1:8000 --since 2h --json",
        ask=_log,
    )
    scopes = ("node", "session", "request", "route")
    show.add_argument("scope", metavar="SCOPE", nargs="?", choices=scopes, help=", ".join(scopes))
    show.add_argument("key", metavar="KEY", help="with SCOPE as `breakers list` shows it, else as `log tail` does")
    for verb, most in ((tail, "20"), (show, "1000")):
        verb.add_argument("-n", metavar="N", dest="limit", default=most, help=f"the last N at most; {most}")
        verb.add_argument("--since", metavar="10m", help="none that are older, 1s to 30d")

    again = _add_query(
        logs,
        "replay",
        "replay",
        "what another policy would have made of what the log remembers",
        "sidecar log replay --policy stricter.yaml --since 2h",
        "sidecar log replay --policy stricter.yaml --service chat --since 90m --until 30m --json",
        "sidecar log replay --policy stricter.yaml --since 1d --save monday.ndjson",
        "sidecar log replay --policy laxer.yaml --from monday.ndjson",
        ask=_replay,
    )
    again.add_argument("--policy", metavar="FILE|DIR", required=True, help="the policy to try")
    again.add_argument("--since", metavar="2h", help="how long ago it begins, 1s to 30d (default: 1h; a file: all)")
    again.add_argument("--until", metavar="30m", help="how long ago it ends (default: now; a file: its end)")
    again.add_argument("--service", metavar="NAME", help="only this one of the policy's services")
    again.add_argument("--from", metavar="FILE", dest="file", help="a recording, instead of a running sidecar's log")
    again.add_argument("--save", metavar="FILE", help="keep the recording, for --from")

    _add_routes(verbs)
    _add_canary(verbs)
    _add_model(verbs)

    version = _add(verbs, "version", _version, "the version of this program, and whether it is compiled")
    version.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_inject(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    inject = _add(
        verbs,
        "inject",
        _inject,
        "put the sidecar into the pods of manifests, or take it out again",
        "sidecar inject -f vllm.yaml | kubectl apply -f -",
        "sidecar inject -f vllm.yaml -f more.yaml -o injected.yaml --image registry.example/llm-sidecar:0.1.0",
        "kubectl get deployment vllm -o yaml | sidecar inject -f - --policy chat | kubectl apply -f -",
        "sidecar inject --uninject -f injected.yaml -o vllm.yaml",
    )
    inject.add_argument(
        "-f", "--file", metavar="FILE", dest="files", action="append", required=True, help="manifests; - reads them"
    )
    inject.add_argument("-o", "--output", metavar="FILE", default="-", help="where they go (default: standard output)")
    inject.add_argument("--uninject", action="store_true", help="what was there before, by the pods' annotations")
    webhook = _add(
        verbs,
        "webhook",
        _webhook,
        "inject pods as an API server makes them: a mutating admission webhook",
        "sidecar webhook --tls-cert tls.crt --tls-key tls.key",
        "sidecar webhook --listen :9443 --tls-cert tls.crt --tls-key tls.key --unlabelled --strict",
    )
    webhook.add_argument("--listen", metavar="HOST:PORT", default=":9443", help="where the API server connects; :9443")
    webhook.add_argument("--tls-cert", metavar="FILE", required=True, help="PEM chain, read again when it changes")
    webhook.add_argument("--tls-key", metavar="FILE", required=True, help="PEM key of --tls-cert")
    webhook.add_argument(
        "--unlabelled",
        action="store_true",
        help="also pods without the label sidecar.infra.ai/inject: for a webhook that a namespace's label chooses",
    )
    webhook.add_argument(
        "--strict", action="store_true", help="refuse pods that cannot be injected (default: let them pass, warned)"
    )
    for verb in (inject, webhook):
        verb.add_argument("--image", metavar="IMAGE", help="the sidecar's (default llm-sidecar:VERSION)")
        verb.add_argument(
            "--image-pull-policy", metavar="WHEN", choices=("Always", "IfNotPresent", "Never"), help="IfNotPresent"
        )
        verb.add_argument("--policy", metavar="NAME", help="the policy's ConfigMap (default llm-sidecar-policy)")
        verb.add_argument("--drain", metavar="600s", help="how long a pod's streams may go on at its end")


def _add_routes(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    routes = verbs.add_parser("routes", help="the services of a running sidecar, and who gets what", allow_abbrev=False)
    actions = routes.add_subparsers(title="actions", metavar="ACTION", required=True)
    listed = _add_query(
        actions,
        "list",
        "list",
        "every service, version and endpoint",
        "sidecar routes list",
        "sidecar routes list chat --json",
        ask=_release,
    )
    listed.add_argument("service", metavar="SERVICE", nargs="?", help="only this one")
    update = _add_query(
        actions,
        "set",
        "set",
        "change one version of a service, in all sidecars at once",
        "sidecar routes set chat v2 --weight 0.15",
        "sidecar routes set chat v2 --endpoint http://10.0.0.9:8000 --engine vllm",
        "sidecar routes set chat v3 --endpoint http://10.0.0.8:8000 --engine triton --engine-model llama "
        "--chat-template /models/llama",
        "sidecar routes set chat v2 --weight 0.05 --schema-file chat.desc --update-id build-1207",
        "sidecar routes set chat v2 --plan canary.yaml && sidecar canary status chat --watch",
        "sidecar routes set chat v2 --weights v1=0.5,v2=0.5 --expected 1876546873761794",
        ask=_release,
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
    order.add_argument("--by", metavar="NAME", help="who asks (default: the login name)")


def _add_quota(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    quota = verbs.add_parser("quota", help="what tenants may use, and used", allow_abbrev=False)
    actions = quota.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _add_query(
        actions,
        "show",
        "show",
        "what fits one tenant: limits, what all sidecars used of them, what is left",
        "sidecar quota show acme",
        "sidecar quota show acme --json | jq '.budgets[].windows[] | select(.left == 0)'",
        "sidecar quota show ''                                  requests that name no tenant",
        ask=_budgets,
    )
    show.add_argument("tenant", metavar="TENANT")
    listed = _add_query(
        actions,
        "list",
        "list",
        "every quota, and the tenants that were seen here last",
        "sidecar quota list",
        "sidecar quota list --quota free --limit 1000",
        ask=_budgets,
    )
    listed.add_argument("--quota", metavar="QUOTA", default="", help="only this one")
    listed.add_argument("--limit", metavar="N", default="100", help="so many tenants' budgets at most, 1-1000; 100")


def _add_canary(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    canary = verbs.add_parser("canary", help="canaries that are led to their weight", allow_abbrev=False)
    actions = canary.add_subparsers(title="actions", metavar="ACTION", required=True)
    status = _add_query(
        actions,
        "status",
        "status",
        "how it stands with every service's last canary",
        "sidecar canary status",
        "sidecar canary status chat --watch",
        ask=_release,
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
        order = _add_query(
            actions,
            action,
            action,
            words,
            f"sidecar canary {action} chat",
            f"sidecar canary {action} chat {'--full' if action == 'promote' else '--by ann'}",
            ask=_release,
        )
        order.add_argument(
            "service", metavar="SERVICE", nargs="?", help="default: the only one with a canary under way"
        )
        order.add_argument("--by", metavar="NAME", help="who orders it (default: the login name)")
        if action == "promote":
            order.add_argument("--full", action="store_true", help="to its full weight")


def _add_model(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    model = verbs.add_parser(
        "model", help="models that are loaded and unloaded while traffic flows", allow_abbrev=False
    )
    actions = model.add_subparsers(title="actions", metavar="ACTION", required=True)
    load = _add_query(
        actions,
        "load",
        "load",
        "let a new model serve: loaded, ready, asked, and only then given traffic; or the old one stays",
        "sidecar model load llama --model-version 2 --expect Paris          Triton, from its repository",
        "sidecar model load sql --path /models/sql-v2 --service chat        vLLM, a LoRA adapter",
        "sidecar model load llama --wake --endpoint http://10.0.0.9:8000    vLLM, from its sleep",
        "sidecar model load llama --version v2 --endpoint http://10.0.0.9:8000 --engine vllm --old sleep",
        "sidecar model load llama --version v2 --plan canary.yaml --timeout drain=1h",
        ask=_reload,
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
    unload = _add_query(
        actions,
        "unload",
        "unload",
        "take a model away, after its streams",
        "sidecar model unload llama --endpoint http://10.0.0.9:8000     Triton",
        "sidecar model unload sql --adapter --service chat              vLLM, a LoRA adapter",
        "sidecar model unload llama --sleep --endpoint 10.0.0.9:8000    vLLM goes to sleep",
        "sidecar model unload llama --version v2 --end terminate        its share goes to the others, then it ends",
        ask=_reload,
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
        verb.add_argument("--by", metavar="NAME", help="who asks (default: the login name)")
    status = _add_query(
        actions,
        "status",
        "status",
        "how it stands with every service's last model update",
        "sidecar model status",
        "sidecar model status chat --watch",
        ask=_reload,
    )
    status.add_argument("service", metavar="SERVICE", nargs="?")
    status.add_argument(
        "--watch",
        action="store_true",
        help="tell each step until it is over, of SERVICE also if it is already; exit code 0 if it is done",
    )


def _add(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    verb: Verb,
    words: str,
    *examples: str,
    more: str = "",
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        epilog=more + "\n".join(("examples:", *(f"  {example}" for example in examples))) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(verb=verb)
    return parser


def _add_query(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    query: str,
    words: str,
    *examples: str,
    ask: Verb | None = None,
    json_help: str = "print JSON",
    more: str = "",
) -> argparse.ArgumentParser:
    parser = _add(verbs, name, ask or _ask, words, *examples, more=more)
    parser.set_defaults(query=query)
    parser.add_argument("--admin", metavar="HOST:PORT", help="the sidecar's admin address, or unix:///path")
    parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def _settings(arguments: argparse.Namespace, *, relay: bool = True) -> Settings:
    here = Here(os.uname().nodename, os.getpid(), find_spec(EMBEDDED_PACKAGE) is not None)
    return from_arguments(arguments, os.environ, here, relay=relay)


def _run(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    from sidecar import main as composition

    return composition.run(settings)


def _xds(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, relay=False)
    from sidecar.xds import run

    return run(settings)


def _demo(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    import tempfile

    import msgspec

    from sidecar import demonstration
    from sidecar.demo.script import Kind

    if settings.policy is not None or settings.upstreams:
        raise UsageError("the demo has engines and a policy of its own: leave out --policy and --upstream")
    if arguments.fault is not None and arguments.fault not in set(Kind):
        raise UsageError(f'--fault: "{arguments.fault}" is not one of {", ".join(Kind)}')
    if arguments.data is not None or os.environ.get("SIDECAR_DATA"):
        return demonstration.demo(settings, arguments.fault, arguments.canary)
    # Every demo begins with all breakers closed, and leaves nothing.
    with tempfile.TemporaryDirectory(prefix="llm-sidecar-demo-", ignore_cleanup_errors=True) as data:
        return demonstration.demo(msgspec.structs.replace(settings, data=Path(data)), arguments.fault, arguments.canary)


def _validate(arguments: argparse.Namespace) -> int:
    from sidecar.policy.errors import PolicyErrors
    from sidecar.templates import Templates
    from sidecar.watch import read_policy

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    summary = ""
    try:
        # As `run` does: a template that is missing here may be there, so it is a warning.
        snapshot = Templates(lambda: 0.0, lambda level, event, **fields: None).read(read_policy(Path(arguments.path)))
    except PolicyErrors as exc:
        errors = tuple(str(error) for error in exc.errors)
    else:
        warnings = snapshot.warnings
        endpoints = sum(len(service.endpoints) for service in snapshot.services)
        summary = f"services: {len(snapshot.services)}, endpoints: {endpoints}"
    if arguments.json:
        _print_json({"ok": not errors, "errors": errors, "warnings": warnings})
        return FAILED if errors else OK
    for error in errors:
        print(error)
    for warning in warnings:
        print(f"{arguments.path}: warning: {warning}")
    counted = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
    print(f"{arguments.path}: {counted if errors else f'ok ({summary})'}")
    return FAILED if errors else OK


def _simulate(arguments: argparse.Namespace) -> int:
    from sidecar.simulation import simulate

    return simulate(arguments)


def _inject(arguments: argparse.Namespace) -> int:
    from sidecar.injection import inject

    return inject(arguments)


def _webhook(arguments: argparse.Namespace) -> int:
    from sidecar.webhook import serve

    return serve(arguments)


def _ask(arguments: argparse.Namespace) -> int:
    from sidecar.operate import ask

    return ask(arguments)


def _budgets(arguments: argparse.Namespace) -> int:
    from sidecar.quota import ask

    return ask(arguments)


def _release(arguments: argparse.Namespace) -> int:
    from sidecar.release import ask

    return ask(arguments)


def _reload(arguments: argparse.Namespace) -> int:
    from sidecar.models import ask

    return ask(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    from sidecar.replay import replay

    return replay(arguments)


def _log(arguments: argparse.Namespace) -> int:
    from sidecar.chronicle import read

    return read(arguments)


def _version(arguments: argparse.Namespace) -> int:
    from sidecar import installed

    if arguments.json:
        _print_json({"name": "llm-sidecar", "version": installed.number(), "compiled": installed.compiled()})
    else:
        print(f"sidecar {installed.number()} ({'compiled' if installed.compiled() else 'interpreted'})")
    return OK


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
