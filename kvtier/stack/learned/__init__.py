"""Files that a stack keeps over a restart beside its blocks: models of policies, rates of writes (`state_dir`)."""
