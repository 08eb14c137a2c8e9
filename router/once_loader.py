"""YAML that says each thing once."""

from __future__ import annotations

from typing import Any

import yaml


class OnceLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, as of two rules for one tenant neither may be lost; and so is
    an alias, with which a short file becomes one that takes minutes to check; and a merge (<<), which hides a key."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not taken", None)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merges (<<) are not taken", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
