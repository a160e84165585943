from sidecar.core.desk import TableView, outline
from sidecar.core.table import Decay, Table, Target, Version


def test_an_outline_is_all_of_a_table_but_its_endpoints() -> None:
    many = tuple(Target(f"http://10.0.0.{n}:8000") for n in range(100))
    versions = (Version("v1", 9000, endpoints=many, schema_hash="ab"), Version("v2", 1000, "triton", many[:1]))
    view = TableView(Table("chat", versions, ("chat-*",), {"a": Decay(0.1, 5)}), 7, 9, "ann", "update", "v2 has 0.1")
    bare = (Version("v1", 9000, schema_hash="ab"), Version("v2", 1000, "triton"))
    expected = TableView(Table("chat", bare, ("chat-*",), {"a": Decay(0.1, 5)}), 7, 9, "ann", "update", "v2 has 0.1")
    assert outline(view) == expected
    assert view.table.versions == versions
