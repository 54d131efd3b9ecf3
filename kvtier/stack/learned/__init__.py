"""Policies by name, and files of their models and write budgets (`state_dir`); read at open, written off the loop."""
