"""The commands of the tools, each loaded by the entry point of its name (group `kvtier.commands`)."""
