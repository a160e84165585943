"""Every verb, in the order of the help."""

import argparse

from sidecar.settings import add_arguments
from sidecar.verbs.declare import Verbs, add, add_by, add_json, add_query, group
from sidecar.verbs.releases import add_canary, add_model, add_routes

_EXAMPLES = """examples:
  sidecar run --upstream http://127.0.0.1:8000
  sidecar run --policy /etc/sidecar --listen :9400 --admin :9401 --log-format json
  sidecar run --policy /etc/sidecar --redis redis://redis:6379
  sidecar demo --fault stall
  sidecar validate policies/default.yaml
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


def tree() -> argparse.ArgumentParser:
    """What reads a command line: `verb` of what it gives is the word for who answers, None where none was typed."""
    top = argparse.ArgumentParser(
        prog="sidecar",
        description="A sidecar for LLM engines: relays, observes, breaks on evidence.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="store_const", const="version", dest="verb", help="as the verb `version`")
    top.set_defaults(json=False)
    verbs = top.add_subparsers(title="verbs", metavar="VERB")

    _add_serving(verbs)
    _add_policies(verbs)
    _add_pods(verbs)
    _add_running(verbs)
    _add_quota(verbs)
    _add_breakers(verbs)
    _add_log(verbs)
    add_routes(verbs)
    add_canary(verbs)
    add_model(verbs)

    version = add(verbs, "version", "version", "the version of this program, and whether it is compiled")
    add_json(version)
    return top


def _add_serving(verbs: Verbs) -> None:
    run = add(
        verbs,
        "run",
        "run",
        "relay traffic to engines",
        "sidecar run --upstream http://127.0.0.1:8000",
        "sidecar run --policy /etc/sidecar/policies --listen :9400 --admin :9401 --log-format json",
        "sidecar run --policy /etc/sidecar/policies --redis rediss://sidecar:PASSWORD@redis.example:6379",
        "sidecar run --upstream unix:///run/vllm.sock --tls-cert tls.crt --tls-key tls.key",
    )
    add_arguments(run)

    demo = add(
        verbs,
        "demo",
        "demo",
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

    xds = add(
        verbs,
        "xds",
        "xds",
        "tell Envoys the routes, and relay nothing",
        "sidecar xds --policy /etc/sidecar/policies --redis redis://redis:6379 --xds :9403",
        "sidecar xds --redis redis://redis:6379 --xds :9403 --control-tls-cert tls.crt --control-tls-key tls.key",
    )
    add_arguments(xds)


def _add_policies(verbs: Verbs) -> None:
    validate = add(
        verbs,
        "validate",
        "validate",
        "check policy files; tell every error",
        "sidecar validate policies/default.yaml",
        "sidecar validate chat.yaml --json",
    )
    validate.add_argument("path", metavar="FILE|DIR")
    add_json(validate)

    simulate = add(
        verbs,
        "simulate",
        "simulate",
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
    add_json(simulate)


def _add_pods(verbs: Verbs) -> None:
    inject = add(
        verbs,
        "inject",
        "inject",
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
    webhook = add(
        verbs,
        "webhook",
        "webhook",
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


def _add_running(verbs: Verbs) -> None:
    status = add_query(
        verbs,
        "status",
        "ask",
        "whether a running sidecar can serve, and why not",
        "sidecar status",
        "sidecar status --live   (the health check of an image)",
    )
    status.add_argument("--live", action="store_true", help="only whether it runs, whatever it can serve")

    drain = add_query(
        verbs,
        "drain",
        "ask",
        "have a running sidecar take nobody in any more, and end when its last reply has",
        "sidecar drain --wait 10m",
        more="With --wait: 0 once nothing is under way any more or the sidecar has ended, 1 if that took longer.",
    )
    drain.add_argument("--wait", metavar="600s", help="wait for the end, for so long at most")

    add_query(
        verbs,
        "admission",
        "ask",
        "who waits for a turn, by service and class, and what each endpoint may have",
        "sidecar admission",
        "sidecar admission --json | jq '.[].classes[] | select(.warning)'",
    )


def _add_quota(verbs: Verbs) -> None:
    actions = group(verbs, "quota", "what tenants may use, and used")
    show = add_query(
        actions,
        "show",
        "quota",
        "what fits one tenant: limits, what all sidecars used of them, what is left",
        "sidecar quota show acme",
        "sidecar quota show acme --json | jq '.budgets[].windows[] | select(.left == 0)'",
        "sidecar quota show ''                                  requests that name no tenant",
    )
    show.add_argument("tenant", metavar="TENANT")
    listed = add_query(
        actions,
        "list",
        "quota",
        "every quota, and the tenants that were seen here last",
        "sidecar quota list",
        "sidecar quota list --quota free --limit 1000",
    )
    listed.add_argument("--quota", metavar="QUOTA", default="", help="only this one")
    listed.add_argument("--limit", metavar="N", default="100", help="so many tenants' budgets at most, 1-1000; 100")


def _add_breakers(verbs: Verbs) -> None:
    actions = group(verbs, "breakers", "the breakers of a running sidecar")
    add_query(
        actions,
        "list",
        "ask",
        "every breaker and its state",
        "sidecar breakers list",
        "sidecar breakers list --json --admin unix:///run/sidecar.sock",
        query="breakers",
    )
    for action, words, lasts in (
        ("open", "refuse traffic from now on", True),
        ("close", "let traffic flow again", False),
        ("reset", "let traffic flow again, and forget everything that was counted", False),
        ("hold", "leave it as it is, open or closed, whatever is observed", True),
    ):
        order = add_query(
            actions,
            action,
            "ask",
            words,
            f"sidecar breakers {action} node 127.0.0.1:8000{' --for 10m' if lasts else ''}",
            f"sidecar breakers {action} request 'POST /v1/chat/completions' --by ann",
            query="override",
        )
        order.set_defaults(action=action, duration=None)
        order.add_argument("scope", choices=("request", "session", "node"))
        order.add_argument("key", metavar="KEY", help="as `breakers list` shows it: host:port, a session's id, ...")
        add_by(order, "orders it")
        if lasts:
            order.add_argument(
                "--for", metavar="10m", dest="duration", help="how long, 1s to 30d (default: until the next order)"
            )


def _add_log(verbs: Verbs) -> None:
    logs = group(verbs, "log", "what sidecars say to each other: who moved which breaker, and why")
    tail = add_query(
        logs,
        "tail",
        "log",
        "the last records, and on a terminal those that come, until Ctrl-C",
        "sidecar log tail",
        "sidecar log tail --key '127.0.0.1:*' --since 10m -n 1000 --no-follow",
        "sidecar log tail --follow --json | jq .why",
        json="print a JSON object a line",
        query="log",
    )
    tail.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="go on with those that come (default: on a terminal)",
    )
    tail.add_argument("--key", metavar="GLOB", help="only of these: node:chat/127.0.0.1:8000, or what follows the /")
    show = add_query(
        logs,
        "show",
        "log",
        "one breaker's history: who said what, why, and because of which request",
        "sidecar log show node 127.0.0.1:8000",
        "sidecar log show node:chat/127.0.0.1:8000 --since 2h --json",
        query="key",
    )
    scopes = ("node", "session", "request", "route")
    show.add_argument("scope", metavar="SCOPE", nargs="?", choices=scopes, help=", ".join(scopes))
    show.add_argument("key", metavar="KEY", help="with SCOPE as `breakers list` shows it, else as `log tail` does")
    for verb, most in ((tail, "20"), (show, "1000")):
        verb.add_argument("-n", metavar="N", dest="limit", default=most, help=f"the last N at most; {most}")
        verb.add_argument("--since", metavar="10m", help="none that are older, 1s to 30d")

    again = add_query(
        logs,
        "replay",
        "replay",
        "what another policy would have made of what the log remembers",
        "sidecar log replay --policy stricter.yaml --since 2h",
        "sidecar log replay --policy stricter.yaml --service chat --since 90m --until 30m --json",
        "sidecar log replay --policy stricter.yaml --since 1d --save monday.ndjson",
        "sidecar log replay --policy laxer.yaml --from monday.ndjson",
    )
    again.add_argument("--policy", metavar="FILE|DIR", required=True, help="the policy to try")
    again.add_argument("--since", metavar="2h", help="how long ago it begins, 1s to 30d (default: 1h; a file: all)")
    again.add_argument("--until", metavar="30m", help="how long ago it ends (default: now; a file: its end)")
    again.add_argument("--service", metavar="NAME", help="only this one of the policy's services")
    again.add_argument("--from", metavar="FILE", dest="file", help="a recording, instead of a running sidecar's log")
    again.add_argument("--save", metavar="FILE", help="keep the recording, for --from")
