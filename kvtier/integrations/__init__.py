"""Engine integrations, one package each; an engine is imported only there."""
