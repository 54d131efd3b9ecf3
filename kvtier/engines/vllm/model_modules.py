"""The modules of the models that a worker of vLLM has built, found from its attention layers."""

import gc
from collections import defaultdict

from torch import nn
from vllm.config import VllmConfig


def attention_layers(config: VllmConfig) -> dict[str, nn.Module]:
    """The layers that vLLM looks up by name in each step: attention, state space, experts."""
    layers = config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Module)}


def root_modules(config: VllmConfig) -> list[nn.Module]:
    """The models, drafts included, that hold those layers. vLLM hands a connector the layers alone, and a module does
    not know its parent: so the parents are looked for among all objects. Takes about 0.2 s; call it once.

    Empty if no model is found around some layer.
    """
    parents: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            for child in found._modules.values():
                parents[id(child)].append(found)
    roots: dict[int, nn.Module] = {}
    seen: set[int] = set()
    todo = list(attention_layers(config).values())
    if not all(parents[id(layer)] for layer in todo):
        return []
    while todo:
        module = todo.pop()
        if id(module) not in seen:
            seen.add(id(module))
            todo += parents[id(module)]
            if not parents[id(module)]:
                roots[id(module)] = module
    return list(roots.values())
