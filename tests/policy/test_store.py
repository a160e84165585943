from sidecar.policy.load import single
from sidecar.policy.store import PolicyStore


def test_a_swap_replaces_the_snapshot_whole_and_counts() -> None:
    first, second = single(["http://a"], 1), single(["http://b"], 2)
    store = PolicyStore(first)
    assert (store.current, store.generation, store.failed, store.last_error) == (first, 0, 0, None)
    kept = store.current
    store.swap(second)
    assert store.current is second
    assert kept is first
    assert store.generation == 1


def test_a_refusal_keeps_what_is_in_force_until_a_good_one_comes() -> None:
    first, second = single(["http://a"], 1), single(["http://b"], 2)
    store = PolicyStore(first)
    store.refuse("a.yaml:1: $: bad")
    assert (store.current, store.generation, store.failed) == (first, 0, 1)
    assert str(store.last_error) == "a.yaml:1: $: bad"
    store.swap(second)
    assert (store.current, store.failed) == (second, 1)
    assert store.last_error is None
