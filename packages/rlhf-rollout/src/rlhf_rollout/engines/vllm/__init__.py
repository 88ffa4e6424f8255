"""vLLM: the engine, the thread that steps it, and how new weights reach its model."""
