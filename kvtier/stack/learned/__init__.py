"""Files that a stack keeps over a restart beside its blocks: models of policies, write budgets (`state_dir`)."""
