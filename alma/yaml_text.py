"""Load users' YAML safely: plain values only, and a limit on the size that aliases expand to."""

from typing import Any

import yaml

_MOST_VALUES = 100_000  # most values in a file after aliases are expanded
_MERGE = "tag:yaml.org,2002:merge"


def load(text: str) -> Any:
    """Parse a YAML text.

    Raises yaml.YAMLError if it is malformed, if its aliases expand to too many values or contain
    themselves, or if a mapping that is merged by `<<` has a `<<` itself; ValueError for a date that
    does not exist.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root, {}, set())
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """Count the values in a node, with aliases expanded.

    `sizes` caches the counts of nodes by id; `above` has the ids of the nodes that contain this
    one, to find aliases that contain themselves.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    if id(node) in above:
        raise yaml.YAMLError("an alias that contains itself")
    size = 1
    for part in _parts(node):
        size += _check(part, sizes, above | {id(node)})
    if size > _MOST_VALUES:
        raise yaml.YAMLError(f"more than {_MOST_VALUES:,} values: write out fewer by aliases")
    sizes[id(node)] = size
    return size


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """The nodes directly in a node. yaml.YAMLError: a merge key in a mapping that is merged."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    for merged in _merged(node):
        if _merged(merged):
            raise yaml.YAMLError("<< in a mapping that << merges: write its values out")
    return [part for pair in node.value for part in pair]


def _merged(node: yaml.Node) -> list[yaml.Node]:
    """The mappings that a mapping includes by its merge keys (`<<`)."""
    merged: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == _MERGE:
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
    return merged
