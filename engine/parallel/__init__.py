"""Process groups and collectives: the ground floor of the engine, which imports nothing of it."""
