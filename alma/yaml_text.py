"""YAML of users: plain values, and aliases that cannot grow without bounds."""

from typing import Any

import yaml

_MOST_VALUES = 100_000  # with each alias written out
_MERGE = "tag:yaml.org,2002:merge"


def load(text: str) -> Any:
    """The value of a YAML text. yaml.YAMLError: malformed; aliases that repeat too much or contain
    themselves; a merge key (`<<`) in a mapping that is merged. ValueError: no such date."""
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
    """The number of values of a node, with aliases written out. `sizes`: of nodes that are counted,
    `above`: the nodes that contain this one."""
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
    """The mappings that a mapping takes over by its merge keys."""
    merged: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == _MERGE:
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
    return merged
