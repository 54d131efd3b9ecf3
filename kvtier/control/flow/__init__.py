"""Movements of blocks: stores and loads of the engine, promotions and demotions; touches rows and slots only."""
