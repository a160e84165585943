"""Pods of any kind, for tests that must hold for all of them."""

from typing import Any

from hypothesis import strategies as st

Object = dict[str, Any]


def _some(required: Object, optional: Object) -> st.SearchStrategy[Object]:
    return st.fixed_dictionaries(required, optional=optional).flatmap(
        lambda made: st.permutations(list(made.items())).map(dict)
    )


def _probe() -> st.SearchStrategy[Object]:
    get = _some(
        {"port": st.sampled_from([8000, 9, "api"]), "path": st.sampled_from(["/health", "ready"])},
        {"scheme": st.just("HTTPS"), "httpHeaders": st.just([{"name": "A", "value": "b: c"}])},
    )
    kinds = st.one_of(
        st.fixed_dictionaries({"httpGet": get}),
        st.fixed_dictionaries({"tcpSocket": st.fixed_dictionaries({"port": st.sampled_from([8000, 8001])})}),
        st.fixed_dictionaries({"exec": st.just({"command": ["true"]})}),
        st.fixed_dictionaries({"grpc": st.just({"port": 8001})}),
    )
    timings = _some({}, {"periodSeconds": st.integers(1, 60), "timeoutSeconds": st.integers(1, 9)})
    return st.tuples(kinds, timings, st.booleans()).map(
        lambda made: {**made[0], **made[1]} if made[2] else {**made[1], **made[0]}
    )


HOOKS = st.sampled_from(
    [
        {"exec": {"command": ["/bin/sh", "-c", "sleep 5\necho 'done'\n"]}},
        {"httpGet": {"port": "api", "path": "/leave"}},
        {"sleep": {"seconds": 7}},
    ]
)

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)


def _engine() -> st.SearchStrategy[Object]:
    args = st.lists(st.sampled_from(["--model", "m", "--host", "0.0.0.0", "--port", "8000", "- x", "yes", "é😀"]))
    return _some(
        {"name": st.just("main"), "image": st.sampled_from(["vllm/vllm-openai:v1", "tritonserver:25", "mii:1"])},
        {
            "command": st.sampled_from([["vllm", "serve"], ["tritonserver"], ["sh", "-c"], None]),
            "args": st.one_of(args, st.none()),
            "ports": st.sampled_from([[{"containerPort": 8000, "name": "api"}], [], None]),
            "livenessProbe": _probe(),
            "readinessProbe": _probe(),
            "lifecycle": st.one_of(
                st.none(),
                st.just({}),
                st.fixed_dictionaries({"preStop": HOOKS}, optional={"postStart": st.just({"sleep": {"seconds": 1}})}),
            ),
            "volumeMounts": st.sampled_from([None, [], [{"name": "m", "mountPath": "/m"}]]),
            "env": st.just([{"name": "A", "value": "1"}, {"name": "B", "value": "x: y # z"}]),
        },
    )


def pods() -> st.SearchStrategy[Object]:
    """A pod's metadata and specification, with an engine."""
    other = st.just({"name": "other", "image": "other:1"})
    return st.fixed_dictionaries(
        {
            "spec": _some(
                {"containers": st.tuples(_engine(), st.lists(other, max_size=1)).map(lambda made: [made[0], *made[1]])},
                {
                    "initContainers": st.sampled_from([None, [], [{"name": "first", "image": "first:1"}]]),
                    "volumes": st.sampled_from([None, [], [{"name": "m", "emptyDir": {}}]]),
                    "terminationGracePeriodSeconds": st.sampled_from([None, 0, 30, 700, 5000]),
                    "hostNetwork": st.booleans(),
                },
            ),
        },
        optional={
            "metadata": st.fixed_dictionaries(
                {"name": st.just("p")},
                optional={
                    "annotations": st.one_of(st.none(), st.dictionaries(st.sampled_from(["a/b", "c"]), TEXTS)),
                    "labels": st.just({"app": "chat"}),
                },
            )
        },
    )
