"""Figures of an open stack, the log for operators, the socket that serves both; reads the stack, changes nothing."""
