"""What the attacks on stored content share. Imported inside an attack only: there the test modules are to be found."""
