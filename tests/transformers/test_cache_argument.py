"""The name in which a model takes a cache is found by what it takes, so that it may be of either generation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_counts import some
from support_transformers import forward, gemma, llama, needs_transformers, new_cache, prompt, same_bytes, stack

from kvtier.engines.transformers import AsyncPrefixCache, cache_argument
from kvtier.errors import ConfigError

pytestmark = needs_transformers


def of_old_code(model: Any) -> Any:
    """A model whose code was written for the name before transformers 5.24."""
    inner, name = model.forward, cache_argument(model)

    def old(input_ids: Any, past_key_values: Any = None, **more: Any) -> Any:
        return inner(input_ids=input_ids, **{name: past_key_values}, **more)

    model.forward = old
    return model


def of_new_code(model: Any) -> Any:
    """A model whose code was written for the name since transformers 5.24."""
    inner, name = model.forward, cache_argument(model)

    def new(input_ids: Any, cache: Any = None, **more: Any) -> Any:
        return inner(input_ids=input_ids, **{name: cache}, **more)

    model.forward = new
    return model


def wrapped(model: Any) -> Any:
    """A model in a wrapper that hands on whatever it is given, as adapters do."""
    inner = model.forward

    def anything(**more: Any) -> Any:
        return inner(**more)

    model.forward = anything
    return model


@pytest.mark.parametrize("make", some([llama, gemma], 1))
@pytest.mark.parametrize("code", [lambda model: model, of_old_code, of_new_code, wrapped])
async def test_a_model_is_run_by_the_name_that_it_takes(make: Callable[[], Any], code: Callable[[Any], Any]) -> None:
    tokens, expected = prompt(48), new_cache()
    plain, model = make(), code(make())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(plain, tokens, expected)
        async with AsyncPrefixCache(stack(), model) as prefixes:
            cache, _ = await prefixes.restore(tokens)
            forward(model, tokens, cache)
            assert same_bytes(cache, expected)
            assert await prefixes.save(tokens, cache) == 48
            assert (await prefixes.restore(tokens))[1] == 32


def test_the_name_is_that_of_the_models_code() -> None:
    assert cache_argument(of_old_code(llama())) == "past_key_values"
    assert cache_argument(of_new_code(llama())) == "cache"
    assert cache_argument(wrapped(llama())) == cache_argument(llama())


async def test_a_model_that_takes_no_cache_is_refused_by_name() -> None:
    model = llama()
    model.forward = lambda input_ids: input_ids
    message = "LlamaForCausalLM takes neither cache nor past_key_values"
    with pytest.raises(ConfigError, match=message):
        cache_argument(model)
    with pytest.raises(ConfigError, match=message):
        await AsyncPrefixCache(stack(), model).open()
