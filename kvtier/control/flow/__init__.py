"""Movements of blocks: loads, stores, promotions, demotions; called by the plane, touch rows and slots only."""
