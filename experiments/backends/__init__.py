"""What runs whole models: the engine here, and others to compare it with."""
