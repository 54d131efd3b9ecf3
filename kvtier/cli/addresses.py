"""The store that a tool reads: a folder, the address of a server, or a tier of a stack file."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from kvtier.config.load import load_stack, validate
from kvtier.config.strict_yaml import Value, parse_text
from kvtier.errors import ConfigError, UsageError
from kvtier.options import TierOptions, folders_of
from kvtier.tier.inspection import Access, Inspection, Inspectors, InspectsServers, find_server, find_store
from kvtier.tier.registry import discover


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store as a command line names it. `root` is a folder, an address such as `valkey://cache-0:6379/team-a`, or
    with `stack` the name of one of its tiers; `options` are those of the tier at an address."""

    root: str
    stack: str | None = None
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The folder that it is. Raises UsageError for anything else."""
        if self.stack is not None or "://" in self.root:
            raise UsageError("only a folder has others beside it and in it")
        return os.path.abspath(self.root)

    def open(self, access: Access) -> Inspection:
        """The store, to be closed. Raises ConfigError, RootError, UsageError."""
        inspectors = Inspectors.find()
        if self.options and (self.stack is not None or "://" not in self.root):
            raise UsageError("--option is for the address of a server; a folder and a stack file need none")
        if self.stack is not None:
            options = self._tier(self.stack)
            if folders_of(options):
                return find_store(_one_folder(options), access, inspectors)
        elif "://" in self.root:
            options = self._at_address(inspectors)
        else:
            return find_store(os.path.abspath(self.root), access, inspectors)
        inspector = inspectors.get(options.type) if options.type in inspectors.names else None
        if not isinstance(inspector, InspectsServers):
            raise UsageError(f"a tier of type {options.type} keeps nothing that a tool could read")
        return inspector.inspect_server(options, access)

    def _tier(self, stack: str) -> TierOptions:
        tiers = load_stack(stack).tiers
        found = [options for options in tiers if options.label == self.root]
        if not found:
            names = ", ".join(options.label for options in tiers)
            raise UsageError(f"{stack} has no tier {self.root!r} (tiers: {names})")
        return found[0]

    def _at_address(self, inspectors: Inspectors) -> TierOptions:
        kind, options = find_server(self.root, inspectors)
        return validate(discover().get(kind).Options, {**options, **self._given()})

    def _given(self) -> dict[str, Value]:
        """The options on the command line, whose values are spelled as in a stack file."""
        found = {}
        for option in self.options:
            name, equals, value = option.partition("=")
            if not equals:
                raise UsageError("--option takes KEY=VALUE, such as tls=false or password_file=PATH")
            found[name] = parse_text(value)
        return found


def _one_folder(options: TierOptions) -> str:
    folders = folders_of(options)
    if len(folders) > 1:
        raise ConfigError(f"has several folders; give one of them: {', '.join(folders)}", options.label)
    return folders[0]


def store_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments that name a store, handed to a command as `where`, which is None without a ROOT."""

    @click.option("--stack", metavar="FILE", help="A stack file; ROOT is then the name of one of its tiers.")
    @click.option("-o", "--option", "store_options", multiple=True, metavar="KEY=VALUE", help=_OPTION)
    @wraps(command)
    def wrapped(root: str | None, stack: str | None, store_options: tuple[str, ...], **more: Any) -> None:
        if root is None and (stack or store_options):
            raise UsageError("say which ROOT")
        command(where=None if root is None else StoreAddress(root, stack, store_options), **more)

    return wrapped


_OPTION = "An option of the tier at an address, as in a stack file, such as tls=false; may be repeated."
