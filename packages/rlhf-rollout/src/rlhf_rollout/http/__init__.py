"""An HTTP client and server, batches of concurrent calls, and a breaker that pauses calls after failures."""
