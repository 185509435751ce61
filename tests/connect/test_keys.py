"""A field of each line, whatever else the lines hold."""

from photon.connect.keys import keys_by


def test_a_field_as_text_or_json_or_none():
    column = b'{"id":"a"}\n{"id":7}\n{"id":null}\n{}\n{"id":{"x":[1]}}\n{"id":"\xc3\xa9"}\n'
    assert keys_by("id")(column) == [b"a", b"7", None, None, b'{"x":[1]}', "é".encode()]


def test_several_fields_make_a_json_array():
    column = b'{"user":{"id":"a"},"n":36}\n{"user":{"id":"a,b"},"n":"c"}\n{"user":{"id":"a"}}\n5\nnull\n'
    assert keys_by("user.id,n")(column) == [b'["a",36]', b'["a,b","c"]', None, None, None]


def test_a_field_within_objects_of_which_some_are_none():
    column = b'{"user":{"id":"a","more":1}}\n{"user":"none"}\n{"user":null}\n{"user":[]}\n{"user":{}}\n'
    assert keys_by("user.id")(column) == [b"a", None, None, None, None]
