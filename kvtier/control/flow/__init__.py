"""How blocks move: stores and loads of the engine, promotions and demotions."""
